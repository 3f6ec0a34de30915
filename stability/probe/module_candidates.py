"""What repeats a module or a function beside itself: the candidates of `shadow(modules=...)`.

`emulated:<format>` is the module itself with the operands of its matrix products rounded,
`recipe:<name>` with its linear layers computed by a recipe of low precision, `compiled` what
torch.compile makes of it, and any other is a function of one's own. That is called as
`function(module, *inputs)`, with the inputs of the module's forward, positional and by keyword as
they were given, and returns what the module returns; in place of a function that is no module it is
called as that is. The module is a copy, with parameters of its own: read them as `module.weight`.
Leaves out the repeating itself (`module_call`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from attention_kernels import Format
from attention_kernels.linear_recipes import LinearRecipe
from stability.config.convert import nearest
from stability.config.precision import RECIPE, emulated_format, linear_recipe
from stability.config.user_functions import import_function, source_hash
from stability.probe.module_call import ModuleCall, forward_of
from stability.probe.rounded_products import RecipeProducts, RoundedProducts

__all__ = ["ModuleCandidate", "resolve_candidate"]

_NO_LIMIT = 1_000_000
_NAMES = ("emulated:<format>", "recipe:<name>", "compiled", "MODULE:FUNCTION")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCandidate:
    """A candidate, its name, and its description for a record."""

    name: str
    description: dict[str, Any]
    function: Callable[..., Any] | None = None
    """None where it is the module itself that is repeated."""
    format: Format | None = None
    recipe: LinearRecipe | None = None
    is_compiled: bool = False
    left_alone: dict[str, None] = field(default_factory=dict)
    """Fused operators whose operands an emulation could not round."""

    def of(self, call: ModuleCall) -> Callable[..., Any]:
        """Return what is to be called in place of `call.own`."""
        if not self.is_compiled:
            return self.function or call.own
        return _compiled_forward if call.own is forward_of else torch.compile(call.own)

    def within(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context in which it runs, forward and backward."""
        if self.is_compiled:
            # beyond 8 variants of one function, e.g. of layers whose attributes differ, torch would
            # run it eagerly and only warn: the module itself would be found right in its place
            return lambda: torch._dynamo.config.patch(
                recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT
            )
        if self.recipe is not None:
            return partial(RecipeProducts, self.recipe, self.left_alone)
        if self.format is None:
            return nullcontext
        return partial(RoundedProducts, self.format, self.left_alone)


def _compiled_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # of the method and not of a function around it: what is compiled is kept by its code, so that
    # each class has its own, and all modules of one share it
    return torch.compile(module.forward)(*args, **kwargs)


def resolve_candidate(candidate: str | Callable[..., Any], glob: str) -> ModuleCandidate:
    """Return the candidate that a text or a function stands for; ValueError names `glob`."""
    what = f"shadow: modules[{glob!r}]"
    if callable(candidate):
        return _users(getattr(candidate, "__name__", type(candidate).__name__), candidate)
    if not isinstance(candidate, str):
        raise ValueError(f"{what} must be text or a function, got {type(candidate).__name__}")
    if candidate == "compiled":
        described = {"implementation": f"torch {torch.__version__} compiled"}
        return ModuleCandidate(name=candidate, description=described, is_compiled=True)
    try:
        format, recipe = emulated_format(candidate), linear_recipe(candidate)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if recipe is not None and recipe.is_delayed:
        raise ValueError(
            f"{what} must have scales of the values at hand, got {candidate!r}: delayed ones "
            "follow from earlier updates, which a call beside the module has not seen; use "
            f"{RECIPE}fp8_current"
        )
    if format is not None or recipe is not None:
        described = {"implementation": candidate}
        return ModuleCandidate(name=candidate, description=described, format=format, recipe=recipe)
    if ":" not in candidate:
        raise ValueError(
            f"{what} must be one of {', '.join(_NAMES)}, got {candidate!r}; nearest: "
            f"{nearest(candidate, _NAMES)}"
        )
    return _users(candidate, import_function(candidate, what))


def _users(name: str, function: Callable[..., Any]) -> ModuleCandidate:
    described = {
        "implementation": name,
        "engine": getattr(function, "__module__", ""),
        "source": source_hash(function),
    }
    return ModuleCandidate(name=name, description=described, function=function)
