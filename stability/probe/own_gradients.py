"""The gradients of one call: what it alone gives to its inputs, without a trace in the training.

A hook on an input sees the sum over all uses of that tensor. A view that is given in its place has
a gradient of its own, but autograd then adds up the uses in another order, and the training gets
other bits. So nothing is put in the place of anything: the nodes of the graph between the call's
inputs and its out are asked what they hand on to each input.

Leaves out what is done with a gradient (`attention_probe`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["beginning", "watch_gradients"]

_Place = tuple[Node, int, list[str]]
"""An edge that leads to an input: its node, which of the node's it is, and the input's names."""


def beginning() -> int:
    """Return a mark: what this thread adds to the graph from now on comes after it."""
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._get_sequence_nr()


def watch_gradients(
    out: Tensor, inputs: Mapping[str, Tensor], since: int, take: Callable[[str, Tensor], None]
) -> frozenset[str]:
    """Call `take` with the name and the gradient of each of `inputs`, once it is complete.

    `inputs` are in the order of a call, q, k and v first; those that require no grad are left out.
    `since` is the mark of before the call. Returns the names of those that can't be told apart,
    being one tensor, of which autograd keeps only the sum; `take` is not called for them.
    """
    names_at: dict[tuple[Node, int], list[str]] = {}
    for name, x in inputs.items():
        if x.requires_grad:
            edge = get_gradient_edge(x)
            names_at.setdefault((edge.node, edge.output_nr), []).append(name)
    names_of: dict[tuple[Node, int], set[str]] = {}
    for node, index, names in _places(out, names_at, since, list(inputs)):
        names_of.setdefault((node, index), set()).update(names)
    untold = frozenset(name for names in names_of.values() if len(names) > 1 for name in names)
    told = [(*place, name) for place, (name, *_) in names_of.items() if name not in untold]
    dtypes = {name: x.dtype for name, x in inputs.items()}
    sums = _Sums(Counter(name for _, _, name in told), dtypes, take)
    for node, index, name in told:
        node.register_hook(partial(sums.add, name, index))
    return untold


class _Sums:
    """Adds up what the nodes of a call hand on to its inputs."""

    def __init__(
        self,
        awaited: Counter[str],
        dtypes: Mapping[str, torch.dtype],
        take: Callable[[str, Tensor], None],
    ) -> None:
        self._awaited, self._dtypes, self._take = awaited, dtypes, take
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, index: int, gradients: Any, _: Any) -> None:
        """Take what a node hands on by its edge `index`, as a hook of the node."""
        part = gradients[index]
        if part is not None:
            part = part.detach().to(self._dtypes[name])
            self._sums[name] = self._sums[name] + part if name in self._sums else part
        self._awaited[name] -= 1
        if not self._awaited[name] and name in self._sums:
            self._take(name, self._sums.pop(name))


def _places(
    out: Tensor, names_at: Mapping[tuple[Node, int], list[str]], since: int, order: list[str]
) -> Iterator[_Place]:
    """Yield the edges of the call's graph that lead to its inputs; `order` has the names of all.

    What a node of SDPA takes, as it is or turned and converted, is query, key or value, whatever
    tensors these are made of.
    """
    ends = {node for node, _ in names_at}
    waiting: list[tuple[Node, str]] = [(get_gradient_edge(out).node, "")]
    seen = set(waiting)
    while waiting:
        node, role = waiting.pop()
        if node in ends:  # out is what some input is made with: nothing was computed
            continue
        is_sdpa = node.name().startswith("ScaledDotProduct")
        role = role if len(node.next_functions) == 1 else ""
        for index, (after, output) in enumerate(node.next_functions):
            if after is None:
                continue
            role = order[index] if is_sdpa and index < len(order) else role
            names = names_at.get((after, output)) or _converted(after, names_at)
            if names:
                yield node, index, [role] if role in names else names
            elif (after, role) not in seen and after not in ends and after._sequence_nr() >= since:
                seen.add((after, role))
                waiting.append((after, role))


def _converted(node: Node, names_at: Mapping[tuple[Node, int], list[str]]) -> list[str]:
    """Return the names of a parameter that autocast converts once for all calls, at this node."""
    if not node.name().startswith("ToCopyBackward"):
        return []
    ((parameter, output),) = node.next_functions
    if parameter is None or parameter.next_functions:
        return []
    return names_at.get((parameter, output), [])
