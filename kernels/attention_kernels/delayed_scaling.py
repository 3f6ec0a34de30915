"""Quantizes a tensor by a scale from earlier steps: delayed scaling, as Transformer Engine has it.

The scale of a step is the largest value of the format divided by an amax of earlier steps, so the
tensor is read once. What is larger than the past foresaw saturates; what is infinite or NaN stays
so, that a loss scaler sees it, where Transformer Engine makes the largest value of an infinity. An
infinite amax keeps the scale as it is for as long as the history has it.

`quantize_delayed` is one step of one tensor: its state is a value that goes in and comes out, so
that a recomputed forward can use the one of its step again. `DelayedScales` holds those of a whole
training, where an update is the step: its micro-batches share a scale, and leave one amax behind,
the largest of them.

Source: NVIDIA's Transformer Engine, recipe `DelayedScaling`. There each micro-batch is a step, and
an operand that a step does not meet has an amax of 0 in it; here it keeps its history.
Leaves out scales from the tensor itself (`block_scaling`), and how ranks tell one another their
amaxes, which is the caller's.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_kernels.block_recipes import BlockRecipe
from attention_kernels.block_scaling import Quantized, dequantize
from attention_kernels.formats import format_named
from attention_kernels.rounding import round_to

__all__ = [
    "DelayedScale",
    "DelayedScales",
    "OperandScales",
    "SeenAmax",
    "delayed_scale",
    "quantize_delayed",
    "quantized_now",
]


@dataclass(frozen=True, slots=True)
class DelayedScale:
    """The amaxes of the last steps, newest last, and the scale that the next step multiplies by."""

    history: Tensor
    scale: Tensor


def delayed_scale(history_len: int = 1024, device: torch.device | str = "cpu") -> DelayedScale:
    """Return the state before the first step: no amax is known, and the scale is 1.

    ValueError for a history that holds nothing.
    """
    if history_len < 1:
        raise ValueError(f"delayed_scale: history_len must be at least 1, got {history_len}")
    return DelayedScale(torch.zeros(history_len, device=device), torch.ones((), device=device))


def quantize_delayed(
    x: Tensor,
    state: DelayedScale,
    *,
    elements: str = "e4m3",
    margin: int = 0,
    amax: str = "max",
    rounding: str = "nearest_even",
    seed: int = 0,
) -> tuple[Quantized, DelayedScale]:
    """Quantize `x` by the scale of `state`; return it with the state of the next step.

    `x` is FP32, BF16 or FP16, of any shape; `elements` a format. The next scale is the largest
    value of the format / amax / 2**margin, amax being the largest of the history (`max`) or that of
    this step (`most_recent`). It stays what it was where that amax is zero or not finite, and is
    the largest FP32 value where it would be infinite. ValueError for another `amax` or dtype.
    """
    if amax not in ("max", "most_recent"):
        raise ValueError(f"quantize_delayed: amax must be max or most_recent, got {amax!r}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize_delayed: x must be float32, bfloat16 or float16, got {x.dtype}")
    quantized = _quantized(x, state.scale, elements, rounding, seed, None)
    history = torch.cat([state.history[1:], _amax(x).reshape(1)])
    known = history.amax() if amax == "max" else history[-1]
    return quantized, DelayedScale(history, _scale_of(known, state.scale, elements, margin))


def _quantized(
    x: Tensor, scale: Tensor, elements: str, rounding: str, seed: int, bits: Tensor | None
) -> Quantized:
    """Return `x` in units of 1 / scale, saturated and rounded to `elements`."""
    largest, wide = format_named(elements).max_value, x.float()
    scaled = (wide * scale).clamp(-largest, largest).where(wide.isfinite(), wide)
    rounded = round_to(scaled, elements, rounding, seed=seed, bits=bits).to(x.dtype)
    recipe = BlockRecipe(name=f"delayed-{elements}", elements=elements, block="tensor")
    return Quantized(rounded, scale.reciprocal().reshape([1] * x.dim()), None, recipe, -1, seed)


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, NaN left out as by the maximum of a GPU."""
    if not x.numel():
        raise ValueError(f"quantize: x must hold values, got shape {tuple(x.shape)}")
    magnitudes = x.detach().abs()
    return magnitudes.where(~magnitudes.isnan(), 0.0).amax().float()


def _scale_of(known: Tensor, before: Tensor, elements: str, margin: int = 0) -> Tensor:
    """Return the scale that follows from the amax that is known; `before` if none does."""
    # as a tensor: torch divides a number by multiplying with a reciprocal, which rounds twice
    largest = torch.full_like(known, format_named(elements).max_value * 2.0**-margin)
    scale = largest / known
    scale = scale.where((known > 0) & known.isfinite(), before)
    return scale.clamp(max=torch.finfo(torch.float32).max)


class SeenAmax(NamedTuple):
    """The largest magnitude of an operand in an update, and the format and history it is for."""

    amax: float
    elements: str
    history: int


