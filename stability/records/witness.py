"""A run's witness: what really executed, by stretch, and whether that contradicts the run's label.

A stretch is what one process trained: from the start or a checkpoint to the end or the checkpoint
that the next process went on from. For each it is on record which dtypes were multiplied where
(`probe.executed`), how the numeric switches stood before the user's modules were imported, when
training began and at its end, the sources of those modules, and the bits of a few fixed
computations (`probe.known_answers`).

A manifest says what a run was asked to be; a witness says what it was. The label is a claim about
the products of the linear layers, forward and backward: `bf16-mixed` multiplies BF16, whatever the
weights are kept in, but for the few that autocast lowers nowhere; a module with a precision of its
own is held against that. Attentions have rounding points
of their own and optimizers their own casts: both are recorded, and compared between the runs of a
pair (`analysis.pair_contract`), but no precision names them. An emulated precision multiplies FP32
tensors whose values lie on another grid, which dtypes don't show.

Leaves out how all this is found. The seal is one of integrity: a witness that was made up with care
is not told from a true one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args

from stability.records.executed_row import ExecutedRow, Part, Pass
from stability.records.module_sources import UNHASHED
from stability.records.record_types import Count, Rule
from stability.records.sealed_json import read_record, write_sealed

__all__ = [
    "DTYPE_NAMES",
    "ExecutedRow",
    "Label",
    "Part",
    "Pass",
    "Stretch",
    "Witness",
    "contradictions",
    "gap",
    "read_witness",
    "write_witness",
]

DTYPE_NAMES = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8 (e4m3)",
    "float8_e5m2": "FP8 (e5m2)",
}
"""torch's names of dtypes in a reader's words."""

_OPERANDS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "64-true": "float64",
    "32-true": "float32",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "16-mixed": "float16",
}
"""What the linear layers of each native precision multiply, of all modules or of single ones; an
emulated one multiplies FP32."""
_LOWERED = ("bf16", "fp16", "bf16-mixed", "16-mixed")
"""The precisions that are autocast's."""

_EXACT = frozenset(("int64", "int32", "int16", "bool"))
"""What is multiplied without rounding, if nothing else is in the product."""

_REAL = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The dtype of a complex number's parts."""

_NOT_LOWERED = frozenset(
    f"aten::{name}"
    for name in (
        *("dot", "vdot", "_trilinear", "_cdist_forward", "_cdist_backward", "_euclidean_dist"),
        "_compute_linear_combination",
    )
)
"""Products that autocast leaves in FP32 or in their operands' widest dtype on every device, as it
does all of complex numbers (aten/src/ATen/autocast_mode.h)."""

_BITS_OF_FP32 = 17.0
"""Fewer correct bits than this, and an FP32 product has rounded its operands: of the 24 of FP32 a
known answer loses one or two to its sum of 320 terms, while TF32 keeps 11 of each operand and BF16
8, of which the mean over a sum wins back two or three."""

_BITS_RULE = "empty, or hold the number fp32_product_bits"

