"""The state a training begins with: taken at its first pass, and again where the script sets it.

A trial pass may come before weights are loaded, so the start is held against the weights once more
before the first step. Leaves out what else a start has (`start_parts`) and who asks (`training`).
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .environment import hash_state
from .given_start import StartRefused, was_set_anew
from .names import frozen_beside, masters_of, other_buffers, owners_of, version_of, whole
from .start_dtypes import other_dtypes
from .start_parts import hash_buffers, hash_optimizers, hash_part, is_strided, set_since

__all__ = ["TakenStart", "copied", "hash_start", "time_when_idle"]

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copied(state: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Return the whole of each tensor on the CPU, none of it shared; every rank must ask."""
    with torch.no_grad():
        return {name: whole(x).to("cpu", copy=True) for name, x in state.items()}


def time_when_idle() -> float:
    """Return the time, once the GPU has done what it was given: a state that is taken waits too."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.time()


def hash_start(state: Dict[str, Tensor], beside: Dict[str, Tensor], buffers: Iterable[str]) -> str:
    """Return the hash of a start `state`, and of what does not train `beside` it (`names`).

    Not of `buffers`: those are hashed one by one, as a mask may be that of one attention alone.
    """
    weights = {name: x for name, x in state.items() if name not in set(buffers)}
    return hash_state({**weights, **{f"frozen: {name}": x for name, x in beside.items()}})


class TakenStart:
    """The start state as it was taken; `begun` is what is told of it, and is kept true.

    It has the hash of the start, `init`, the names of its `buffers`, and says whether weights were
    `given` or `nudged`, and which of them the script has `set_anew` since. `baseline_dtypes` are
    what its weights have to have, and are no part of what is told. `taken_anew` is called when the
    start is taken once more.
    """

    def __init__(
        self,
        state: Dict[str, Tensor],
        begun: Dict[str, Any],
        optimizers: Sequence[Optimizer],
        taken_anew: Callable[[], None],
    ) -> None:
        self._state, self._begun, self._taken_anew = state, begun, taken_anew
        self._buffers: Sequence[str] = begun.get("buffers", ())
        self._dtypes: Dict[str, str] = begun.pop("baseline_dtypes", {})
        self._copied = copied(state)
        self._is_checked = False
        self._seen: Dict[str, Tuple[int, int]] = {}
        self._by_script: Set[str] = set()
        """Buffers that were written between forward passes."""
        self._by_model: Set[str] = set()
        """Buffers that a forward pass has written: what it counts or remembers is no start."""
        self._note(optimizers)

    def pass_begins(self, optimizers: Sequence[Optimizer]) -> None:
        """Take all of it anew if the script has set weights since the last pass."""
        if not self._is_checked:
            self._note_buffers(self._by_script)
        is_sharded = any(hasattr(x, "full_tensor") for x in self._state.values())
        is_moved = self._begun.get("given") or self._begun.get("nudged")
        if self._is_checked or is_sharded or is_moved or not self._is_touched():
            return
        if self._set_anew() is None:
            self._versions = self._versions_now()
            return
        self._copied = copied(self._state)
        self._note(optimizers)
        self._hash_anew()

    def pass_ends(self) -> None:
        """Note which buffers the forward pass itself has written."""
        if not self._is_checked:
            self._note_buffers(self._by_model)

    def step_begins(self, optimizers: Sequence[Optimizer]) -> None:
        """Hold it against the weights before the first step, and note what the optimizers hold.

        Every rank must ask. `StartRefused` if the weights are of other dtypes than the baseline's.
        """
        if self._is_checked:
            return
        self._is_checked = True
        # not sooner: a script may cast its weights after a trial pass
        own = {x: str(self._state[x].dtype) for x in self._state if x not in self._buffers}
        own = {name: dtype.replace("torch.", "") for name, dtype in own.items()}
        if said := other_dtypes(own, self._dtypes):
            raise StartRefused(said)
        self._begun["start_optimizers"] = hash_optimizers(optimizers, self._state)
        was = self._begun["start_buffers"]
        self._note_buffers(self._by_script)
        written = self._by_model - self._by_script
        now = hash_buffers(self._state, self._owners)
        was.update(set_since(was, {name: x for name, x in now.items() if name not in written}))
        name = self._set_anew()
        if name is None:
            return
        if self._begun.get("given") or self._begun.get("nudged"):
            self._begun["set_anew"] = name
            return
        # buffers stay as they were before the pass, which moves them
        masters = masters_of(self._state)
        self._copied.update(
            copied(
                {
                    own: x
                    for own, x in self._state.items()
                    if isinstance(x, nn.Parameter) or own in masters
                }
            )
        )
        self._hash_anew()

    def released(self) -> Dict[str, Tensor]:
        """Return the start, on the CPU, and keep it no longer."""
        copies, self._copied, self._owners, self._frozen = self._copied, {}, [], {}
        return copies

    def _hash_anew(self) -> None:
        self._begun["init"] = hash_start(self._copied, self._frozen, self._buffers)
        self._taken_anew()

    def _note(self, optimizers: Sequence[Optimizer]) -> None:
        self._owners = owners_of(self._state)
        self._begun["start_buffers"] = {
            **hash_buffers(self._state, self._owners),
            **{name: hash_part(self._state[name]) for name in self._buffers},
        }
        self._begun["start_optimizers"] = hash_optimizers(optimizers, self._state)
        self._frozen = frozen_beside(self._state, self._owners)
        self._sums = {name: _sum_of_bits(x) for name, x in self._frozen.items()}
        self._versions = self._versions_now()
        self._seen, self._by_script = self._buffers_now(), set()

    def _is_touched(self) -> bool:
        return self._versions_now() != self._versions

    def _versions_now(self) -> List[Tuple[int, int]]:
        """Return what changes when a weight is written: its count of writes, its place."""
        weights = [x for x in self._state.values() if isinstance(x, nn.Parameter)]
        return [(version_of(x), x.data_ptr()) for x in [*weights, *self._frozen.values()]]

    def _buffers_now(self) -> Dict[str, Tuple[int, int]]:
        """Return the same of each buffer that is no part of the state, by name."""
        buffers = other_buffers(self._state, self._owners)
        return {
            name: (version_of(x), x.data_ptr() if is_strided(x) else 0)
            for name, x in buffers.items()
        }

    def _note_buffers(self, noted: Set[str]) -> None:
        """Add to `noted` what was written since this was asked last."""
        now = self._buffers_now()
        noted.update(name for name, written in now.items() if self._seen.get(name) != written)
        self._seen = now

    def _set_anew(self) -> Optional[str]:
        """Return the first weight that the script has set since, one that trains before others."""
        name = was_set_anew(self._state, self._copied)
        others = [x for x, weight in self._frozen.items() if _sum_of_bits(weight) != self._sums[x]]
        return name or next(iter(others), None)


def _sum_of_bits(weight: Tensor) -> int:
    """Return the sum of the bits of what this rank holds, as whole numbers: cheaper than a hash."""
    to_local: Any = getattr(weight, "to_local", None)
    flat = (to_local() if to_local else weight).detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return int(flat.view(_WHOLE_NUMBERS[flat.element_size()]).sum())
