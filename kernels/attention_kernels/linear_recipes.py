"""Names the recipes of linear layers in low precision: what each operand of each product is in.

A linear layer multiplies three times: y = x w^T forward, and backward dx = dy w ("dgrad") and
dw = dy^T x ("wgrad"). A recipe says, for either operand of each product, its encoding, how it is
rounded, and whether it is rotated first. Blocks that share a scale lie along the axis that the
product sums over, so a tensor that enters two products is quantized twice, from its own values.
Square blocks are the same along both axes: in them forward and dgrad see the same weight.

LINEAR_RECIPES is the table of the published ones, each with its source. Products are summed in
FP32. This module computes nothing (`recipe_linear` does). It imports no torch, so that a command
line can check the names in a YAML file before it loads anything heavy.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attention_kernels.block_recipes import BLOCK_RECIPES, BlockRecipe, recipe_named
from attention_kernels.formats import ROUNDINGS, format_named

__all__ = [
    "LINEAR_RECIPES",
    "OUTPUTS",
    "LinearOperand",
    "LinearProduct",
    "LinearRecipe",
    "linear_recipe_named",
]

OUTPUTS = ("bf16", "fp16", "fp32")
"""The formats that results may have: those of dtypes of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearOperand:
    """How one operand of a product is quantized, along the axis that the product sums over."""

    encoding: str | BlockRecipe
    """A block recipe, one of yours or by its name in `block_recipes`; or, without any scale, a
    format."""
    rounding: str = "nearest_even"
    """One of `formats.ROUNDINGS`, of the elements; scales are rounded as the block recipe says."""
    rotation: int = 0
    """Size of the random-sign Hadamard matrices that multiply the operand along the summed axis
    first, a power of two; 0 is none. Both operands of a product have the same: the rotations then
    cancel in the product, and none is taken back."""
    of_forward: bool = False
    """Whether what is quantized are the values that the forward multiplied, which is a second
    quantization, and not those before. Of the x of wgrad alone."""

    @property
    def name(self) -> str:
        """The name of the encoding."""
        return self.encoding if isinstance(self.encoding, str) else self.encoding.name

    @property
    def blocks(self) -> BlockRecipe | None:
        """The block recipe of the encoding; None if it is a format. ValueError if it is neither."""
        if isinstance(self.encoding, BlockRecipe):
            return self.encoding
        try:
            format_named(self.encoding)
        except ValueError:
            return recipe_named(self.encoding)
        return None


class LinearProduct(NamedTuple):
    """The operands of one product: x and w forward, dy and w in dgrad, dy and x in wgrad."""

    left: LinearOperand
    right: LinearOperand


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRecipe:
    """What a linear layer multiplies. ValueError for fields that contradict one another."""

    name: str
    forward: LinearProduct
    dgrad: LinearProduct
    wgrad: LinearProduct
    output: str = "bf16"
    """The format of y and dx, one of OUTPUTS."""
    weight_gradient: str = "fp32"
    """The format of dw, one of OUTPUTS."""
    last_blocks: float = 0.0
    """The share of a model's blocks, from its end, that the recipe leaves in BF16."""
    source: str = ""
    """The publication that the recipe follows."""

    def __post_init__(self) -> None:
        roundings = f"rounded by one of {', '.join(ROUNDINGS)}"
        for place, operand in self.operands():
            _require(self, place, operand.rounding in ROUNDINGS, roundings)
            blocks, size = operand.blocks, operand.rotation
            turns_once = blocks is None or not blocks.rotation
            _require(self, place, turns_once, "in blocks without a rotation of their own")
            is_power = size >= 0 and size & (size - 1) == 0
            _require(self, place, is_power, "rotated by a power of two or 0")
            is_again = operand.of_forward and place != "wgrad.right"
            _require(self, place, not is_again, "of_forward in the x of wgrad alone")
        for name in ("forward", "dgrad", "wgrad"):
            left, right = getattr(self, name)
            rule = "a product of two operands with the same rotation"
            _require(self, name, left.rotation == right.rotation, rule)
        for name in ("output", "weight_gradient"):
            known = getattr(self, name) in OUTPUTS
            _require(self, name, known, f"one of {', '.join(OUTPUTS)}")
        _require(self, "last_blocks", 0 <= self.last_blocks < 1, "from 0 to below 1")

    def operands(self) -> Iterator[tuple[str, LinearOperand]]:
        """Give each operand and its place, such as `wgrad.right`."""
        for name in ("forward", "dgrad", "wgrad"):
            product = getattr(self, name)
            yield f"{name}.left", product.left
            yield f"{name}.right", product.right

    def left_out(self, depth: int) -> int:
        """Return how many of a model's `depth` blocks stay in BF16, at least the share that is."""
        return math.ceil(self.last_blocks * depth)


