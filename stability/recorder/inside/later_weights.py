"""Which weights train and were not there, or did not train, before the first update.

They are in no snapshot: a layer that is thawed later, or put in another's place. Asked where a
state is kept, and at the end; what trains only between two such moments is found if its gradient or
its optimizer's state is still there.
"""

from __future__ import annotations

from typing import Dict, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from .names import frozen_beside, named_state

__all__ = ["later_names"]


def later_names(optimizers: Iterable[Optimizer], state: Mapping[str, Tensor]) -> Dict[int, str]:
    """Return the names, by identity, of what `optimizers` update and `state` does not have.

    `optimizers` are those that have stepped, `state` was taken at the start.
    """
    known = {id(x) for x in state.values()}
    owned = [(x, each) for each in optimizers for x in _weights_of(each)]
    later = {id(x): x for x, each in owned if id(x) not in known and _trains(x, each)}
    if not later:
        return {}
    now, _ = named_state(x for x, _ in owned)
    names = {id(x): name for name, x in {**frozen_beside(now), **now}.items()}
    return {key: _name_of(names.get(key, ""), x) for key, x in later.items()}


def _name_of(name: str, weight: Tensor) -> str:
    is_owned = name and not name.startswith("unowned_")
    return name if is_owned else f"one of shape {tuple(weight.shape)}"  # its module may be gone


def _weights_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (x for group in optimizer.param_groups for x in group["params"])


def _trains(weight: Tensor, optimizer: Optimizer) -> bool:
    return weight.requires_grad or weight.grad is not None or weight in optimizer.state
