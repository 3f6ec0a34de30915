"""What two runs executed, as their witnesses tell: each held against its label, then one another.

A label is what a manifest says: it may have been written by hand. Where the witness contradicts it
the runs are no pair, whatever their configs say. Between two runs the dtypes may differ in what the
declared change touches; switches and known answers must be equal. What has no witness is not on
record, and neither is what a compiled run multiplied. Everything here only reads.

A command has no label, so nothing contradicts one: two witnesses of commands are held against one
another alone. A changed flag, variable or commit may change all that is executed; what it changed
is said in words.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stability.analysis.environment_contract import NAMES_OF_MODULES, moved_by
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import touches
from stability.config.commands import is_command
from stability.config.model import layer_names
from stability.config.precision import RECIPE, Precision, parse_precision
from stability.config.schema import DEFAULT_MATMUL
from stability.records.manifest import ENDED, Manifest
from stability.records.paths import RunPaths
from stability.records.run_files import file_damage
from stability.records.witness import (
    DTYPE_NAMES,
    ExecutedRow,
    Label,
    Part,
    Witness,
    contradictions,
    gap,
    read_witness,
)

__all__ = [
    "Testimony",
    "claims_of",
    "other_answer",
    "testimony_of",
    "witness_breach",
    "witness_gap",
    "witness_lines",
]

CHANGED_BY: dict[Part, tuple[str, ...]] = {
    "linear": ("precision",),
    "attention": ("precision", "attention"),
    "optimizer": ("precision", "optimizer"),
    # an attention's hooks may be among them
    "unowned": ("precision", "attention"),
}
"""Axes that are meant to change the dtypes of a part."""

_OF_CODE = ("program", "flags", "config", "env", "ref", "setup", "python")
"""What of a command may change all that is executed: of a flag nobody can tell."""


@dataclass(frozen=True, kw_only=True)  # no slots: a baseline's rows are made once for all its pairs
class Testimony:
    """What is on record of what one run executed."""

    manifest: Manifest
    witness: Witness | None
    lacking: str = ""
    """What is not on record, in words."""
    is_damaged: bool = False
    """Whether the manifest lists a witness, and there is none that can be read."""

    @cached_property
    def rows(self) -> Mapping[str, Set[ExecutedRow]]:
        """The distinct operators by part; empty without a witness."""
        found: dict[str, set[ExecutedRow]] = {}
        for row in self.witness.rows if self.witness else ():
            found.setdefault(row.part, set()).add(row)
        return found

    @cached_property
    def unproven(self) -> str:
        """Why some stretch says nothing of dtypes; empty if all do."""
        return self.witness.unproven if self.witness else ""

    @cached_property
    def line(self) -> ProofLine:
        """What comes of the witness, held against the run's label and the updates it has made."""
        return _own_line(self)


def testimony_of(paths: RunPaths, manifest: Manifest) -> Testimony:
    """Read what a run executed, once its file is known to be the one that the manifest lists."""
    run = f"{manifest.arm}, seed {manifest.seed}"
    if paths.name_of(paths.witness) not in manifest.files:
        why = ", which has no witness" if manifest.state in ENDED else ""
        return Testimony(manifest=manifest, witness=None, lacking=f"what {run} executed{why}")
    witness = None
    try:
        wrong = file_damage(paths, manifest, paths.witness)
        witness = None if wrong else read_witness(paths.witness)
    except (ValueError, OSError) as error:
        wrong = str(error)
    said = f"what {run} executed: {paths.witness.name} {wrong}" if wrong else ""
    return Testimony(manifest=manifest, witness=witness, lacking=said, is_damaged=bool(wrong))


