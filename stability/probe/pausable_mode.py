"""A mode of torch's functions that can be left for a while, as around an attention that is ours.

Leaves out what a mode does to a call (`double_precision`, `intercept.gradients`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["PausableMode"]


class PausableMode(TorchFunctionMode, ABC):
    """A context that changes calls of torch's functions by `_called`, except where it is paused."""

    _is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every call is made as it is."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, changed unless paused."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        return self._called(func, args, kwargs or {})

    @abstractmethod
    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function gives under the mode."""
