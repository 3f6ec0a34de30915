"""Whose an autograd node is: the module that made it, also in graphs that a backward builds itself.

A node carries a number that its thread has counted up to. What a thread has made since it was last
asked belongs to who runs there now, so that each change of who runs is to be told (`claim`). A
backward may compute a forward again, or build another graph and take its gradient (a checkpoint
does both): then a second graph task runs inside the first, and what has no owner in it belongs to
the node of the outer task that began it.

A GPU's nodes run in a thread of its own, whose numbers repeat those of the forward's thread, hence
two tables. Leaves out what is computed (`executed`).
"""

from threading import get_ident

import torch
from torch._C._autograd import _get_sequence_nr

from stability.records.witness import Part

__all__ = ["NOBODY", "NodeOwners", "Owner"]

Owner = tuple[str, Part]
"""A module or an attention by name, and what part its products are."""

NOBODY: Owner = "", "unowned"


class NodeOwners:
    """The owners of autograd nodes, by the numbers of the nodes."""

    def __init__(self) -> None:
        self._of_forward: dict[int, Owner] = {}
        self._of_backward: dict[tuple[int, int], Owner] = {}
        """By thread and number."""
        self._counted: dict[int, int] = {}
        """The number that each thread's next node had when it was last asked."""
        self._tasks: dict[int, list[tuple[int, Owner]]] = {}
        """The graph tasks that run in each thread, outermost first, and who ran last in each."""

    def begin(self) -> None:
        """Note that what this thread has made so far is nobody's."""
        self._counted[get_ident()] = _get_sequence_nr()
        self._tasks.clear()

    def claim(self, owner: Owner, task: int) -> None:
        """Give `owner` what this thread has made since it was last asked; `task` is -1 forward."""
        thread, count = get_ident(), _get_sequence_nr()
        # a thread that was never asked may have made a node for the very call that asks
        made = range(self._counted.get(thread, max(count - 1, 0)), count)
        self._counted[thread] = count
        if task < 0:
            self._of_forward.update(dict.fromkeys(made, owner))
            # no backward runs while a forward does, or it would be told that one is inside it
            self._tasks.clear()
            return
        self._of_backward.update(dict.fromkeys(((thread, number) for number in made), owner))
        tasks = self._tasks.setdefault(thread, [])
        while tasks and tasks[-1][0] >= task:
            tasks.pop()
        tasks.append((task, owner))

    def running(self, task: int) -> Owner:
        """Return the owner of the node that this thread runs in `task`; NOBODY if it has none.

        A tensor's hook runs in no node, and what was made before `begin` has no owner.
        """
        thread, node = get_ident(), torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        of_forward = self._of_forward.get(number)
        of_backward = self._of_backward.get((thread, number))
        outer = [owner for of, owner in self._tasks.get(thread, ()) if of < task]
        if outer:
            return of_backward or of_forward or outer[-1]
        # a graph of a gradient that was taken in a forward (`create_graph`) was made by a backward
        return of_forward or of_backward or NOBODY
