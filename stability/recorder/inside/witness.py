"""What a process that trains tells of what it executes: dtypes, switches, known answers.

The values are those of a stretch of `records.witness`. Leaves out when it is looked at (`looks`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict

import torch
from torch import Tensor

from .looks import Looks

__all__ = ["InsideWitness"]

_OF_CONTEXTS = ("autocast_cpu", "autocast_cuda", "fp8_transformer_engine")
"""Switches that stand otherwise where a model is called than where a script ends: their effect is
in the dtypes."""


class InsideWitness:
    """Bears witness to a training in this process, from its first update to its end.

    `switches` and `answers` are those of `records.numeric_switches` and `probe.known_answers`,
    which may have another name here; `before` are the switches before the script's own imports.
    """

    def __init__(
        self,
        looks: Looks,
        switches: Callable[[], Dict[str, Any]],
        answers: Callable[[torch.device], Dict[str, Any]],
        before: Dict[str, Any],
    ) -> None:
        self._looks, self._switches, self._known = looks, switches, answers
        self._device = torch.device("cpu")
        self._moments: Dict[str, Any] = {"before_imports": before} if before else {}
        self._answers: Dict[str, Any] = {}

    def begin(self, state: Dict[str, Tensor]) -> None:
        """Note switches and known answers, these on the weights' device, before any update."""
        self._device = next((x.device for x in state.values()), self._device)
        self._note("at_start")

    def told(self) -> Dict[str, Any]:
        """End the looks, and return what is to be written with the record's end."""
        self._looks.end()
        self._note("at_end")
        stretch = {
            "unproven": self._looks.unproven,
            "steps": self._looks.steps,
            "executed": self._looks.rows,
            "switches": self._moments,
            "answers": self._answers,
        }
        return {"witness": stretch}

    def _note(self, moment: str) -> None:
        try:
            # the script may be inside of a context of its own
            with torch.autocast(self._device.type, enabled=False):
                self._answers[moment] = self._known(self._device)
        except RuntimeError:  # a device or a strict setting that has no such computation
            self._answers[moment] = {}
        # after the answers: what torch settles at a first call is as it will stay
        told = {**self._switches(), "threads": torch.get_num_threads()}
        self._moments[moment] = {k: v for k, v in told.items() if k not in _OF_CONTEXTS}
