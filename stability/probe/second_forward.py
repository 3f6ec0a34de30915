"""Runs a model's forward pass a second time, in the stream of the shadow, and leaves no trace.

In the second pass the first shadow computes every layer, so that an error made in a layer can be
told from one that earlier layers carried in. It gets the same arguments, the same random state and
copies of the buffers, and records no gradients; random state is put back afterwards. Leaves out the
comparison (`attention_probe`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from stability.probe.attention_probe import AttentionProbe
from stability.probe.executed import unwitnessed

__all__ = ["repeating_forward"]


@contextmanager
def repeating_forward(roots: Sequence[nn.Module], probe: AttentionProbe) -> Iterator[None]:
    """Inside, each forward pass of one of `roots` that the probe looks at is repeated for it.

    Where one root calls another, the outer one's pass is repeated.
    """
    repeater = _Repeater(probe)
    handles = []
    for root in roots:
        handles.append(root.register_forward_pre_hook(repeater.before, with_kwargs=True))
        handles.append(
            root.register_forward_hook(repeater.after, with_kwargs=True, always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Repeater:
    """The forward hooks of the roots."""

    def __init__(self, probe: AttentionProbe) -> None:
        self._probe = probe
        self._depth = 0
        self._repeating = False
        self._state: _RandomState | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._repeating:
            return
        if self._depth == 0:
            self._state = _RandomState()
        self._depth += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._repeating:
            return
        self._depth -= 1
        # output is None when the forward pass has raised
        if self._depth or output is None or not self._probe.wants_second_forward:
            return
        # the state after the run's own pass, from which the run is to go on
        now, self._repeating = _RandomState(), True
        assert self._state is not None
        # The pass writes into copies of the buffers, e.g. running means, and they are dropped: the
        # backward pass may still need the originals as they are.
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        try:
            self._state.restore()
            with unwitnessed(), torch.no_grad(), self._probe.second_forward():
                functional_call(module, buffers, args, kwargs)
        finally:
            self._repeating = False
            now.restore()


class _RandomState:
    """The state of torch's generators, on the CPU and on every CUDA device in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        # where CUDA has not been used there is no state to keep, and asking would start it
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
