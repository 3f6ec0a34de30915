"""The gradient of any torch model's loss under three attentions, isolated or as trained.

The caller's `loss` is called again for each: the model's attention calls are caught as the probe
catches them, and computed by the candidate, by the model's own attention or by the golden. While it
runs, copies stand in the place of the model's parameters and buffers, so that the model's own,
their gradients and whatever hooks are on them never see it. Isolated, the copies are widened and
autocast is switched off for every operation but the attention, whatever `loss` itself asks for.
Values that the model's own code casts to a narrow dtype stay narrow. Leaves out what is measured of
the gradients (`probe.gradient_evidence`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import golden_attention
from stability.intercept.catcher import put_mode_below
from stability.intercept.global_hooks import put_global_hooks
from stability.intercept.replacement import Replacement
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.captured_call import AttentionCall, BoundAttention, Interceptor
from stability.probe.gradient_evidence import (
    AttentionRole,
    isolated_attention,
    isolated_golden,
    rounded_value,
    surrounding_dtype,
)
from stability.probe.isolation import isolated
from stability.probe.parallel_ranks import apart_from_ranks
from stability.probe.pausable_mode import PausableMode

__all__ = ["CaughtGradients", "Loss", "check_whole"]

Loss = Callable[[], Tensor]
"""Computes the loss of the current batch with the model, as the training does, and returns it."""

_NARROW = (torch.bfloat16, torch.float16)


def _as_given(call: AttentionCall, primary: BoundAttention) -> AttentionCall:
    return call


class CaughtGradients:
    """Gradients of `loss` by parameter of `model`; the replacement's layers are those compared."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        replacement: Replacement,
        catch: Interceptor,
        computed: Callable[[AttentionCall, BoundAttention], AttentionCall] = _as_given,
    ) -> None:
        self._model = model
        self._loss = loss
        self._replacement = replacement
        self._catch = catch
        self._computed = computed
        """Gives a call the dtype in which the model's own attention computes."""
        self._dtypes: dict[str, torch.dtype] = {}
        """What each layer's attention computes in as trained, once that has been looked at."""
        self._dtypes_of_mask: dict[str, dict[str, torch.dtype]] = {}
        """The same of what of its mask is trained: a bias, sinks."""

    def with_candidate(self, candidate: ResolvedAttention) -> "CaughtGradients":
        """Return those under another candidate; what was seen as trained is known to both."""
        other = copy(self)
        other._replacement = replace(self._replacement, candidate=candidate)
        return other

    def of(self, role: AttentionRole, is_isolated: bool) -> Mapping[str, Tensor]:
        """Return the gradient; as trained has to come first, since it shows the dtypes.

        ValueError if no attention call of the compared layers is made, or no gradient arrives.
        """
        check_whole(self._model)
        device = next(self._model.parameters()).device
        dtype = self._widest() if is_isolated else None
        leaves = {
            parameter: parameter.detach()
            .to(_widened(parameter, dtype), copy=True)
            .requires_grad_(parameter.requires_grad)
            for parameter in self._model.parameters()
        }
        trained = {parameter: leaf for parameter, leaf in leaves.items() if leaf.requires_grad}
        mode = _AutocastOff(device.type) if is_isolated else None
        seen: list[str] = []

        def handle(call: AttentionCall, primary: BoundAttention) -> Tensor:
            if not self._replacement.covers(call.layer):
                if is_isolated:
                    return self._isolated("baseline", call, primary, mode)
                return primary(call.q, call.k, call.v)[0]
            seen.append(call.layer)
            if is_isolated:
                return self._isolated(role, call, primary, mode)
            return self._as_trained(role, call, primary)

        with (
            isolated(device),
            torch.enable_grad(),
            _standing_in(self._model, leaves, dtype),
            _around_each_module(mode),
            # in the backward pass, too, where checkpointed layers are computed again
            self._catch(self._model, handle),
            mode or nullcontext(),
        ):
            loss = self._loss()
            _check(seen, loss)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        if all(x is None for x in found):
            raise ValueError("the gradient of the loss reaches none of the model's weights")
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return {
            names[parameter]: torch.zeros_like(leaf) if x is None else x
            for (parameter, leaf), x in zip(trained.items(), found, strict=True)
        }

    def _as_trained(
        self, role: AttentionRole, call: AttentionCall, primary: BoundAttention
    ) -> Tensor:
        call = self._computed(call, primary)
        dtype = self._dtypes[call.layer] = call.dtype or call.q.dtype
        self._dtypes_of_mask[call.layer] = {name: x.dtype for name, x in call.trained.items()}
        if role == "baseline":
            return primary(call.q, call.k, call.v)[0]
        # refuses what a candidate can't be given, for the golden too
        candidate = self._replacement.of(call, primary)
        if role == "candidate":
            return candidate(call.q, call.k, call.v)[0]
        q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
        return golden_attention(q, k, v, **call.mask_with()).to(dtype)

    def _isolated(
        self,
        role: AttentionRole,
        call: AttentionCall,
        primary: BoundAttention,
        mode: "_AutocastOff | None",
    ) -> Tensor:
        rounding = self._dtypes.get(call.layer, call.dtype or call.q.dtype)
        bound = primary if role == "baseline" else self._replacement.of(call, primary)
        # the model's own casts its mask where autocast does; a candidate may not know autocast
        autocast = role == "baseline" and rounding in _NARROW

        dtypes = self._dtypes_of_mask.get(call.layer, {})
        trained = {name: (x, dtypes.get(name, x.dtype)) for name, x in call.trained.items()}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            narrow = {name: x.to(dtype) for name, (x, dtype) in trained.items()}
            with torch.autocast(q.device.type, dtype=rounding, enabled=autocast):
                return bound(q, k, v, **narrow)[0]

        with mode.paused() if mode else nullcontext():
            if role == "golden":
                exact = {name: rounded_value(x, dtype) for name, (x, dtype) in trained.items()}
                mask = call.mask_with(**exact)
                return isolated_golden(rounding)(call.q, call.k, call.v, **mask)
            return isolated_attention(attend, rounding)(call.q, call.k, call.v)

    def _widest(self) -> torch.dtype:
        wide = [surrounding_dtype(dtype) for dtype in self._dtypes.values()]
        return torch.float64 if torch.float64 in wide else torch.float32


