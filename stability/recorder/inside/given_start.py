"""Gives a training the start weights of another run, bit by bit: by name, before the first update.

Arms whose code draws other random numbers as it makes its weights, as under another version of
torch, so begin from one state. Copies of the weights, as those that a moving average starts from,
are set with them, and so is the model whose masters an optimizer has. Leaves out where the weights
come from: the command that started the training has put them into a file.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Set

import torch
from torch import Tensor, nn

from .names import buffers_of, cast_of, copies_of, masters_of
from .older_torch import distributed_like
from .prefixed_copies import prefixed_copies

__all__ = ["StartRefused", "give_start", "read_start", "was_set_anew"]


class StartRefused(SystemExit):
    """The training can't begin with what it is to be given, e.g. weights; the process ends.

    `code` is its exit code; where other ranks go on by then, it must not be 0.
    """

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(code)
        self.why = why


def read_start(path: str) -> Dict[str, Tensor]:
    """Return the start weights that another run has left, by name, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def give_start(state: Dict[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy `given` into `state`, whose names, shapes and dtypes must be the same.

    But for buffers that are not given: they stay as the script made them.
    `StartRefused`, one sentence, before any weight is changed, if they are not.
    """
    problem = _problem(state, given)
    if problem:
        raise StartRefused(problem)
    masters = masters_of(state)
    taken: Set[int] = set()
    beside = prefixed_copies(state)
    with torch.no_grad():
        for name, weight in [*masters.items(), *state.items()]:
            # before it changes: copies are known by the bits that they share with it
            copies = copies_of(name, weight) if isinstance(weight, nn.Parameter) else []
            if name in masters and id(weight) not in taken:
                copies = cast_of(weight, taken)
                taken.update(map(id, [weight, *copies]))
            if name not in given:  # a buffer of this run's code alone
                continue
            placed = distributed_like(given[name].to(weight.device), weight)
            for each in [weight, *copies, *beside.get(id(weight), ())]:
                each.copy_(placed)


def was_set_anew(state: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Optional[str]:
    """Return the first parameter that is not as it was in `start`, on the CPU; None if all are.

    To be asked before the first update. Every rank must ask, since shards are gathered.
    """
    found = None
    masters = masters_of(state)
    for name, weight in state.items():
        # a forward pass moves buffers
        if not isinstance(weight, nn.Parameter) and name not in masters:
            continue
        gather: Any = getattr(weight, "full_tensor", None)
        whole = (gather() if gather else weight).detach().to("cpu")
        if found is None and not _same_bits(whole, start[name]):
            found = name
    return found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN is equal to itself here
    return one.equal(other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _problem(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    for name in sorted({*state, *given} - (buffers_of(state).keys() - given.keys())):
        if name not in state or name not in given:
            where = "the baseline" if name in state else "this run"
            return f"same_start: weights must be those of the baseline, {where} has no {name}"
        own, other = state[name], given[name]
        if own.shape != other.shape:
            return (
                f"same_start: {name} must have the baseline's shape {tuple(other.shape)}, has "
                f"{tuple(own.shape)}"
            )
        if own.dtype != other.dtype:
            return f"same_start: {name} must be the baseline's {other.dtype}, is {own.dtype}"
    return ""