def witness_lines(
    first: Testimony, second: Testimony, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Give a line for each run's own witness, then what both have executed beside one another."""
    for each in (first, second):
        yield each.line
    if first.witness and second.witness:
        is_free = is_command(first.manifest.config) and touches(differences, _OF_CODE)
        yield from _dtype_lines(first, second, differences, is_free=is_free)
        yield from _beside(first.witness, second.witness, differences, is_free=is_free)


def witness_breach(first: Testimony, second: Testimony, differences: Mapping[str, Any]) -> str:
    """Return the first thing that two runs executed, and a pair may not; empty if there is none."""
    lines = witness_lines(first, second, differences)
    return next((line.sentence for line in lines if line.sameness == "different"), "")


def witness_gap(first: Testimony, second: Testimony) -> str:
    """Return why what two runs executed is not proven; empty if it is, or if neither says."""
    if not (first.witness or second.witness):
        return ""  # of before there were witnesses
    unknown = (one.line.sentence for one in (first, second) if one.line.sameness == "unknown")
    return next(unknown, "")


def other_answer(first: Witness, second: Witness, differences: Mapping[str, Any] = {}) -> str:
    """Return the first known answer that has other bits in two runs; empty if there is none.

    `differences` are those of their configs, some of which move an answer by design.
    """
    was, now = (_flat(each, "answers") for each in (first, second))
    lines = _named("known answer", was, now, moved_by(differences))
    return next((line.sentence for line in lines if line.sameness == "different"), "")


def _own_line(found: Testimony) -> ProofLine:
    """Hold a run's witness against its label, and against the updates that the run has made."""
    manifest, witness = found.manifest, found.witness
    label, why = _label(manifest), found.lacking
    wrong = [why] * found.is_damaged
    if witness and not is_command(manifest.config):
        wrong = contradictions(witness, label)
    if witness and not why:
        run = f"{manifest.arm}, seed {manifest.seed}"
        lacking = gap(witness, manifest.fork.get("at", 0), manifest.step)
        if lacking:
            why = f"what {run} executed: {lacking}"
        elif found.unproven:
            why = f"what {run} multiplied: {found.unproven}"
        elif witness.unhashed:
            why = f"the source of what {run} executed: unhashed: {', '.join(witness.unhashed)}"
    executed = _dtypes(found.rows.get("linear", ()))
    return ProofLine(
        field=f"witness of {manifest.arm}",
        first=label.precision or "no label",
        second=executed,
        sameness="different" if wrong else ("unknown" if why else "same"),
        says="; ".join(wrong) or why,
    )


def _label(manifest: Manifest) -> Label:
    attention = manifest.config.get("attention", {})
    is_whole = list(attention.get("layers", ["*"])) == ["*"]
    return Label(
        arm=manifest.arm,
        precision=str(manifest.config.get("precision", "")),
        implementation=str(manifest.resolved.get("implementation", "")),
        is_partial=not is_whole or attention.get("direction", "both") != "both",
        **claims_of(manifest.config),
    )


def claims_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's config claims besides its precision and attention: fields of `Label`.

    A config of a command, or of before it could say so, claims nothing.
    """
    train, text = config.get("train", {}), str(config.get("precision", ""))
    if is_command(config):
        return {}
    products = train.get("matmul_precision", DEFAULT_MATMUL)
    switches = {"deterministic_algorithms": train.get("deterministic", True)}
    if products != DEFAULT_MATMUL:
        switches["float32_matmul_precision"] = products
    is_mixed = "," in text or text.startswith(RECIPE)
    precision = _precision(config, text) if is_mixed else Precision(text)
    return {
        "default": precision.default,
        "of_module": precision.of_module,
        "switches": switches,
        "rounds_fp32": products != DEFAULT_MATMUL,
    }


def _precision(config: Mapping[str, Any], text: str) -> Precision:
    """Return the precision of a run's config taken apart, by module."""
    return parse_precision(text).over(layer_names(config.get("model", {}).get("depth", 0)))


def _dtype_lines(
    first: Testimony, second: Testimony, differences: Mapping[str, Any], *, is_free: bool
) -> Iterator[ProofLine]:
    for part, axes in CHANGED_BY.items() if not (first.unproven or second.unproven) else ():
        rows = [each.rows.get(part, set()) for each in (first, second)]
        if part == "linear" and is_command(first.manifest.config):
            rows = [_less_operators(each, differences) for each in rows]
        if part == "unowned" and not any(rows):
            continue
        shown = [_dtypes(each) for each in rows]
        others = sorted(rows[0] ^ rows[1])
        if not others:
            yield compared(f"executed in {part}", shown[0], shown[1])
            continue
        is_meant = is_free or touches(differences, axes)
        nameless = "no module" if part == "unowned" else "the model itself"
        at = f"{others[0].module or nameless}, {others[0].during}"
        yield ProofLine(
            field=f"executed in {part}",
            first=shown[0],
            second=shown[1],
            sameness="different by design" if is_meant else "different",
            says=f"what is executed in {part} differs, first in {at}: "
            f"{others[0].operator or 'a product'} of {' x '.join(others[0].operands)} in one alone",
            changes=_PRODUCTS[part].format(*shown) if is_free and shown[0] != shown[1] else "",
        )


_PRODUCTS = {
    "linear": "linear products: {} -> {}",
    "attention": "attention: {} -> {}",
    "optimizer": "products of optimizers: {} -> {}",
    "unowned": "products of no module: {} -> {}",
}
"""What a change of a command did, in words."""


def _less_operators(rows: Set[ExecutedRow], differences: Mapping[str, Any]) -> Set[ExecutedRow]:
    """Return linear rows without the operators' names, where another attention was put in.

    What that returns may lie otherwise in memory, and the next layer multiply it by another
    operator, in the same dtypes.
    """
    if not touches(differences, ("attention",)):
        return rows
    return {replace(row, operator="") for row in rows}


def _beside(
    first: Witness, second: Witness, differences: Mapping[str, Any], *, is_free: bool
) -> Iterator[ProofLine]:
    answers, switches = (
        [_flat(each, series) for each in (first, second)] for series in ("answers", "switches")
    )
    moved = moved_by(differences)
    yield from _named("known answer", answers[0], answers[1], moved, is_free=is_free)
    of_modules = is_free or touches(differences, NAMES_OF_MODULES)
    yield from _modules(first, second, is_free=of_modules)
    yield from _named("switch", switches[0], switches[1], moved, is_free=is_free)


def _modules(first: Witness, second: Witness, *, is_free: bool) -> Iterator[ProofLine]:
    """Give a line for each module that both runs have imported, and that was another in each."""
    sources = [{n: h for s in each.all for n, h in s.modules.items()} for each in (first, second)]
    for name in sorted(sources[0].keys() & sources[1].keys()):
        if sources[0][name] != sources[1][name]:
            yield compared(
                f"the source of module {name}",
                sources[0][name],
                sources[1][name],
                is_free=is_free,
            )


def _flat(witness: Witness, series: str) -> dict[str, list[Any]]:
    """Return each name's distinct values while the run trained; one, where nothing changed."""
    found: dict[str, list[Any]] = {}
    for stretch in witness.all:
        moments: Mapping[str, Mapping[str, Any]] = getattr(stretch, series)
        for moment, values in moments.items():
            # what stood before imports may be what another run has left behind
            for name, value in values.items() if moment != "before_imports" else ():
                seen = found.setdefault(name, [])
                seen += [value] if value not in seen else []
    return found


def _named(
    what: str,
    first: Mapping[str, list[Any]],
    second: Mapping[str, list[Any]],
    free: Set[str] = frozenset(),
    *,
    is_free: bool = False,
) -> Iterator[ProofLine]:
    """Give a line for each name whose values differ, or one that says that all are equal.

    Those of `free` may differ: that is what was changed. A run from before a name was listed says
    nothing of it: that is unknown.
    """
    names = {*first, *second}
    unlisted = names - (first.keys() & second.keys()) if first and second else set()
    for name in sorted(unlisted):
        yield compared(f"{what} {name}", None, None)
    others = [name for name in sorted(names - unlisted) if first.get(name) != second.get(name)]
    for name in others:
        values = [", ".join(map(str, each.get(name, ["nothing"]))) for each in (first, second)]
        is_meant = is_free or name in free
        yield compared(f"{what} {name}", values[0], values[1], is_free=is_meant)
    if not others:
        plural, alike = f"{what}es" if what.endswith("ch") else f"{what}s", names - unlisted
        yield compared(plural, f"{len(alike)} alike", f"{len(alike)} alike")


def _dtypes(rows: Iterable[ExecutedRow]) -> str:
    """Return what was multiplied, in a reader's words."""
    found = {dtype for row in rows for dtype in row.operands}
    return " ".join(sorted(DTYPE_NAMES.get(dtype, dtype) for dtype in found)) or "nothing"
