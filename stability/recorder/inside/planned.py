"""After which updates a state is kept, and how a training is ended that has made those asked for.

Leaves out who asks for them (`recorded`). It needs the standard library alone.
"""

from __future__ import annotations

__all__ = ["PlannedStop", "is_due"]


class PlannedStop(SystemExit):
    """The training has made as many updates as were asked for; the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def is_due(step: int) -> bool:
    """Whether a state is kept after `step` updates where no steps are named: 0, 1, 2, 5, 10, ..."""
    while step and step % 10 == 0:
        step //= 10
    return step in (0, 1, 2, 5)