def check_whole(model: nn.Module) -> None:
    """ValueError if ranks share a weight: what gathers it puts it in the place of our copies."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):  # a DTensor's; importing its module takes long
            raise ValueError(
                f"shadow: gradient_every needs whole weights, {name} is sharded over ranks; leave "
                "gradient_every out, or look at a run that is not sharded"
            )
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "shadow: gradient_every needs whole weights, got FullyShardedDataParallel at "
                f"{name or 'its root'}; leave gradient_every out, or look at a run without it"
            )


def _check(seen: list[str], loss: Any) -> None:
    if not seen:
        raise ValueError(
            "shadow: loss must run the model, got no attention call of the compared layers in it"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a tensor {tuple(loss.shape)} that requires grad: {loss.requires_grad}"
        raise ValueError(f"shadow: loss must return one number with its graph, got {got}")


def _widened(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return x.dtype if dtype is None or not x.is_floating_point() else dtype


@contextmanager
def _around_each_module(mode: "_AutocastOff | None") -> Iterator[None]:
    """Inside, a module tells other ranks nothing, and `mode` is on where it is computed again.

    `loss` may call wrappers around the model. A mode is off inside the call that it is handed, as
    that of the backward pass, in which checkpointed layers run; it may have threads of its own.
    """
    thread = local()

    def before(module: nn.Module, args: Any) -> None:
        set_apart(module)
        is_in_backward = torch._C._current_graph_task_id() != -1
        if mode and is_in_backward and getattr(thread, "outermost", None) is None:
            thread.outermost, thread.take_away = module, put_mode_below(mode)

    def after(module: nn.Module, *_: Any) -> None:
        if getattr(thread, "outermost", None) is module:
            thread.outermost = None
            thread.take_away()

    with apart_from_ranks() as set_apart:
        remove = put_global_hooks(before, after)
        try:
            yield
        finally:
            remove()


@contextmanager
def _standing_in(
    model: nn.Module, leaves: Mapping[nn.Parameter, Tensor], dtype: torch.dtype | None
) -> Iterator[None]:
    """Inside, `leaves` are the parameters of `model`, and copies its buffers.

    Tensors go where `torch.func.functional_call` would put them; `loss` is not ours to call so.
    """
    members: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            members += [(group, name, x) for name, x in group.items() if x is not None]
    # one copy for a buffer that several modules share
    buffers = {x: x.clone().to(_widened(x, dtype)) for x in model.buffers()}
    stand_ins = {**leaves, **buffers}
    try:
        for group, name, x in members:
            group[name] = stand_ins[x]
        yield
    finally:
        for group, name, x in members:
            group[name] = x


class _AutocastOff(PausableMode):
    """Switches autocast off for each operation, also where the code inside has switched it on.

    What comes in the run's dtype, e.g. an image, is widened where an operation refuses to take it
    beside wider weights.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._off = partial(torch.autocast, device, enabled=False)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._off():
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                widest = _widest_of([*args, *kwargs.values()])
                if widest is None:
                    raise
            return func(
                *(_to(x, widest) for x in args),
                **{name: _to(x, widest) for name, x in kwargs.items()},
            )


def _widest_of(values: Iterable[Any]) -> torch.dtype | None:
    """Return the widest dtype of the floating tensors; None if all have it."""
    dtypes = {x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()}
    return max(dtypes, key=lambda dtype: dtype.itemsize) if len(dtypes) > 1 else None


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
