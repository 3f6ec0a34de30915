"""Runs a model's forward pass a second time, in the stream of the shadow, and leaves no trace.

In the second pass the first shadow computes every layer, so that an error made in a layer can be
told from one that earlier layers carried in. It gets the same arguments, the same random state and
copies of the buffers, and records no gradients; random state is put back afterwards. Leaves out the
comparison (`attention_probe`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition, local
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from stability.probe.attention_probe import AttentionProbe
from stability.probe.executed import unwitnessed
from stability.probe.parallel_ranks import apart_from_ranks

__all__ = ["repeating_forward"]


PutHooks = Callable[[Callable[..., None], Callable[..., None]], Callable[[], None]]
"""Puts a forward pre-hook and a hook that is given keywords, too; returns what takes them away."""


@contextmanager
def repeating_forward(
    roots: Sequence[nn.Module], probe: AttentionProbe, put_hooks: PutHooks | None = None
) -> Iterator[None]:
    """Inside, each forward pass of one of `roots` that the probe looks at is repeated for it.

    Where one root calls another, the outer one's pass is repeated. Not repeated is a pass that
    shares its time with one of another thread, whose results would be mixed with its own, and one
    that a backward pass makes, which is but a part. `put_hooks` puts the hooks elsewhere than on
    the roots, where copies of these would carry them.
    """
    repeater = _Repeater(roots, probe)
    take_away = (put_hooks or partial(_put_on, roots))(repeater.before, repeater.after)
    try:
        yield
    finally:
        take_away()


def _put_on(
    roots: Sequence[nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    handles = []
    for root in roots:
        handles.append(root.register_forward_pre_hook(before))
        handles.append(root.register_forward_hook(after, with_kwargs=True, always_call=True))

    def take_away() -> None:
        for handle in handles:
            handle.remove()

    return take_away


class _Thread(local):
    """The forward pass that one thread makes."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        """The roots, innermost last."""
        self.is_repeating = False
        self.is_whole = False
        """Whether the probe had captured nothing before, and no backward pass makes it."""
        self.state: _RandomState | None = None


class _Repeater:
    """The forward hooks of the roots."""

    def __init__(self, roots: Sequence[nn.Module], probe: AttentionProbe) -> None:
        self._roots = set(roots)
        self._probe = probe
        self._thread = _Thread()
        self._passes = 0
        """How many threads run a pass now."""
        self._have_met = False
        """Whether one of them began while another ran."""
        self._is_repeating = False
        self._changes = Condition()

    def before(self, module: nn.Module, args: Any) -> None:
        thread = self._thread
        if module not in self._roots or thread.is_repeating:
            return
        if module in thread.running:
            # an interrupt skips the hook behind a pass: it has ended all the same
            self._leave(module)
        if not thread.running:
            with self._changes:
                # the second pass has other buffers in the model
                self._changes.wait_for(lambda: not self._is_repeating)
                self._passes += 1
                self._have_met |= self._passes > 1
            thread.state = _RandomState()
            is_in_backward = torch._C._current_graph_task_id() != -1
            thread.is_whole = not is_in_backward and not self._probe.has_captured
        thread.running.append(module)

    def after(self, module: nn.Module, args: Any, *kwargs_and_out: Any) -> None:
        thread = self._thread
        if thread.is_repeating or module not in thread.running:
            return
        # out is None when the pass has raised, and there may be no keywords then
        is_due = kwargs_and_out[-1] is not None and self._probe.wants_second_forward
        if self._leave(module, repeats=is_due):
            self._repeat(module, args, kwargs_and_out[0])

    def _leave(self, module: nn.Module, *, repeats: bool = False) -> bool:
        """Count a root out; return whether its pass is now to be repeated, if it `repeats`."""
        thread = self._thread
        del thread.running[thread.running.index(module) :]
        if thread.running:
            return False
        with self._changes:
            is_due = repeats and thread.is_whole and not self._have_met
            self._passes -= 1
            self._have_met &= self._passes > 0
            self._is_repeating |= is_due
        return is_due

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Repeater":
        """Return one that repeats nothing: it is a copied model's."""
        return _Repeater((), self._probe)

    def _repeat(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        thread = self._thread
        assert thread.state is not None
        # the state after the run's own pass, from which the run is to go on
        now, thread.is_repeating = _RandomState(), True
        try:
            # The pass writes into copies of the buffers, e.g. running means, and they are dropped:
            # the backward pass may still need the originals as they are.
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            thread.state.restore()
            with apart_from_ranks() as set_apart, self._probe.second_forward():
                for part in module.modules():
                    set_apart(part)
                with unwitnessed(), torch.no_grad():
                    functional_call(module, buffers, args, kwargs)
        finally:
            now.restore()
            thread.is_repeating = False
            with self._changes:
                self._is_repeating = False
                self._changes.notify_all()


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