SDPA_BACKENDS = {
    "_safe_softmax": "math",  # the math path has no operator of its own, and nobody else calls this
    "flash": "flash",
    "efficient": "efficient",
    "cudnn": "cudnn",
}
"""The backend of `scaled_dot_product_attention` by what the names of its operators contain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What one process trained, as JSON values."""

    first: int
    """The number of updates made before."""
    last: int
    """The number of updates made when it ended, or at the checkpoint that the next went on from."""
    unproven: str = ""
    """Why dtypes were not looked at; empty if they were."""
    steps: list[int] = field(default_factory=list)
    """The updates that were looked at, counted from 0."""
    executed: list[list[Any]] = field(default_factory=list)
    """Distinct rows of `ExecutedRow`, field by field, sorted."""
    switches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How switches stood `before_imports`, `at_start` of training, and `at_end`."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Known answers `at_start` and `at_end`; without the latter where a kill ended it."""
    modules: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the user's own sources that were imported or executed by its end
    (`module_sources`); `UNHASHED` of what has none."""
    git: dict[str, str] = field(default_factory=dict)
    """The commit and changes of the folder that the process was started in (`git_state`)."""

    @property
    def rows(self) -> list[ExecutedRow]:
        """The distinct operators."""
        return [
            ExecutedRow(part, module, during, operator, tuple(operands), result)
            for part, module, during, operator, operands, result in self.executed
        ]

    @property
    def values(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        # not asdict, which copies all that lies in it, a millisecond each time
        return {each.name: getattr(self, each.name) for each in fields(self)}


_FIELDS = {each.name for each in fields(Stretch)}


class _StretchValues(TypedDict):
    """A stretch as it is written, field by field."""

    first: Count
    last: Count
    unproven: str
    steps: list[Count]
    executed: list[Annotated[list[Any], Rule("a row of ExecutedRow", lambda row: _is_row(row))]]
    switches: dict[str, dict[str, Any]]
    answers: dict[str, Annotated[dict[str, Any], Rule(_BITS_RULE, lambda x: _has_bits(x))]]
    modules: dict[str, str]
    git: dict[str, str]


_NO_OTHERS = Rule("a stretch's fields and no others", lambda found: found.keys() <= _FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """A run's stretches, in order; their JSON values are what a checkpoint keeps of them."""

    stretches: list[Annotated[_StretchValues, _NO_OTHERS]]

    @property
    def all(self) -> list[Stretch]:
        """The stretches as objects."""
        return [Stretch(**each) for each in self.stretches]

    @property
    def rows(self) -> list[ExecutedRow]:
        """The distinct operators of all stretches, sorted."""
        return sorted({row for stretch in self.all for row in stretch.rows})

    @property
    def unproven(self) -> str:
        """Why some stretch says nothing of dtypes; empty if all do."""
        return next((why for each in self.all if (why := _why_unproven(each))), "")

    @property
    def unhashed(self) -> list[str]:
        """The names of what was executed and has no source that could be hashed, sorted."""
        each = (item for stretch in self.all for item in stretch.modules.items())
        return sorted({name for name, sha256 in each if sha256 == UNHASHED})

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The distinct known answers of all stretches: one, where every host computed alike."""
        every = [each for stretch in self.all for each in stretch.answers.values()]
        return [each for index, each in enumerate(every) if each not in every[:index]]

    @property
    def backends(self) -> list[str]:
        """The backends that `scaled_dot_product_attention` took, sorted."""
        names = [row.operator for row in self.rows if row.part == "attention"]
        fused = [name for name in names if "_dot_product_" in name or "_safe_softmax" in name]
        return sorted({b for n in fused for what, b in SDPA_BACKENDS.items() if what in n})


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a run's config says that it executes."""

    arm: str
    precision: str
    implementation: str
    """What the attention was resolved to, e.g. `sdpa:math`."""
    is_partial: bool = False
    """Whether some layers or passes attend as the baseline does."""
    default: str = ""
    """What modules without a precision of their own compute in; empty is all of `precision`."""
    of_module: Callable[[str], str] = lambda module: ""
    """The precision of a module by its dotted path, where it has one of its own; else empty."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Numeric switches that the config sets, by name, and how they are to stand."""
    rounds_fp32: bool = False
    """Whether the config asks for FP32 products of rounded operands."""


def write_witness(path: Path, witness: Witness) -> None:
    """Write `witness`, whole or not at all, with its checksum."""
    write_sealed(path, asdict(witness))


def read_witness(path: Path) -> Witness:
    """Return the witness at `path`; ValueError, one line that names the file, if it is not whole.

    Stretches are looked into as well: the seal can't tell that somebody wrote other fields.
    """
    return read_record(path, Witness, writer="`stability run`", kind="witness")


def _is_row(found: list[Any]) -> bool:
    if len(found) != len(fields(ExecutedRow)):
        return False
    part, module, during, operator, operands, result = found
    texts = (module, operator, result, *(operands if isinstance(operands, list) else [None]))
    is_known = part in get_args(Part) and during in get_args(Pass)
    return is_known and all(isinstance(text, str) for text in texts)


def _has_bits(answers: dict[str, Any]) -> bool:
    return not answers or type(answers.get("fp32_product_bits")) in (int, float)


def _why_unproven(stretch: Stretch) -> str:
    if stretch.unproven or stretch.first == stretch.last:
        return stretch.unproven
    seen = any(row.part == "linear" for row in stretch.rows)
    return "" if seen else f"no product of updates {stretch.first} to {stretch.last} was looked at"


def gap(witness: Witness, first: int, last: int) -> str:
    """Return which updates from `first` to `last` no stretch covers; empty if all are covered."""
    at = first
    for stretch in witness.all:
        if stretch.first != at:
            return f"nothing is on record of updates {at} to {stretch.first}"
        at = stretch.last
    return "" if at == last else f"nothing is on record of updates {at} to {last}"


def contradictions(witness: Witness, label: Label) -> list[str]:
    """Return a sentence for each way in which a witness contradicts the label of its run."""
    found = [*_wrong_products(witness, label), *_wrong_backend(witness, label)]
    found += [*_wrong_switches(witness, label), *_wrong_arithmetic(witness, label)]
    return [*found, *_unsteady(witness, label)]