@dataclass(slots=True)
class _Kept:
    """What is kept of one operand: its last amaxes, and the scale of the update under way."""

    amaxes: deque[float]
    elements: str
    scale: float = 1.0

    def fit(self, elements: str, history: int) -> None:
        """Go on as an operand of another format or history, of a fork that changes these."""
        if (self.elements, self.amaxes.maxlen) != (elements, history):
            self.amaxes = deque(self.amaxes, history)
            self.elements, self.scale = elements, 1.0
            self.follow()

    def follow(self) -> None:
        """Let the scale follow from the amaxes, if they say one."""
        known = max(self.amaxes, default=0.0)
        if known not in (0.0, float("inf")):
            self.scale = _in_fp32(format_named(self.elements).max_value / known)


def _in_fp32(quotient: float) -> float:
    """Return the quotient of two FP32 values as FP32 has it: FP64's, rounded again, is the same."""
    largest = torch.finfo(torch.float32).max
    return torch.tensor(min(quotient, largest), dtype=torch.float32).item()


class DelayedScales:
    """The scales of all operands of a training, each by a name; they change at `advance` alone.

    While `is_open`, which says that an update is under way, it keeps the largest magnitude that
    each operand had. So a forward that is made again, and any number of micro-batches, leave behind
    what one forward of the whole batch does. A scale follows from the largest amax of the history,
    with no margin.

    `replicas` is how many times larger gradients are here than those of the whole batch's mean:
    each of so many replicas has the mean of its own samples. Amaxes and scales of gradients are
    kept in units of the whole batch, so that any layout goes on from another's.
    """

    def __init__(self, replicas: int = 1) -> None:
        self.is_open = False
        self._replicas = replicas
        self._kept: dict[str, _Kept] = {}
        self._seen: dict[str, tuple[Tensor, str, int]] = {}

    def of(self, module: str, *, records: bool = True) -> "OperandScales":
        """Return those of one module; without `records` it is only looked at."""
        return OperandScales(self, module, records)

    def quantized(
        self,
        name: str,
        x: Tensor,
        elements: str,
        history: int,
        *,
        rounding: str = "nearest_even",
        bits: Tensor | None = None,
        is_gradient: bool = False,
        records: bool = True,
    ) -> Tensor:
        """Return `x`, FP32, quantized by the scale of `name` and dequantized.

        `bits` are those of stochastic rounding. The scale is 1 before the first update has ended.
        """
        larger = self._replicas if is_gradient else 1
        if records and self.is_open:
            amax = _amax(x) / larger
            if name in self._seen:
                amax = torch.maximum(amax, self._seen[name][0])
            self._seen[name] = (amax, elements, history)
        kept, scale = self._kept.get(name), 1.0
        if kept is not None:
            kept.fit(elements, history)
            scale = kept.scale
        factor = torch.full((), scale, device=x.device) / larger
        return dequantize(_quantized(x, factor, elements, rounding, 0, bits))

    def advance(
        self,
        join: Callable[[dict[str, SeenAmax]], Mapping[str, SeenAmax]] = lambda seen: seen,
    ) -> None:
        """End an update: its amaxes enter the histories, from which the next scales follow.

        `join` is given those that this process saw, and returns those of all. What no process saw
        keeps its history.
        """
        seen = self._seen
        # from a GPU all at once
        amaxes = torch.stack([amax for amax, *_ in seen.values()]).tolist() if seen else []
        of_others = join(
            {
                name: SeenAmax(amax, elements, history)
                for amax, (name, (_, elements, history)) in zip(amaxes, seen.items(), strict=True)
            }
        )
        self.forget_update()
        for name, (amax, elements, history) in of_others.items():
            kept = self._kept.setdefault(name, _Kept(deque(maxlen=history), elements))
            kept.fit(elements, history)
            kept.amaxes.append(amax)
            kept.follow()

    def forget_update(self) -> None:
        """Drop what an update has seen that has not ended."""
        self.is_open = False
        self._seen = {}

    def state_dict(self) -> dict[str, Any]:
        """Return by name the amaxes, oldest first, scale and format, for a checkpoint."""
        return {
            name: {
                "amaxes": torch.tensor([*kept.amaxes], dtype=torch.float32),
                "history": kept.amaxes.maxlen,
                "elements": kept.elements,
                "scale": kept.scale,
            }
            for name, kept in sorted(self._kept.items())
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self.forget_update()
        self._kept = {
            name: _Kept(
                deque(each["amaxes"].tolist(), each["history"]), each["elements"], each["scale"]
            )
            for name, each in states.items()
        }


@dataclass(frozen=True, slots=True)
class OperandScales:
    """The delayed scales of the operands of one module."""

    whole: DelayedScales
    module: str
    records: bool = True
    """Whether what it multiplies is of an update, and not of a look at the model."""

    def looked_at(self) -> "OperandScales":
        """Return the same, recording nothing."""
        return replace(self, records=False)

    def name(self, place: str) -> str:
        """Return the name that the operand at `place` of this module has among all."""
        return f"{self.module}: {place}"


def quantized_now(
    x: Tensor, elements: str, *, rounding: str = "nearest_even", bits: Tensor | None = None
) -> Tensor:
    """Return `x`, FP32, quantized by the scale that its own amax leaves behind, and dequantized."""
    scale = _scale_of(_amax(x), torch.ones((), device=x.device), elements)
    return dequantize(_quantized(x, scale, elements, rounding, 0, bits))
