"""Whose an autograd node is: the module that made it, also in graphs that a backward builds itself.

A node carries a number that its thread has counted up to. What a thread has made since it was last
asked belongs to who runs there now, so that each change of who runs is to be told (`claim`). A
backward may compute a forward again, or build another graph and take its gradient (a checkpoint
does both): then a second graph task runs inside the first, and what has no owner in it belongs to
the node of the outer task that began it.

A GPU's nodes run in a thread of its own, whose numbers repeat those of the forward's thread, hence
two tables. Leaves out what is computed (`executed`).

Loaded in the processes of recorded trainings as well (`recorder.inside`), under another package's
name, so on Python 3.9 and by relative imports.
"""

from __future__ import annotations

from threading import get_ident
from typing import Dict, List, Tuple

import torch
from torch._C._autograd import _get_sequence_nr

from ..records.executed_row import Part

__all__ = ["NOBODY", "NodeOwners", "Owner"]

Owner = Tuple[str, Part]
"""A module or an attention by name, and what part its products are."""

NOBODY: Owner = "", "unowned"


class NodeOwners:
    """The owners of autograd nodes, by the numbers of the nodes."""

    def __init__(self) -> None:
        self._of_forward: Dict[int, Owner] = {}
        self._of_backward: Dict[Tuple[int, int], Owner] = {}
        """By thread and number."""
        self._counted: Dict[int, int] = {}
        """The number that each thread's next node had when it was last asked."""
        self._left: Dict[int, Tuple[Owner, int]] = {}
        """Who is to get what a thread has made in a forward, and up to which number."""
        self._tasks: Dict[int, List[Tuple[int, Owner]]] = {}
        """The graph tasks that run in each thread, outermost first, and who ran last in each."""

    def begin(self) -> None:
        """Note that what this thread has made so far is nobody's."""
        self._counted[get_ident()] = _get_sequence_nr()
        self._left.clear()
        self._tasks.clear()

    def leave_for(self, owner: Owner) -> None:
        """Note that `owner` is to get what a forward has made in this thread."""
        self._left[get_ident()] = owner, _get_sequence_nr()

    def claim(self, owner: Owner, task: int) -> None:
        """Give `owner` what this thread has made since it was last asked; `task` is -1 forward."""
        self._settle()
        thread, count = get_ident(), _get_sequence_nr()
        if task < 0:
            self._claim_forward(thread, owner, count)
            return
        made = self._made(thread, count)
        if made:
            self._of_backward.update(dict.fromkeys(((thread, number) for number in made), owner))
        tasks = self._tasks.setdefault(thread, [])
        while tasks and tasks[-1][0] >= task:
            tasks.pop()
        tasks.append((task, owner))

    def _settle(self) -> None:
        """Claim what was left, of each thread: a GPU's backward has another than its forward."""
        while self._left:
            thread, (owner, count) = self._left.popitem()
            self._claim_forward(thread, owner, count)

    def _claim_forward(self, thread: int, owner: Owner, count: int) -> None:
        self._of_forward.update(dict.fromkeys(self._made(thread, count), owner))
        # no backward runs while a forward does, or it would be told that one is inside it
        self._tasks.clear()

    def _made(self, thread: int, count: int) -> range:
        """Return the numbers of the nodes that `thread` has made since it was last asked."""
        # a thread that was never asked may have made a node for the very call that asks
        before = self._counted.get(thread, max(count - 1, 0))
        self._counted[thread] = count
        return range(before, count)

    def running(self, task: int) -> Owner:
        """Return the owner of the node that this thread runs in `task`; NOBODY if it has none.

        A tensor's hook runs in no node, and what was made before `begin` has no owner.
        """
        self._settle()
        thread, node = get_ident(), torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        of_forward = self._of_forward.get(number)
        of_backward = self._of_backward.get((thread, number))
        tasks = self._tasks.get(thread)
        if tasks and tasks[0][0] < task:
            outer = next(owner for of, owner in reversed(tasks) if of < task)
            return of_backward or of_forward or outer
        # a graph of a gradient that was taken in a forward (`create_graph`) was made by a backward
        return of_forward or of_backward or NOBODY