def _wrong_products(witness: Witness, label: Label) -> Iterable[str]:
    """Give what the linear layers multiplied, if that is not what the precision says."""
    rows: dict[str, list[ExecutedRow]] = {}
    for row in witness.rows:
        if row.part == "linear":
            rows.setdefault(label.of_module(row.module), []).append(row)
    for own, of_these in rows.items():
        precision = own or label.default or label.precision.partition(",")[0]
        wrong = [row for row in of_these if not _is_as_labelled(row, precision)]
        if wrong:
            yield _wrong_sentence(label.arm, precision, wrong, len(of_these), of_modules=bool(own))


def _wrong_sentence(
    arm: str, precision: str, wrong: list[ExecutedRow], count: int, *, of_modules: bool
) -> str:
    """Return what products of one precision multiplied instead."""
    dtypes = {dtype for row in wrong for dtype in row.operands}
    dtypes -= {_OPERANDS.get(precision, "float32")}
    names = " and ".join(sorted(DTYPE_NAMES.get(dtype, dtype) for dtype in dtypes))
    first = wrong[0]
    if of_modules:
        return (
            f"arm {arm} is labelled {precision} in module {first.module or 'the model itself'}, "
            f"which multiplied {names} in its {first.during}"
        )
    which = "its linear layers"
    if len(wrong) < count:
        which = f"{len(wrong)} of {count} kinds of product in its linear layers"
        names += f" (first: {first.module or 'the model itself'}, {first.during})"
    return f"arm {arm} is labelled {precision}, {which} multiplied {names}"


def _is_as_labelled(row: ExecutedRow, precision: str) -> bool:
    """Return whether a product of a linear layer has the operands that the precision says."""
    expected = _OPERANDS.get(precision, "float32")
    operands = {_REAL.get(dtype, dtype) for dtype in row.operands}
    if operands == {expected} or operands <= _EXACT:
        return True
    is_left = row.operator in _NOT_LOWERED or not _REAL.keys().isdisjoint(row.operands)
    return precision in _LOWERED and is_left and operands <= {expected, "float32"}


def _wrong_backend(witness: Witness, label: Label) -> Iterable[str]:
    family, _, backend = label.implementation.partition(":")
    if family != "sdpa" or not backend or label.is_partial:
        return
    others = [taken for taken in witness.backends if taken != backend]
    if others:
        yield (
            f"arm {label.arm} is labelled {label.implementation}, its attention took the backend "
            f"{' and '.join(others)}"
        )


def _wrong_switches(witness: Witness, label: Label) -> Iterable[str]:
    for stretch in witness.all:
        for name, expected in label.switches.items():
            found = stretch.switches.get("at_start", {}).get(name, expected)
            if found != expected:
                yield (
                    f"arm {label.arm} asks for {name} {expected!r}, it was {found!r} when training "
                    "began"
                )
                return


def _wrong_arithmetic(witness: Witness, label: Label) -> Iterable[str]:
    default = label.default or label.precision.partition(",")[0]
    precisions = {label.of_module(row.module) for row in witness.rows if row.part == "linear"}
    multiplied = {_OPERANDS.get(each or default, "float32") for each in {*precisions, ""}}
    if "float32" not in multiplied or label.rounds_fp32:
        return
    bits = [answers["fp32_product_bits"] for answers in witness.answers if answers]
    if bits and min(bits) < _BITS_OF_FP32:
        yield (
            f"arm {label.arm} is labelled {label.precision}, its FP32 products keep "
            f"{min(bits):.0f} bits: a switch rounds what they multiply"
        )


def _unsteady(witness: Witness, label: Label) -> Iterable[str]:
    """Give the first switch or known answer that did not stay what it was when training began."""
    began: dict[str, Any] = {}
    for stretch in witness.all:
        for name, value in _moments(stretch):
            if began.setdefault(name, value) != value:
                yield (
                    f"arm {label.arm}: {name} was {began[name]!r} when training began, {value!r} "
                    f"by update {stretch.last}"
                )
                return


def _moments(stretch: Stretch) -> Iterable[tuple[str, Any]]:
    """Give all that must stay as it is while a run trains, by name and in the order of time."""
    for moment in ("at_start", "at_end"):
        for what, values in (("switch", stretch.switches), ("known answer", stretch.answers)):
            for name, value in values.get(moment, {}).items():
                yield f"{what} {name}", value
    for name, sha256 in stretch.modules.items():
        yield f"the source of module {name}", sha256[:16]
