"""Which nodes of autograd's record have saved their tensors through hooks of the script's own.

To read what such a node has saved would call the hook, which may compute a model once more, as a
checkpoint does, or hand out a tensor once only. So nobody here does.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from threading import get_ident
from typing import Any, Callable, Dict, List, Tuple

from torch.autograd.graph import saved_tensors_hooks

from .loss_targets import place_in_graph
from .patching import put

__all__ = ["SavedHooks"]

_MOST = 4096


class SavedHooks:
    """The parts of the record that were made under hooks for saved tensors."""

    def __init__(self) -> None:
        self._ranges: List[Tuple[int, int]] = []
        """Sorted; one inside of another is left out."""
        self._open: Dict[int, List[int]] = {}
        """Where hooks that are on began, by thread."""

    def are_on(self, place: int) -> bool:
        """Whether the node at a place in the record may have saved its tensors through a hook."""
        if any(begun and begun[0] <= place for begun in self._open.values()):
            return True
        index = bisect_left(self._ranges, (place + 1,)) - 1
        return index >= 0 and place < self._ranges[index][1]

    def install(self) -> List[Callable[[], None]]:
        """Watch where scripts put such hooks; return what takes that out again."""
        enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

        @functools.wraps(enter)
        def entered(hooks: Any) -> Any:
            self._open.setdefault(get_ident(), []).append(place_in_graph())
            return enter(hooks)

        @functools.wraps(leave)
        def left(hooks: Any, *error: Any) -> Any:
            begun = self._open.get(get_ident())
            begin = begun.pop() if begun else None
            if begin is not None and not begun and begin < (end := place_in_graph()):
                insort(self._ranges, (begin, end))
                del self._ranges[:-_MOST]
            return leave(hooks, *error)

        owner = saved_tensors_hooks
        return [put(owner, "__enter__", entered), put(owner, "__exit__", left)]
