"""What a rank that keeps no record has in place of a writer and a witness.

It counts the updates and the losses that are not finite, as the writer does, so that all ranks stop
at the same update, and does its part where weights are recorded of which it holds a part. Leaves
out the record, which is the first rank's (`writer`, `witnessing`).
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stability.model.ranks import Ranks
from stability.recorder.sharded_weights import record_weights
from stability.recorder.writer import is_sharded
from stability.records.manifest import PATIENCE

__all__ = ["FollowingWitness", "FollowingWriter"]


class FollowingWriter:
    """Is told what a `RunWriter` is told, and writes nothing but its part of sharded weights."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.step = 0
        self._bad = self._since = 0

    @property
    def diverged(self) -> int | None:
        """As `RunWriter.diverged`."""
        return self._since if self._bad >= PATIENCE else None

    def updated(self, step: int, loss: float, batch: str) -> None:
        """Count the update."""
        self.step = step
        if math.isfinite(loss):
            self._bad = 0
            return
        if self._bad == 0:
            self._since = step - 1
        self._bad += 1

    def state(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Do this rank's part of what the first one records; of weights that are whole, nothing."""
        if is_sharded(state):
            found = record_weights(state, self._ranks.told())
            if found.write is not None:
                found.write.wait()

    def snapshot(self, step: int, state: Mapping[str, Tensor]) -> None:
        """As `state`."""
        self.state(step, state)

    def held_out(self, step: int, loss: float) -> None:
        """Do nothing."""

    def predictions(self, step: int, log_probabilities: Any) -> None:
        """Do nothing."""

    def lacks_predictions(self, step: int) -> bool:
        """Return what nobody asks of this rank."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the first rank's state is in the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the first rank's counts."""
        self.step, self._bad, self._since = state["step"], state["bad"], state["since"]


class FollowingWitness:
    """Is told what a `Witnessing` is told, and looks at nothing."""

    def process_begins(self, device: Any) -> None:
        """Do nothing."""

    def begin(self, step: int) -> None:
        """Do nothing."""

    def update_begins(self, step: int, optimizers: Any) -> None:
        """Do nothing."""

    def backward_ended(self) -> None:
        """Do nothing."""

    def optimizer_begins(self) -> None:
        """Do nothing."""

    def update_ended(self, step: int) -> None:
        """Do nothing."""

    def end(self, step: int, device: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""