def _require(recipe: LinearRecipe, field: str, holds: bool, rule: str) -> None:
    if not holds:
        head, _, side = field.partition(".")
        value = getattr(recipe, head)
        raise ValueError(
            f"LinearRecipe: {field} must be {rule}, got {getattr(value, side or 'left', value)!r} "
            f"in {recipe.name!r}"
        )


def _same(encoding: str) -> dict[str, Any]:
    """Return the three products with all operands in one encoding."""
    both = LinearProduct(LinearOperand(encoding=encoding), LinearOperand(encoding=encoding))
    return {"forward": both, "dgrad": both, "wgrad": both}


def _by_rule(recipe: BlockRecipe, rule: str) -> BlockRecipe:
    return replace(recipe, name=f"{recipe.name}-{rule}", rule=rule)


def _tiled(rule: str) -> dict[str, Any]:
    """Return DeepSeek's products: x and dy in tiles of 1x128, w in squares, scales by `rule`."""
    tile, square = (
        LinearOperand(encoding=recipe if rule == recipe.rule else _by_rule(recipe, rule))
        for recipe in (BLOCK_RECIPES["deepseek_1x128"], BLOCK_RECIPES["deepseek_128x128"])
    )
    # x is stored in tiles of the forward, and read from those for wgrad (its section 3.5.2)
    stored = replace(tile, of_forward=True)
    return {
        "forward": LinearProduct(tile, square),
        "dgrad": LinearProduct(tile, square),
        "wgrad": LinearProduct(tile, stored),
    }


_ACTIVATION = LinearOperand(encoding="nvfp4")
_GRADIENT = replace(_ACTIVATION, rounding="stochastic")
_WEIGHT = LinearOperand(encoding="nvfp4_16x16")
_ROTATED = (replace(_GRADIENT, rotation=16), replace(_ACTIVATION, rotation=16))
_E4M3, _E5M2 = (LinearOperand(encoding=f"fp8_per_tensor{e}") for e in ("", "-e5m2"))

_NVFP4 = LinearRecipe(
    name="nvfp4",
    forward=LinearProduct(_ACTIVATION, _WEIGHT),
    dgrad=LinearProduct(_GRADIENT, _WEIGHT),
    wgrad=LinearProduct(*_ROTATED),
    last_blocks=0.15,
    source="arXiv 2509.25149",
)

LINEAR_RECIPES = {
    recipe.name: recipe
    for recipe in (
        _NVFP4,
        replace(
            _NVFP4,
            name="nvfp4_no_rotation",
            wgrad=LinearProduct(_GRADIENT, _ACTIVATION),
            source="Transformer Engine's disable_rht",
        ),
        replace(
            _NVFP4,
            name="nvfp4_nearest",
            dgrad=LinearProduct(_ACTIVATION, _WEIGHT),
            wgrad=LinearProduct(_ROTATED[1], _ROTATED[1]),
            source="Transformer Engine's disable_stochastic_rounding",
        ),
        replace(
            _NVFP4,
            name="nvfp4_1d_weights",
            forward=LinearProduct(_ACTIVATION, _ACTIVATION),
            dgrad=LinearProduct(_GRADIENT, _ACTIVATION),
            source="Transformer Engine's disable_2d_quantization",
        ),
        LinearRecipe(name="mxfp8", source="arXiv 2506.08027", **_same("mxfp8-rceil")),
        LinearRecipe(name="deepseek_v3", source="arXiv 2412.19437, section 3.3", **_tiled("max")),
        LinearRecipe(
            name="deepseek_v3_pow2",
            source="the same, its scales of the input after attention",
            **_tiled("rceil"),
        ),
        LinearRecipe(
            name="fp8_current",
            forward=LinearProduct(_E4M3, _E4M3),
            dgrad=LinearProduct(_E5M2, _E4M3),
            wgrad=LinearProduct(_E5M2, _E4M3),
            source="Transformer Engine's Float8CurrentScaling, HYBRID",
        ),
    )
}
"""The recipes by name."""


def linear_recipe_named(name: str) -> LinearRecipe:
    """Return the recipe called `name`, one of LINEAR_RECIPES.

    ValueError, with the nearest names, for any other name.
    """
    if name not in LINEAR_RECIPES:
        near = difflib.get_close_matches(str(name), LINEAR_RECIPES, n=3, cutoff=0.4)
        raise ValueError(
            f"recipe must be one of a linear layer, got {name!r}; nearest: "
            f"{', '.join(near or LINEAR_RECIPES)}"
        )
    return LINEAR_RECIPES[name]
