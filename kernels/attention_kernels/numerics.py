"""Everything that decides the bits of an attention call, as frozen values.

One `FlashNumerics` names a format for each rounding point of the flash recurrence, forward and
backward, and the tile it runs in; the twin and the Triton kernel execute the same object. A format
is a name of `formats.FORMATS`, or "input": the dtype of q. Leaves out the arithmetic itself
(`twin_*`, `triton_*`, `baseline`) and the named values (`profiles`).

Between rounding points values live in the work format: FP64 when any point is FP64, else FP32.
"""

import difflib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import torch

from attention_kernels.formats import FORMATS, format_named

__all__ = [
    "BackwardNumerics",
    "BaselineNumerics",
    "FlashNumerics",
    "ForwardNumerics",
    "Tiling",
    "input_format",
]

BLOCK_SIZES = (16, 32, 64, 128, 256)


def input_format(dtype: torch.dtype) -> str:
    """Name of the format that `dtype` stores; ValueError if there is none."""
    for name, format in FORMATS.items():
        if format.dtype == dtype:
            return name
    raise ValueError(f"input_format: dtype must be one of {', '.join(FORMATS)}, got {dtype}")


def _check_formats(group: Any) -> None:
    for point in fields(group):
        name = getattr(group, point.name)
        if name != "input" and name not in FORMATS:
            allowed = ["input", *FORMATS]
            near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4) or allowed
            raise ValueError(
                f"{type(group).__name__}: {point.name} must be a format, got {name!r}; "
                f"nearest: {', '.join(near)}"
            )


def _resolved(group: Any, dtype: torch.dtype) -> Any:
    name = input_format(dtype)
    return replace(
        group, **{f.name: name for f in fields(group) if getattr(group, f.name) == "input"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardNumerics:
    """Formats at the rounding points of the forward recurrence, in the order they occur."""

    operands: str = "input"
    """q, k, v (and dO in the backward) as they enter the dot products."""
    scores: str = "fp32"
    """scale * q k^T, once per element, before the mask."""
    statistics: str = "fp32"
    """Running max, exp(score - max), rescale factor and running sum."""
    probabilities: str = "input"
    """exp(score - max) as operand of the product with v (P in the backward, of dV)."""
    accumulator: str = "fp32"
    """Unnormalised output after each key block."""
    output: str = "input"
    """accumulator / sum, as stored; the backward's delta reads it."""
    lse: str = "fp32"
    """max + log(sum), as stored; the backward's P is recomputed from it."""

    def __post_init__(self) -> None:
        _check_formats(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardNumerics:
    """Formats at the rounding points of the backward recurrence, in the order they occur."""

    delta: str = "fp32"
    """rowsum(dO * O)."""
    dp: str = "fp32"
    """dO v^T."""
    ds: str = "input"
    """P * (dP - delta), as operand of the products for dQ and dK."""
    dq_accumulator: str = "fp32"
    """dQ after each key block."""
    dkv_accumulator: str = "fp32"
    """dK and dV of one query head after each query block."""
    gradients: str = "input"
    """dQ, dK and dV as returned; the heads of a group are added before."""

    def __post_init__(self) -> None:
        _check_formats(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Rows of q and of k that one step of the recurrence reads."""

    block_q: int = 64
    block_k: int = 64

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            if getattr(self, name) not in BLOCK_SIZES:
                raise ValueError(
                    f"Tiling: {name} must be one of {BLOCK_SIZES}, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashNumerics:
    """The numerics of one flash attention, forward and backward."""

    forward: ForwardNumerics = field(default_factory=ForwardNumerics)
    backward: BackwardNumerics = field(default_factory=BackwardNumerics)
    tiling: Tiling = field(default_factory=Tiling)

    def with_(self, **changes: Any) -> Self:
        """Return a copy with single fields changed by their own name, e.g. `block_k=32`.

        ValueError names an unknown field, the nearest ones, or a value that is not allowed.
        """
        groups = {f.name: getattr(self, f.name) for f in fields(self)}
        owner = {f.name: group for group, value in groups.items() for f in fields(value)}
        for name, value in changes.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, n=3, cutoff=0.4) or list(owner)
                raise ValueError(
                    f"FlashNumerics.with_: no field {name!r}; nearest: {', '.join(near)}"
                )
            groups[owner[name]] = replace(groups[owner[name]], **{name: value})
        return replace(self, **groups)

    def resolve(self, dtype: torch.dtype) -> Self:
        """Return a copy in which "input" is replaced by the format of `dtype`."""
        return replace(
            self,
            forward=_resolved(self.forward, dtype),
            backward=_resolved(self.backward, dtype),
        )

    def work_dtype(self) -> torch.dtype:
        """Dtype of the arithmetic between rounding points; call on resolved numerics."""
        points = {**asdict(self.forward), **asdict(self.backward)}
        return _work_dtype(points.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, flat, by their own names: what a manifest stores."""
        return {**asdict(self.forward), **asdict(self.backward), **asdict(self.tiling)}


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineNumerics:
    """Formats at the rounding points of attention that holds the whole score matrix.

    The defaults are what eager PyTorch does in the dtype of q, with the scale folded into the
    score's rounding. Gradients are rounded to the same formats on the way back.
    """

    scores: str = "input"
    """scale * q k^T."""
    softmax: str = "input"
    """softmax(scores), computed in the work format and rounded once."""
    output: str = "input"
    """softmax v."""

    def __post_init__(self) -> None:
        _check_formats(self)

    def with_(self, **changes: Any) -> Self:
        """Return a copy with single fields changed; ValueError names an unknown field."""
        allowed = [f.name for f in fields(self)]
        for name in changes:
            if name not in allowed:
                raise ValueError(
                    f"BaselineNumerics.with_: no field {name!r}; nearest: {', '.join(allowed)}"
                )
        return replace(self, **changes)

    def resolve(self, dtype: torch.dtype) -> Self:
        """Return a copy in which "input" is replaced by the format of `dtype`."""
        return _resolved(self, dtype)

    def work_dtype(self) -> torch.dtype:
        """Dtype of the arithmetic between rounding points; call on resolved numerics."""
        return _work_dtype(asdict(self).values())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: what a manifest stores."""
        return asdict(self)


def _work_dtype(points: Any) -> torch.dtype:
    if any(format_named(point).name == "fp64" for point in points):
        return torch.float64
    return torch.float32
