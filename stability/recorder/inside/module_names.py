"""Names modules by the weights they hold, as those are called on record.

So a module has the same name whether its model is wrapped for several ranks or checkpointed, called
whole or part by part, and in a training of several models it begins with its model's.
"""

from __future__ import annotations

from typing import Dict, List, Mapping

from torch import Tensor, nn

__all__ = ["names_of_modules"]


def names_of_modules(module: nn.Module, state: Mapping[str, Tensor]) -> Dict[int, str]:
    """Return the name of `module` and of each module in it, by its place in memory.

    That is what the names of all weights in it begin with; empty for a model as a whole, and for a
    module that holds no weight of `state`.
    """
    folders = {id(weight): name.split(".")[:-1] for name, weight in state.items()}
    found = {}
    for each in module.modules():
        held = [folders[id(x)] for x in each.parameters() if id(x) in folders]
        found[id(each)] = ".".join(_shared(held))
    return found


def _shared(paths: List[List[str]]) -> List[str]:
    """Return the parts that all of `paths` begin with."""
    if not paths:
        return []
    first, last = min(paths), max(paths)
    parts = zip(first, last)  # noqa: B905 Python 3.9 has no strict
    same = [one == other for one, other in parts]
    return first[: same.index(False) if False in same else len(same)]
