"""One update of an optimizer, repeated on copies of its parameters, gradients and state.

The copy is an optimizer of the same class with the same settings, so that a candidate can step it
as it likes, and FP64 copies make the golden. Leaves out when a step is looked at
(`intercept.optimizer_steps`).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

__all__ = ["Step", "copy_of", "own_step", "updates"]

Step = Callable[[Optimizer], Any]
"""Makes one update of an optimizer."""


def copy_of(optimizer: Optimizer, dtype: torch.dtype | None = None) -> Optimizer:
    """Return an optimizer with copies of all that a step reads and writes, and without hooks.

    With `dtype` floating-point parameters, gradients and state are in that dtype.
    """
    made: dict[int, nn.Parameter] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone().to(dtype if dtype and x.is_floating_point() else x.dtype)

    def parameter(x: Tensor) -> nn.Parameter:
        if id(x) not in made:
            made[id(x)] = nn.Parameter(copied(x), requires_grad=x.requires_grad)
            made[id(x)].grad = copied(x.grad)
        return made[id(x)]

    groups = [
        {**tree_map(copied, {k: v for k, v in group.items() if k != "params"})}
        | {"params": [parameter(x) for x in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.items():
        state[parameter(key) if isinstance(key, Tensor) else key] = tree_map(copied, value)
    copy = type(optimizer).__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    vars(copy).update(param_groups=groups, state=state)
    # a scheduler of learning rates has put one there, of the optimizer itself
    vars(copy).pop("step", None)
    return copy


def own_step(optimizer: Optimizer) -> Any:
    """Make the update as the optimizer's class does, without the hooks that torch puts around."""
    step: Any = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def updates(optimizer: Optimizer, before: Optimizer) -> dict[str, Tensor]:
    """Return what has changed in the parameters of each group, in FP64: `update_0`, ..."""
    found = {}
    for i, (now, then) in enumerate(zip(optimizer.param_groups, before.param_groups, strict=True)):
        pairs = zip(now["params"], then["params"], strict=True)
        changes = [(x.detach().double() - y.detach().double()).flatten() for x, y in pairs]
        if changes:
            found[f"update_{i}"] = torch.cat(changes)
    return found
