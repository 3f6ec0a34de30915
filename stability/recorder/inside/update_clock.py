"""Times each update of a trial, and ends the trial once it has gone on for long enough.

Leaves out what is made of the times (`study.command_cost`).
"""

from __future__ import annotations

import time
from typing import Any, Dict, List

from .taken_start import time_when_idle

__all__ = ["UpdateClock"]


class UpdateClock:
    """Notes when each update has ended, its look at the gradient included.

    `asked` is two numbers: the updates that are made at least, and the seconds since the first one
    has ended after which no further one is begun.
    """

    def __init__(self, asked: str) -> None:
        least, longest = asked.split()
        self._least, self._longest_s = int(least), float(longest)
        self._begun = 0.0
        self.ended: List[float] = []
        """When each update has ended, as `time.time` says it, once the GPU was done with it."""
        self.is_over = False
        """Whether it was this that has ended the training."""

    def ends_trial(self, step: int, ranks: int) -> bool:
        """Note that update number `step`, from 1, has ended; return whether it is the last one.

        Of several ranks all end with the least: by clocks of their own each might end with another.
        """
        self.ended.append(time_when_idle())
        self._begun = self._begun or time.monotonic()
        is_late = time.monotonic() - self._begun > self._longest_s
        self.is_over = step >= self._least and (is_late or ranks > 1)
        return self.is_over

    def told(self) -> Dict[str, Any]:
        """Return what goes with the last line of the training."""
        return {"clock": {"ended": self.ended, "is_over": self.is_over}}
