"""Everything that decides the bits of an attention call, as one frozen value.

`FlashNumerics` says it for the flash recurrence: a format for each rounding point, forward and
backward, how its softmax is stabilised, the tiles and their order, how narrow operands are scaled,
and what the arithmetic between the points is. The twin and the Triton kernels execute the same
object. `BaselineNumerics` says it for attention that holds the whole score matrix; its defaults are
eager PyTorch in the dtype of q. A format is a name that `formats.format_named` knows, or "input":
the format of q's dtype.

Between rounding points values live in the work format: FP32 if it holds every named format, else
FP64. Large libraries fix their intermediate formats in the code of each kernel (Triton's tutorial
06 narrows P and dS to FP16 whatever the inputs are) or behind an environment variable. Then no
record of a run says what was computed. Here every format is a field, so it is in the manifest and
in the hash of a run.

Leaves out the arithmetic itself (`twin`, `triton`, `baseline`) and the named values (`profiles`).
Imports no torch, as `formats` does not.
"""

import abc
import difflib
import functools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from attention_kernels.block_recipes import OPERAND_RECIPES
from attention_kernels.formats import FORMATS, ROUNDINGS, Format, format_named, input_format
from attention_kernels.points import (
    POINTS,
    UNROUNDED,
    BackwardNumerics,
    ForwardNumerics,
    check_formats,
)
from attention_kernels.tensor_core_models import MODELS, TensorCoreModel

if TYPE_CHECKING:
    import torch

__all__ = [
    "Arithmetic",
    "BaselineNumerics",
    "FlashNumerics",
    "Scaling",
    "Softmax",
    "TensorCoreProduct",
    "Tiling",
]

