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

from stability.probe.kept_state import Copies

__all__ = ["Step", "copy_of", "own_step", "updates"]

Step = Callable[[Optimizer], Any]
"""Makes one update of an optimizer."""


def copy_of(optimizer: Optimizer, dtype: torch.dtype | None = None) -> Optimizer:
    """Return an optimizer with copies of all that a step reads and writes, and without hooks.

    With `dtype` floating-point parameters, gradients and state are in that dtype.
    """

    def copied(x: Tensor) -> Tensor:
        return x.detach().clone().to(dtype if dtype and x.is_floating_point() else x.dtype)

    def of_tensor(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and id(x) not in stepped:
            return copied(x)
        made = nn.Parameter(copied(x), requires_grad=x.requires_grad)
        made.grad = None if x.grad is None else copied(x.grad)
        return made

    optimizers = _optimizers_in(optimizer)
    stepped = {id(x) for one in optimizers for group in one.param_groups for x in group["params"]}
    copies = Copies(of_tensor)
    # first: one may hold another, as SAM and Lookahead do, or lists of its parameters
    copies.made.update({id(one): type(one).__new__(type(one)) for one in optimizers})
    for one in optimizers:
        held = {name: x for name, x in vars(one).items() if name not in ("state", "step")}
        hooks = {name: OrderedDict() for name in held if name.endswith("_hooks")}
        copy = copies.made[id(one)]
        # `step` is there where a scheduler of learning rates has put it, of the optimizer itself
        vars(copy).update({name: copies.of(x) for name, x in held.items()} | hooks)
        state = {copies.of(key): copies.of(value) for key, value in one.state.items()}
        vars(copy).update(state=defaultdict(dict, state))
    return copies.made[id(optimizer)]


def _optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return `optimizer` and those that it keeps, at any depth."""
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            held = value if isinstance(value, list | tuple) else [value]
            new = [x for x in held if isinstance(x, Optimizer)]
            found += [x for x in new if not any(x is known for known in found)]
    return found


def own_step(optimizer: Optimizer) -> Any:
    """Make the update as the optimizer's class does, without the hooks that torch puts around."""
    step: Any = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def updates(optimizer: Optimizer, before: Optimizer) -> dict[str, Tensor]:
    """Return what has changed in the parameters of each group, in FP64: `update_0`, ...

    Of sharded parameters it is the change of this rank's shards.
    """
    found = {}
    for i, (now, then) in enumerate(zip(optimizer.param_groups, before.param_groups, strict=True)):
        pairs = zip(now["params"], then["params"], strict=True)
        changes = [(_here(x).double() - _here(y).double()).flatten() for x, y in pairs]
        if changes:
            found[f"update_{i}"] = torch.cat(changes)
    return found


def _here(x: Tensor) -> Tensor:
    """Return the values of a parameter that this rank holds."""
    local: Callable[[], Tensor] | None = getattr(x.detach(), "to_local", None)
    return x.detach() if local is None else local()
