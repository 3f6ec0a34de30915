"""Names the ways to quantize a tensor in blocks: what shares a scale, its format and its rule.

A recipe is data: the format of the elements, the block that shares a scale, the format of the
scales, and the rule that derives a scale from the largest magnitude of its block (amax).
BLOCK_RECIPES is the table of the published ones, each with its source; any other is a `BlockRecipe`
of your own.

Rules. `max` divides amax by the largest value of the elements. The others make a power of two:
`floor` is that of the MX specification (v1.0, section 6.3), 2**(floor(log2 amax) - e), e being the
exponent of the largest element, and lets values up to twice the largest saturate; `ceil` rounds
log2 amax up; `rceil` rounds up the power of two of amax / the largest value, as NVIDIA's conversion
instruction does; `even` rounds amax to the mantissa of the elements first. The four are called so
in torchao.

This module quantizes nothing (`block_scaling` does). It imports no torch, so that a command line
can check the names in a YAML file before it loads anything heavy.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from attention_kernels.formats import Format, format_named

__all__ = [
    "BLOCK_RECIPES",
    "OPERAND_RECIPES",
    "POWER_OF_TWO_RULES",
    "SCALES",
    "BlockRecipe",
    "check_no_recipe",
    "recipe_named",
]

SCALES = ("e8m0", "e4m3", "fp32")
"""The formats of scales. `e8m0` holds 2**-127 to 2**127 and NaN."""

POWER_OF_TWO_RULES = ("floor", "ceil", "rceil", "even")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRecipe:
    """How a tensor is quantized in blocks. ValueError for fields that contradict one another."""

    name: str
    elements: str
    """The format of the elements."""
    block: tuple[int, int] | str
    """(rows, columns) that share a scale: columns run along the axis that is quantized, rows along
    the one before it. Or `row`, the whole axis, or `tensor`, everything."""
    scales: str = "fp32"
    """The format of the scales, one of SCALES."""
    rule: str = "max"
    """How a scale follows from amax: `max` or one of POWER_OF_TWO_RULES."""
    largest_scale: float = 0.0
    """Above 0, scales are divided by an FP32 scale of the whole tensor, which brings the largest of
    them to this value. 0 is no such scale."""
    least_scale: float = 0.0
    """Scales, relative to that of the tensor, are not below this."""
    four_over_six: bool = False
    """Each block takes the better of two scales, by the sum of squared errors: its amax at the
    largest element, or at 2/3 of it (6 and 4 in e2m1)."""
    rotation: int = 0
    """Size of the random-sign Hadamard matrices that multiply the values along the axis first, a
    power of two; 0 is none."""
    source: str = ""
    """The publication that the recipe follows."""

    def __post_init__(self) -> None:
        format_named(self.elements)
        _require(self, "scales", self.scales in SCALES, f"one of {', '.join(SCALES)}")
        rules = ("max", *POWER_OF_TWO_RULES)
        _require(self, "rule", self.rule in rules, f"one of {', '.join(rules)}")
        is_block = isinstance(self.block, tuple) and len(self.block) == 2 and min(self.block) > 0
        named = self.block in ("row", "tensor")
        _require(self, "block", is_block or named, "(rows, columns), 'row' or 'tensor'")
        powers = self.rule in POWER_OF_TWO_RULES
        _require(self, "rule", powers or self.scales != "e8m0", "a power of two with e8m0 scales")
        _require(self, "rule", not powers or self.scales != "e4m3", "'max' with e4m3 scales")
        two_levels = self.largest_scale > 0
        _require(
            self,
            "rule",
            not (powers and (two_levels or self.four_over_six)),
            "'max' with the scale of a tensor or with four_over_six",
        )
        size = self.rotation
        _require(self, "rotation", size >= 0 and size & (size - 1) == 0, "a power of two or 0")

    @property
    def format(self) -> Format:
        """The format of the elements."""
        return format_named(self.elements)


def _require(recipe: BlockRecipe, field: str, holds: bool, rule: str) -> None:
    if not holds:
        value = getattr(recipe, field)
        raise ValueError(f"BlockRecipe: {field} must be {rule}, got {value!r} in {recipe.name!r}")


_MX: dict[str, Any] = {"block": (1, 32), "scales": "e8m0", "rule": "floor", "source": "OCP MX v1.0"}
_NVFP4: dict[str, Any] = {"elements": "e2m1", "scales": "e4m3", "largest_scale": 448.0}
_DEEPSEEK: dict[str, Any] = {"elements": "e4m3", "source": "arXiv 2412.19437, section 3.3"}
_NVFP4_SOURCE = "arXiv 2509.25149"
_ROW, _TENSOR = "torchao's PerRow", "torchao's PerTensor"

BLOCK_RECIPES = {
    recipe.name: recipe
    for recipe in (
        BlockRecipe(name="mxfp8", elements="e4m3", **_MX),
        BlockRecipe(name="mxfp8-e5m2", elements="e5m2", **_MX),
        BlockRecipe(name="mxfp6-e2m3", elements="e2m3", **_MX),
        BlockRecipe(name="mxfp6-e3m2", elements="e3m2", **_MX),
        BlockRecipe(name="mxfp4", elements="e2m1", **_MX),
        BlockRecipe(name="mxint8", elements="int8", **_MX),
        BlockRecipe(name="nvfp4", block=(1, 16), source=_NVFP4_SOURCE, **_NVFP4),
        BlockRecipe(name="nvfp4_16x16", block=(16, 16), source=_NVFP4_SOURCE, **_NVFP4),
        # 256 and not 448: a scale half as large again must still be in e4m3
        BlockRecipe(
            name="nvfp4_4over6",
            block=(1, 16),
            four_over_six=True,
            source="arXiv 2512.02010",
            **dict(_NVFP4, largest_scale=256.0),
        ),
        BlockRecipe(name="deepseek_1x128", block=(1, 128), **_DEEPSEEK),
        BlockRecipe(name="deepseek_128x128", block=(128, 128), **_DEEPSEEK),
        BlockRecipe(name="fp8_per_row", elements="e4m3", block="row", source=_ROW),
        BlockRecipe(name="fp8_per_row-e5m2", elements="e5m2", block="row", source=_ROW),
        BlockRecipe(name="fp8_per_tensor", elements="e4m3", block="tensor", source=_TENSOR),
        BlockRecipe(name="fp8_per_tensor-e5m2", elements="e5m2", block="tensor", source=_TENSOR),
    )
}
"""The recipes by name."""

_ALL_RECIPES = BLOCK_RECIPES | {
    f"{name}-{rule}": replace(recipe, name=f"{name}-{rule}", rule=rule)
    for name, recipe in BLOCK_RECIPES.items()
    for rule in POWER_OF_TWO_RULES
    if recipe.scales != "e4m3" and rule != recipe.rule
}

# An element times its scale must be exact in BF16, the dtype of operands: FP32 scales are not.
OPERAND_RECIPES = {name: recipe for name, recipe in _ALL_RECIPES.items() if recipe.scales != "fp32"}
"""The recipes that operands of attention can be in, by name."""


def recipe_named(name: str) -> BlockRecipe:
    """Return the recipe called `name`: one of BLOCK_RECIPES.

    One of MX, or with FP32 scales, may end in the name of another rule for powers of two, as in
    `mxfp4-even` or `deepseek_1x128-rceil`. ValueError, with the nearest names, for any other name.
    """
    if name not in _ALL_RECIPES:
        near = difflib.get_close_matches(str(name), _ALL_RECIPES, n=3, cutoff=0.4)
        raise ValueError(
            f"recipe_named: name must be a block recipe, got {name!r}; nearest: "
            f"{', '.join(near or BLOCK_RECIPES)}"
        )
    return _ALL_RECIPES[name]


def check_no_recipe(where: str, name: str, *, operands: bool) -> None:
    """Raise ValueError if `name` is that of a recipe; `operands` says that some may be there.

    `where` begins the message.
    """
    if name not in _ALL_RECIPES or (operands and name in OPERAND_RECIPES):
        return
    if not operands:
        raise ValueError(
            f"{where} must be a format, got {name!r}; the operands of FlashNumerics alone take a "
            "block recipe"
        )
    raise ValueError(
        f"{where} must be a format or a block recipe with e8m0 or e4m3 scales, got {name!r}, whose "
        "FP32 scales do not fit into operands of 16 bits; use the format of its elements with "
        "scaling='per_block' or 'per_tensor'"
    )
