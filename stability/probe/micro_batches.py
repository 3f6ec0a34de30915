"""Which calls of a step are looked at where it has several micro-batches: the first's, or all.

The second call of a layer in a step is the second micro-batch's, and is named `layer@batch1`; for
within one forward pass each call has a name of its own. A recomputation of a checkpointed layer
runs inside the backward pass and is no call of its own, unless the layer has made none before that
counts, as in reentrant checkpointing. Leaves out ranks (`records.metric_names.at_rank`).
"""

from threading import Lock
from typing import Literal, get_args

import torch

from stability.records.metric_names import at_batch

__all__ = ["MicroBatches", "Which"]

Which = Literal["first", "all"]


class MicroBatches:
    """Names the calls of one step after another."""

    def __init__(self, which: Which = "first") -> None:
        if which not in get_args(Which):
            allowed = " or ".join(map(repr, get_args(Which)))
            raise ValueError(f"shadow: micro_batches must be {allowed}, got {which!r}")
        self._are_all = which == "all"
        self._calls: dict[str, int] = {}
        """How often each layer has been called in this step."""
        self._called_in_forward: set[str] = set()
        self._lock = Lock()

    def begin_step(self) -> None:
        """Count from the first micro-batch."""
        self._calls.clear()
        self._called_in_forward.clear()

    def name(self, layer: str, *, is_made: bool = False) -> str:
        """Return the name of this call of `layer`; "" for one that is not looked at.

        `is_made` says that it was made before, so that where it is told says nothing.
        """
        # -1 outside of any backward pass
        is_in_backward = not is_made and torch._C._current_graph_task_id() != -1
        with self._lock:
            if is_in_backward and layer in self._called_in_forward:
                return ""
            count = self._calls.get(layer, 0)
            self._calls[layer] = count + 1
            if not is_in_backward:
                self._called_in_forward.add(layer)
        if count and not self._are_all:
            return ""
        return at_batch(layer, count) if count else layer
