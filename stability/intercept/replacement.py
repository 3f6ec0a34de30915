"""Makes a candidate attention compute in place of a model's own, in all or some of its layers.

The candidate may replace both directions or only one: its forward with the model's own gradients,
or its gradients with the model's own forward. So a failed training can be traced to a direction and
to layers. Leaves out how calls are caught (`sdpa`, `transformers`) and compared (`probe`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stability.probe.attention_registry import ROUNDING, ResolvedAttention
from stability.probe.captured_call import (
    AttentionCall,
    BoundAttention,
    ask_computed,
    dtype_not_told,
)

__all__ = [
    "AskedDtypes",
    "Direction",
    "ReplacedAttention",
    "Replacement",
    "bind_own",
    "replacement_by",
]

Direction = Literal["both", "forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Where `candidate` replaces the model's own attention, and in which direction.

    `layers` are globs; a layer is replaced if its name matches one of them.
    """

    candidate: ResolvedAttention
    layers: Sequence[str]
    direction: Direction = "both"

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise ValueError(
                f"Replacement: direction must be one of {', '.join(get_args(Direction))}, got "
                f"{self.direction!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the globs and the direction as JSON values, without the candidate."""
        return {"layers": list(self.layers), "direction": self.direction}

    def covers(self, layer: str) -> bool:
        """Whether the attention of `layer` is replaced."""
        return any(fnmatchcase(layer, pattern) for pattern in self.layers)

    def of(self, call: AttentionCall, primary: BoundAttention) -> BoundAttention:
        """Return the attention that computes `call` instead of `primary`, the model's own.

        With one direction replaced it gives no LSE. ValueError for a call that the candidate cannot
        compute, e.g. with dropout.
        """
        if call.unsupported:
            raise ValueError(
                f"Replacement: {call.layer} must be a call that {self.candidate.name} can take, "
                f"got {call.unsupported}"
            )
        names = {"attn_mask": "a bias is", "sinks": "sinks are"}
        trained = [name for name in names if _is_trained(call.mask.get(name))]
        if self.direction != "both" and trained:
            raise ValueError(
                f"Replacement: direction must be 'both' where {names[trained[0]]} trained, got "
                f"{self.direction!r} in {call.layer}: there would be no gradient"
            )
        candidate = partial(_cast_and_attend, self.candidate, call)
        if self.direction == "both":
            return candidate
        own = partial(_attend_under_autocast, primary, call.dtype)
        pair = (candidate, own) if self.direction == "forward" else (own, candidate)
        forward, backward = (_without_lse(attention) for attention in pair)
        return lambda q, k, v: (_Split.apply(q, k, v, forward, backward), None)

    def mixed(self, own: ResolvedAttention) -> ResolvedAttention:
        """Return the attention of a replaced layer whose own attention is `own`.

        It is the candidate, or the candidate in one direction and `own` in the other. For a model
        that is built with its attention, as a study's is; `of` serves calls that are caught.
        """
        if self.direction == "both":
            return self.candidate
        pair = (self.candidate, own) if self.direction == "forward" else (own, self.candidate)

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            given = {name: options.pop(name) for name in ROUNDING if name in options}
            drawing = (one.drawing_by(given) for one in pair)
            return _Split.apply(q, k, v, *(partial(one, **options) for one in drawing))

        description = {**self.candidate.description, **self.to_dict(), "elsewhere": own.description}
        name = f"{self.candidate.name} {self.direction}"
        draws = any(one.takes_rounding_key for one in pair)
        return ResolvedAttention(
            name=name, function=attend, description=description, takes_rounding_key=draws
        )


def replacement_by(
    candidates: Sequence[ResolvedAttention], layers: Sequence[str], direction: Direction
) -> Replacement:
    """Return what replaces in a loop that is not ours.

    ValueError unless it is one attention, whose rounding needs nothing that such a loop can't tell.
    """
    if len(candidates) > 1:
        raise ValueError(f"shadow: candidate must be one to replace with, got {len(candidates)}")
    if candidates[0].takes_rounding_key:
        # with the same bits at each step its errors would add up where independent ones cancel
        raise ValueError(
            "shadow: candidate must not round stochastically where replace is given, got "
            f"{candidates[0].name}: a loop of your own tells no (step, layer, call) to draw by; "
            "train it as an arm of a study, or give a function that passes rounding_key to "
            "flash_attention"
        )
    return Replacement(candidate=candidates[0], layers=tuple(layers), direction=direction)


@dataclass(frozen=True, slots=True)
class ReplacedAttention:
    """What computes in a replaced layer, with the model's own attention, which is its shadow."""

    computes: BoundAttention
    own: BoundAttention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, **trained: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is computed in the model's place."""
        return self.computes(q, k, v, **trained)


class AskedDtypes:
    """Gives calls the dtype in which the model's own attention computes; asks each layer once."""

    def __init__(self, find: Callable[[str, str], None]) -> None:
        self._find = find
        self._known: dict[tuple[str, torch.dtype | None], torch.dtype | None] = {}

    def __call__(self, call: AttentionCall, primary: BoundAttention) -> AttentionCall:
        """Return the call with that dtype; where it can't be told, as it is, with a finding."""
        asked = call.layer, call.dtype
        if asked not in self._known:
            told = ask_computed(call, primary)
            if told is None:
                self._find(call.layer, dtype_not_told(call))
            self._known[asked] = (told or call).dtype
        return replace(call, dtype=self._known[asked])


def bind_own(call: AttentionCall, primary: BoundAttention) -> BoundAttention:
    """Return the model's own attention of a replaced layer, as a probe takes its shadow."""
    assert isinstance(primary, ReplacedAttention)
    return partial(_attend_under_autocast, primary.own, call.dtype)


def _is_trained(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _cast_and_attend(
    candidate: ResolvedAttention,
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **trained: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the candidate, in the dtype in which the model's own attention would compute.

    Autocast casts the inputs of the model's own attention; a candidate it may not know. Inside it
    is off, as it is where the candidate is measured beside the model's own.
    """
    if call.dtype is not None:
        q, k, v = (x.to(call.dtype) for x in (q, k, v))
    # put together here, so that what it gives to a bias is seen to be of this call
    mask = call.mask_with(**{**call.trained, **trained})
    with torch.autocast(q.device.type, enabled=False):
        return candidate.with_lse(q, k, v, **mask)


def _attend_under_autocast(
    primary: BoundAttention,
    dtype: torch.dtype | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **trained: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the model's own attention, under the autocast that was on at its call.

    It must be switched on again: a probe measures outside of any, and so does autograd run the
    backward pass, in which `_Split` may attend.
    """
    with torch.autocast(q.device.type, dtype=dtype, enabled=dtype is not None):
        return primary(q, k, v, **trained)


def _without_lse(attention: BoundAttention) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v)[0]


class _Split(torch.autograd.Function):
    """An attention whose output comes from one function and whose gradients from another.

    Only q, k and v are saved: the backward pass runs the second function forward on them, then
    differentiates it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forward: Callable[..., Tensor],
        backward: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attention = backward
        return forward(q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attention(*leaves)
        return (*torch.autograd.grad(out, leaves, grads[0]), None, None)
