"""Tells that the weights were updated and `step()` was not called.

Without that call a session stays at its step: what follows would be taken for more of it. An update
in place moves a parameter's version counter, which can be read without waiting for a device. Leaves
out which calls are looked at (`session`).
"""

import warnings

from torch import nn

from stability.probe.captured_call import version_of

__all__ = ["FORGOTTEN", "UpdateWatch"]

FORGOTTEN = (
    "the weights were updated and step() was not called since; call it on what shadow yields "
    "after each update: without it no further step is looked at"
)


class UpdateWatch:
    """Knows whether the weights of `model` have changed since the last mark."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._was_told = False
        self.mark()

    def mark(self) -> None:
        """Take the weights as they are now for those of the step."""
        # these very ones: in a pass of its own FSDP puts gathered weights in their place
        self._parameters = list(self._model.parameters())
        self._version = self._sum_of_versions()

    @property
    def has_seen_one(self) -> bool:
        """Whether the weights were updated in place since the last mark."""
        return self._sum_of_versions() != self._version

    def warn(self) -> bool:
        """Mark, warn if nobody has been warned yet, and return whether that was the first time."""
        self.mark()
        is_first, self._was_told = not self._was_told, True
        if is_first:
            # beyond this, the session's method and who has called it
            warnings.warn(f"shadow: {FORGOTTEN}", stacklevel=3)
        return is_first

    def _sum_of_versions(self) -> int:
        return sum(version_of(parameter) for parameter in self._parameters)