# tl.dot takes no side below 16. Blocks of Triton are powers of two; the twin takes 96 as well.
BLOCK_SIZES = (16, 32, 64, 96, 128, 256)
EXPS = ("exact", "exp2", "exp2_folded", "exp2_polynomial", "exp2_polynomial_folded")
LOOP_ORDERS = ("query_outer", "key_outer")
KEY_ORDERS = ("forward", "reversed")
MAX_RULES = ("bounded", "published")
GRADIENT_SCALES = ("sums", "probabilities")
SCALINGS = ("none", "per_tensor", "per_block")
DOTS = ("ieee", "tf32", "tf32x3", *MODELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax:
    """How the online softmax is computed and kept in range."""

    exp: str = "exact"
    """`exact` e**x; `exp2` 2**(x log2 e); `exp2_polynomial` the same by a cubic polynomial. With
    `_folded` behind one of the last two, its exponent is one fused multiply-add of the unscaled
    score, as FlashAttention's CUDA code has it (`score_units`)."""
    rescale_threshold: float = 0.0
    """The running max follows a new one only when that exceeds it by more than this, in log2."""
    repeated_max_beta: float = 1.0
    """Above 1: the factor on a positive block maximum that occurs more than once; 1 is off."""
    repeated_max_tolerance: float = 0.0
    """Scores that are this close to the block's maximum count as it."""
    repeated_max_rule: str = "bounded"
    """`bounded`: past a shift of 6, powers of two are taken back; `published`: none are, and a key
    block that is hidden from a row counts as a negative maximum, which becomes 0."""

    def __post_init__(self) -> None:
        _check_choice(self, "exp", EXPS)
        _check_number(self, "rescale_threshold", low=0.0)
        _check_number(self, "repeated_max_beta", low=1.0)
        _check_number(self, "repeated_max_tolerance", low=0.0)
        _check_choice(self, "repeated_max_rule", MAX_RULES)

    @property
    def folds(self) -> bool:
        """Whether an exponent is one fused multiply-add."""
        return self.exp.endswith("_folded")

    @property
    def power(self) -> str:
        """How the power is computed, of `exp` the part before `_folded`."""
        return self.exp.removesuffix("_folded")

    @property
    def moves_hidden(self) -> bool:
        """Whether a key block that is hidden from a row moves the maximum of the row."""
        return self.repeated_max_beta > 1.0 and self.repeated_max_rule == "published"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Rows of q and of k that one step of the recurrence reads, and the order of the steps."""

    block_q: int = 64
    block_k: int = 64
    loop_order: str = "query_outer"
    """`key_outer` sends the normalised output through memory, in `output`, at each key block."""
    key_order: str = "forward"
    """Forward or reversed; the backward's sums over keys follow it."""
    splits: int = 1
    """Parts of the keys that are attended apart and merged by their lse."""

    def __post_init__(self) -> None:
        _check_choice(self, "block_q", BLOCK_SIZES)
        _check_choice(self, "block_k", BLOCK_SIZES)
        _check_choice(self, "loop_order", LOOP_ORDERS)
        _check_choice(self, "key_order", KEY_ORDERS)
        _check_integer(self, "splits", low=1, high=256)
        if self.loop_order == "key_outer" and self.splits > 1:
            raise ValueError(
                f"Tiling: splits must be 1 with loop_order 'key_outer', got {self.splits}; "
                "each key block is merged into the stored output already"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """How operands are brought into the range of their format."""

    scaling: str = "none"
    """One factor for each head of a tensor, or for each of its blocks: max|x| onto the largest
    value. P is multiplied by a power of two then (`FlashNumerics.probability_scale`)."""
    incoherent: bool = False
    """Rotate q and k by the same random-sign Hadamard matrix, which spreads outliers."""

    def __post_init__(self) -> None:
        _check_choice(self, "scaling", SCALINGS)
        _check_flag(self, "incoherent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """What happens at every rounding point, and between them."""

    rounding: str = "nearest_even"
    """One of `formats.ROUNDINGS`, at every rounding point."""
    seed: int = 0
    """Of stochastic rounding and of the signs of incoherent processing."""
    dot: str = "ieee"
    """Products of FP32 operands: as they are, as TF32, or as three TF32 products, all summed in
    FP32; or as one of `tensor_core_models.MODELS` multiplies and sums, which the twin alone can."""
    gradient_scale: str = "sums"
    """What is multiplied by scale in the backward: dQ and dK at the end, or P in each dS."""
    fp_fusion: bool = False
    """Let the compiler contract a multiply and an add; the Triton engine alone can."""

    def __post_init__(self) -> None:
        _check_choice(self, "rounding", ROUNDINGS)
        # The hash behind stochastic rounding takes 32-bit words.
        _check_integer(self, "seed", low=0, high=2**32 - 1)
        _check_choice(self, "dot", DOTS)
        _check_choice(self, "gradient_scale", GRADIENT_SCALES)
        _check_flag(self, "fp_fusion")


class TensorCoreProduct(NamedTuple):
    """A product that the twin computes as a tensor core does."""

    model: TensorCoreModel
    formats: tuple[str, str]
    """Of the left and the right operand."""


class _Numerics(abc.ABC):
    """Base of both numerics: the text that carries them, and the format between rounding points.

    Operators of torch take strings, and `torch.compile` compares strings by value. Frozen
    dataclasses it does not compare at all (torch 2.11), or by an identity that the next object can
    inherit from one that is gone.
    """

    text: str
    """The fields by name, as JSON."""

    def _write(self, values: dict[str, Any]) -> None:
        # the dataclass is frozen: an assignment would raise, also in its own __post_init__
        object.__setattr__(self, "text", json.dumps(values))

    @abc.abstractmethod
    def _formats(self) -> Iterable[str]:
        """Return the names of the formats between the rounding points."""

    @functools.cached_property
    def work_format(self) -> str:
        """FP32 if it holds every named format, else FP64; read it of resolved numerics."""
        # a value that FP32 does not hold would be rounded twice, or lose bits that the format keeps
        named = (name for name in self._formats() if name != UNROUNDED)
        narrow = all(format_named(name).fits(FORMATS["fp32"]) for name in named)
        return "fp32" if narrow else "fp64"

    def work_dtype(self) -> "torch.dtype":
        """Return the dtype of `work_format`."""
        import torch  # heavy, and nothing else here needs it

        return torch.float64 if self.work_format == "fp64" else torch.float32


@dataclass(frozen=True, kw_only=True)
class FlashNumerics(_Numerics):
    """The numerics of one flash attention, forward and backward."""

    forward: ForwardNumerics = field(default_factory=ForwardNumerics)
    backward: BackwardNumerics = field(default_factory=BackwardNumerics)
    softmax: Softmax = field(default_factory=Softmax)
    tiling: Tiling = field(default_factory=Tiling)
    scaling: Scaling = field(default_factory=Scaling)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def __post_init__(self) -> None:
        self._write(self.to_dict())
        if self.softmax.rescale_threshold and self.tiling.loop_order == "key_outer":
            raise ValueError(
                "FlashNumerics: rescale_threshold must be 0 with loop_order 'key_outer', got "
                f"{self.softmax.rescale_threshold}; the stored output is normalised at each block"
            )
        for name in ("exponents", "summands"):
            self._check_infinity(name)
        if self.forward.operands in OPERAND_RECIPES and self.scaling.scaling != "none":
            raise ValueError(
                f"FlashNumerics: scaling must be 'none' with operands {self.forward.operands!r}, "
                f"which have scales of their own, got {self.scaling.scaling!r}"
            )
        # the format is not known before `resolve`, which makes a new value and so comes here again
        if self.forward.probabilities == "input":
            return
        # An old maximum that is kept may lie below a score by the threshold, and P above 1 by as
        # many powers of two: past the end of a narrow format that would be infinity or NaN.
        format = format_named(self.forward.probabilities)
        largest = self.probability_scale() * 2.0**self.softmax.rescale_threshold
        if largest > format.max_value:
            raise ValueError(
                "FlashNumerics: rescale_threshold must keep P within probabilities "
                f"{format.name!r}, whose largest value is {format.max_value:g}, got "
                f"{self.softmax.rescale_threshold}, where P reaches {largest:g}; use 0"
            )

    def _check_infinity(self, name: str) -> None:
        """Raise ValueError unless the field's format holds -inf: the exponent of what is hidden."""
        value = getattr(self.forward, name)
        if value in ("input", UNROUNDED):
            return
        format = format_named(value)
        if not format.infinities or format.saturate:
            raise ValueError(
                f"FlashNumerics: {name} must be a format with infinities, got {value!r}; what is "
                "hidden is -inf there"
            )

    def with_(self, **changes: Any) -> Self:
        """Return a copy with single fields changed by their own name, e.g. `block_k=32`.

        ValueError names an unknown field, the nearest ones, or a value that is not allowed.
        """
        groups = {f.name: getattr(self, f.name) for f in fields(self)}
        owner = {f.name: group for group, value in groups.items() for f in fields(value)}
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in owner:
                raise _unknown_field("FlashNumerics.with_", name, owner)
            by_group.setdefault(owner[name], {})[name] = value
        return replace(self, **{g: replace(groups[g], **new) for g, new in by_group.items()})

    def resolve(self, dtype: "torch.dtype") -> Self:
        """Return a copy in which "input" is replaced by the format of `dtype`.

        ValueError if what it then says contradicts itself.
        """
        numerics = replace(
            self,
            forward=_resolved(self.forward, dtype),
            backward=_resolved(self.backward, dtype),
        )
        dot = self.arithmetic.dot
        # TF32 is a way to multiply FP32 operands, and FP64 operands have no such choice
        if dot != "ieee" and numerics.work_format == "fp64":
            raise ValueError(
                f"FlashNumerics: dot must be 'ieee' where the work format is FP64, got {dot!r}; "
                "name no format wider than FP32"
            )
        if dot in MODELS:
            numerics._check_tensor_core(MODELS[dot])
        return numerics

    def _check_tensor_core(self, model: TensorCoreModel) -> None:
        """Raise ValueError unless the model takes every operand of a product."""
        for point in ("q", "probabilities", "ds"):
            name = self.format_at(point)
            taken = [each for each in (model, MODELS.get(model.wider)) if each]
            # only dS may need the wider one: a product of the forward says what `dot` says
            if not any(each.takes(name) for each in (taken if point == "ds" else taken[:1])):
                formats = [f for each in taken for f in each.operands]
                allowed = ", ".join(formats if point == "ds" else model.operands)
                raise ValueError(
                    f"FlashNumerics: {POINTS[point].field} must be a format that fits into "
                    f"{allowed} with dot {model.name!r}, got {name!r}; name another format or "
                    "another dot"
                )

    def product(self, left: str, right: str) -> "str | TensorCoreProduct":
        """Return how operands that are rounded at these two points are multiplied.

        It is what `dot` says, but for a product of dS that its tensor core does not take: that goes
        to the wider one of the same architecture. "_held" stands behind a kind of TF32 that holds
        both operands as they are. Call it on resolved numerics.
        """
        dot = self.arithmetic.dot
        if dot == "ieee":
            return dot
        formats, model = (self.format_at(left), self.format_at(right)), MODELS.get(dot)
        if model is None:
            return dot + "_held" if all(map(_fits_tf32, formats)) else dot
        if not all(map(model.takes, formats)):
            model = MODELS[model.wider]
        return TensorCoreProduct(model, formats)

    def format_at(self, point: str) -> str:
        """Return the name of the format that the point of this name in `POINTS` rounds to.

        Of operands in blocks it is that of their elements times their scales.
        """
        field = POINTS[point].field
        name = getattr(self.forward if hasattr(self.forward, field) else self.backward, field)
        return "bf16" if field == "operands" and name in OPERAND_RECIPES else name

    @functools.cached_property
    def targets(self) -> dict[str, Format | None]:
        """What each point rounds values of the work format to; None where that changes nothing.

        Read it of resolved numerics. With FP32 statistics and sums, most points change nothing, and
        an engine that asks here first spends no time on them.
        """
        work, targets = FORMATS[self.work_format], {}
        for point in POINTS:
            name = self.format_at(point)
            format = None if name == UNROUNDED else format_named(name)
            targets[point] = None if format is None or format.changes_nothing(work) else format
        return targets

    def _formats(self) -> Iterable[str]:
        return [self.format_at(point) for point in POINTS]

    @property
    def scaled(self) -> bool:
        """Whether operands come with factors, one for each block of rows."""
        return self.scaling.scaling != "none" or self.forward.operands in OPERAND_RECIPES

    def probability_scale(self) -> float:
        """Power of two that P is multiplied by before it is rounded; call on resolved numerics.

        With operands that are scaled, or in blocks, P, which is at most 1, is brought to the top of
        a format with at most 5 exponent bits (256 for e4m3, as FlashAttention-3 does); else it is
        left alone.
        """
        # Formats of more exponent bits have room enough below 1, as FP32 has.
        format = format_named(self.forward.probabilities)
        if not self.scaled or format.exponent_bits > 5:
            return 1.0
        # a power of two, so that scaling P and scaling back round nothing
        return 2.0 ** math.floor(math.log2(format.max_value))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, flat, by their own names: what a manifest stores."""
        groups = (getattr(self, f.name) for f in fields(self))
        return {name: value for group in groups for name, value in asdict(group).items()}


SCALE_ORDERS = ("after", "before")
SOFTMAX_ROUNDINGS = ("once", "each")
BASELINE_SCALINGS = ("none", "per_tensor")
_CHOICES = ("scale_order", "softmax_rounding", "scaling")


@dataclass(frozen=True, kw_only=True)
class BaselineNumerics(_Numerics):
    """Formats at the rounding points, in the order they occur, and how they are applied.

    Gradients are rounded to the same formats on the way back, but not at `operands` and
    `probabilities`, which are operands of the forward's products alone.
    """

    operands: str = "input"
    """q, k and v as they enter the products; with `scaling`, after it."""
    products: str = "input"
    """q k^T, as the product leaves it."""
    scores: str = "input"
    """scale * (q k^T) with softcap and bias, before the mask."""
    softmax: str = "input"
    """softmax(scores)."""
    probabilities: str = "input"
    """softmax(scores) as operand of the product with v."""
    output: str = "input"
    """softmax v."""
    scale_order: str = "after"
    """`after`: the product is multiplied by scale; `before`: q is, and rounded to `operands`."""
    softmax_rounding: str = "once"
    """`once`: in the work format, rounded at the end, as fused softmaxes do; `each`: the
    exponential, the sum and the quotient are each rounded to `softmax`."""
    scaling: str = "none"
    """`per_tensor`: one factor for each head brings max|x| of q, k and v onto the largest value of
    `operands`; P is multiplied by a power of two then, as in `FlashNumerics`. A format of more than
    5 exponent bits needs neither, and gets none."""

    def __post_init__(self) -> None:
        check_formats(self, *_CHOICES)
        _check_choice(self, "scale_order", SCALE_ORDERS)
        _check_choice(self, "softmax_rounding", SOFTMAX_ROUNDINGS)
        _check_choice(self, "scaling", BASELINE_SCALINGS)
        self._write(self.to_dict())

    def with_(self, **changes: Any) -> Self:
        """Return a copy with single fields changed; ValueError names an unknown field."""
        allowed = [f.name for f in fields(self)]
        for name in changes:
            if name not in allowed:
                raise _unknown_field("BaselineNumerics.with_", name, allowed)
        return replace(self, **changes)

    def resolve(self, dtype: "torch.dtype") -> Self:
        """Return a copy in which "input" is replaced by the format of `dtype`."""
        return _resolved(self, dtype)

    def _formats(self) -> Iterable[str]:
        return (value for name, value in self.to_dict().items() if name not in _CHOICES)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: what a manifest stores."""
        return asdict(self)


@functools.cache
def _fits_tf32(name: str) -> bool:
    return format_named(name).fits(FORMATS["tf32"])


def _check_choice(group: Any, name: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless the field is one of `allowed`."""
    value = getattr(group, name)
    if isinstance(value, bool) or value not in allowed:
        listed = allowed if isinstance(allowed[0], int) else ", ".join(allowed)
        raise ValueError(f"{type(group).__name__}: {name} must be one of {listed}, got {value!r}")


def _check_flag(group: Any, name: str) -> None:
    """Raise ValueError unless the field is true or false."""
    value = getattr(group, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(group).__name__}: {name} must be true or false, got {value!r}")


def _check_number(group: Any, name: str, *, low: float) -> None:
    """Raise ValueError unless the field is a finite number of at least `low`."""
    value = getattr(group, name)
    # bool is an int in Python: YAML's `true` would pass as 1
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= low):
        raise ValueError(
            f"{type(group).__name__}: {name} must be a finite number of at least {low:g}, "
            f"got {value!r}"
        )


def _check_integer(group: Any, name: str, *, low: int, high: int) -> None:
    """Raise ValueError unless the field is an integer from `low` to `high`."""
    value = getattr(group, name)
    # as above, a `true` would pass as 1
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(
            f"{type(group).__name__}: {name} must be an integer from {low} to {high}, got {value!r}"
        )


def _unknown_field(function: str, name: str, allowed: Iterable[str]) -> ValueError:
    """Return the error that says there is no such field, with the nearest ones."""
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.4) or allowed
    return ValueError(f"{function}: no field {name!r}; nearest: {', '.join(near)}")


def _resolved(group: Any, dtype: "torch.dtype") -> Any:
    """Return a copy of `group` in which "input" is replaced by the format of `dtype`."""
    name = input_format(dtype)
    changes = {f.name: name for f in fields(group) if getattr(group, f.name) == "input"}
    return replace(group, **changes)
