"""Single modules of a model that compute in a precision of their own.

A module named by a glob gets a forward of its own, around which the default's autocast or emulation
is replaced by the module's:

- `fp32`: no autocast and no rounding. What arrives as BF16 or FP16 is widened first, exactly;
- `bf16`, `fp16`: autocast to that format, as PyTorch's mixed precision does;
- `emulated:<format>`: what arrives is widened, and each `F.linear` inside rounds to the format
  (`precision.EmulatedLinear`), forward and backward. Another product in there would go unrounded,
  so it is refused;
- `recipe:<name or parts>`: each `F.linear` inside is computed by the recipe
  (`precision.RecipeLinear`), and all else as the default does. Other products are refused as well.

All that a module calls inside computes so too, but for modules that have another precision, and
attention: that keeps the rounding points of its own and is given q, k and v in the default's
dtype, whatever the modules around it compute in. Autocast's cache of cast weights is left alone: it
tells weights apart but not formats, and would give a shared weight in that of another module.

Recipes that round stochastically draw by a key of the training and the place of the module among
all of the model. It is asked for in each forward, and counts no calls: a forward that is made again
draws the same bits. So does one that an update makes twice, of a module that two layers share.
Delayed scales of a recipe are kept by the module's name, outside of the model.

Leaves out how the text of a config names modules (`config.precision`) and what is executed in the
end (`probe.executed`).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import AttentionFn
from attention_kernels.delayed_scaling import OperandScales
from stability.config.convert import nearest
from stability.config.precision import (
    EMULATED,
    RECIPE,
    Precision,
    emulated_format,
    linear_recipe,
)
from stability.model.precision import EmulatedLinear, RecipeLinear, autocast_dtype

__all__ = [
    "KeyOfModule",
    "ScalesOfModule",
    "attention_in_default",
    "check_globs",
    "in_module_precision",
    "with_module_precision",
]


KeyOfModule = Callable[[int], Sequence[int]]
"""Returns the key that the stochastic rounding of a module draws by, given its number."""

ScalesOfModule = Callable[[str], OperandScales | None]
"""Returns the delayed scales of a module's operands, given its name; None for the values' own."""


def _no_key(number: int) -> Sequence[int]:
    return ()


def _no_scales(name: str) -> None:
    return None


def with_module_precision(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    key_of: KeyOfModule = _no_key,
    scales_of: ScalesOfModule = _no_scales,
) -> None:
    """Let each module of `model` that a glob names compute as `precision` says, from now on.

    `device` is the one that trains. Without globs nothing is touched. Recipes that round
    stochastically draw by `key_of`, and without it the same bits at each call; those with delayed
    scales have the ones of `scales_of`. ValueError as `check_globs`.
    """
    check_globs(model, precision)
    for number, (name, module) in enumerate(model.named_modules()):
        # also where what is around it computes so: a neighbour or an attention may give it BF16
        value = precision.of_module(name)
        if value:
            within = partial(_context, value, precision, device, name)
            if value.startswith(RECIPE):
                key, scales = partial(key_of, number), scales_of(name)
                within = partial(_recipe_context, value, precision, device, name, key, scales)
            module.forward = _within(module.forward, value, within)


@contextmanager
def in_module_precision(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    key_of: KeyOfModule = _no_key,
    scales_of: ScalesOfModule = _no_scales,
) -> Generator[None, None, None]:
    """Inside, the modules of `model` compute as after `with_module_precision`."""
    own = {module: vars(module).get("forward") for module in model.modules()}
    with_module_precision(model, precision, device, key_of, scales_of)
    try:
        yield
    finally:
        for module, forward in own.items():
            if forward is not None:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


def check_globs(model: nn.Module, precision: Precision) -> None:
    """ValueError for a glob that names no module, or one that emulates where nothing multiplies.

    A recipe emulates too.
    """
    modules = dict(model.named_modules())
    for glob, value in precision.modules:
        alone = Precision(precision.default, ((glob, value),))
        named = [name for name in modules if alone.of_module(name)]
        if not named:
            raise ValueError(
                f"precision: {glob} must name a module of the model, got none; nearest: "
                f"{nearest(glob, [name for name in modules if name])}"
            )
        if value.startswith((EMULATED, RECIPE)) and not any(
            _multiplies(modules[name]) for name in named
        ):
            raise ValueError(
                f"precision: {glob} must name a module that multiplies where it is {value}, got "
                f"{', '.join(named[:3])}; nothing there would be rounded"
            )


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has a matrix of its own that is no table to look things up in."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def attention_in_default(
    function: AttentionFn, precision: Precision, device: torch.device
) -> AttentionFn:
    """Return `function` called in the default's context, on q, k and v in the default's dtype."""
    if not precision.modules:
        return function
    dtype = autocast_dtype(precision.default)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with _context(precision.default, precision, device):
            return function(q.to(dtype), k.to(dtype), v.to(dtype), **options)

    return attend


def _within(
    forward: Callable[..., Any], value: str, within: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Return the `forward` of a module that computes in `value`, made in the context `within`."""
    widens = value == "fp32" or value.startswith(EMULATED)

    def own(*args: Any, **kwargs: Any) -> Any:
        if widens:
            args, kwargs = tuple(_wide(each) for each in args), _wide(kwargs)
        with within():
            return forward(*args, **kwargs)

    return own


def _wide(value: Any) -> Any:
    """Return BF16 and FP16 tensors, also in lists and mappings, as FP32, and all else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if type(value) in (list, tuple):
        return type(value)(_wide(each) for each in value)
    if type(value) is dict:
        return {key: _wide(each) for key, each in value.items()}
    return value


@contextmanager
def _context(
    value: str, precision: Precision, device: torch.device, module: str = ""
) -> Generator[None, None, None]:
    """Replace whatever autocast and emulation are on by those of the precision `value`."""
    dtype = autocast_dtype(value)
    with ExitStack() as stack:
        if dtype == torch.float32:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        else:
            stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=False))
        if precision.emulates:
            stack.enter_context(EmulatedLinear(emulated_format(value), module))
        yield


@contextmanager
def _recipe_context(
    value: str,
    precision: Precision,
    device: torch.device,
    module: str,
    key: Callable[[], Sequence[int]],
    scales: OperandScales | None,
) -> Generator[None, None, None]:
    """Compute linear layers by the recipe `value`, and all else in the default's precision."""
    recipe = linear_recipe(value)
    assert recipe is not None
    linear = RecipeLinear(recipe, module, key(), scales)
    with _context(precision.default, precision, device), linear:
        yield
