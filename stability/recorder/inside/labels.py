"""Gives each label that only a loss saw to the samples it is for: those of the call it belongs to.

Leaves out how labels are found (`loss_targets`), and what a model was given (`training`).
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Set, Tuple

from torch import Tensor

from .batch_hash import hash_with
from .loss_targets import Aim
from .rows import Given, Row

__all__ = ["Labels"]

_MOST_PAST = 64
"""Calls of before the last step that are kept: as many models as step one after another."""


class Labels:
    """The labels of an update."""

    def __init__(self) -> None:
        self._past: Sequence[Given] = ()
        self._late: List[Tuple[str, Tensor]] = []

    def add(self, aims: List[Aim], given: Sequence[Given], *, is_counted: bool) -> Set[str]:
        """Add labels to the calls of `given` that their loss is made of; return what is not known.

        A call of before the last step counts, too: its loss may come after another one's step.
        """
        untold: Set[str] = set()
        for aim in aims:
            one = _call_of(aim, [*self._past, *given])
            if one is None:
                untold.add(f"of which batch {aim.name} is")
                continue
            rows = len(one.samples)
            if not aim.is_shared and not (rows and aim.value.numel() % rows == 0):
                untold.add(f"of which sample each {aim.name} is")
            if is_counted:
                nth = one.aims[aim.name] = one.aims.get(aim.name, -1) + 1
                value = hash_with(one.samples, aim.value, is_shared=aim.is_shared, nth=nth)
                is_late = not any(one is each for each in given)
                (self._late if is_late else one.labels).append((aim.name, value))
        return untold

    def step(self, given: Sequence[Given], row: Row) -> None:
        """Tell of a step, to which `given` led; its `row` gets the labels of earlier calls."""
        for name, value in self._late:
            row.labels.setdefault(name, []).append(value)
        self._late, self._past = [], [*self._past, *given][-_MOST_PAST:]


def _call_of(aim: Aim, given: Sequence[Given]) -> Optional[Given]:
    """Return the call that a label's loss is made of, or else the last one before it."""
    own = [one for one in given if one.place == aim.call]
    before = [one for one in given if one.place <= aim.place]
    return own[-1] if own else before[-1] if before else None
