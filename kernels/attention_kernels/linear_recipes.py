"""Names the recipes of linear layers in low precision: what each operand of each product is in.

A linear layer multiplies three times: y = x w^T forward, and backward dx = dy w ("dgrad") and
dw = dy^T x ("wgrad"). A recipe says, for either operand of each product, its encoding, how it is
rounded, and whether it is rotated first. Blocks that share a scale lie along the axis that the
product sums over, so a tensor that enters two products is quantized twice, from its own values.
Square blocks are the same along both axes: in them forward and dgrad see the same weight.

LINEAR_RECIPES is the table of the published ones, each with its source. Any other is written in its
parts, as `forward=mxfp4 dgrad=mxfp8+stochastic/mxfp8 wgrad=mxfp8+stochastic/mxfp8`
(`linear_recipe_named`). An operand in `delayed-e4m3`, or in any format that FP32 holds after
`delayed-`, has one scale for the tensor, which follows from earlier updates (`delayed_scaling`).
Products are summed in FP32. This module computes nothing (`recipe_linear` does). It imports no
torch, so that a command line can check the names in a YAML file before it loads anything heavy.
"""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from attention_kernels.block_recipes import BLOCK_RECIPES, BlockRecipe, recipe_named
from attention_kernels.formats import FORMATS, ROUNDINGS, Format, format_named

__all__ = [
    "LINEAR_RECIPES",
    "OUTPUTS",
    "PARTS",
    "LinearOperand",
    "LinearProduct",
    "LinearRecipe",
    "linear_recipe_named",
]

OUTPUTS = ("bf16", "fp16", "fp32")
"""The formats that results may have: those of dtypes of torch."""

_PRODUCTS = ("forward", "dgrad", "wgrad")
_OPTIONS = ("output", "weight_gradient", "last_blocks")
_ALL = "all"
PARTS = (_ALL, *_PRODUCTS, *_OPTIONS)
"""What a recipe that is written out is made of."""

_BETWEEN = "/"
# the matrix of 4096 is 64 MiB; a larger one would be found out at the first step
_LARGEST_ROTATION = 4096
_ROTATED = re.compile(r"rotated([0-9]{1,4})")
_DELAYED = "delayed-"
_HISTORY = re.compile(r"history([0-9]{1,6})")
_USUAL_HISTORY = 1024  # Transformer Engine's amax_history_len
_LONGEST_HISTORY = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearOperand:
    """How one operand of a product is quantized, along the axis that the product sums over."""

    encoding: str | BlockRecipe
    """A block recipe, one of yours or by its name in `block_recipes`; or, without any scale, a
    format; or `delayed-<format>`, with a scale from earlier updates."""
    rounding: str = "nearest_even"
    """One of `formats.ROUNDINGS`, of the elements; scales are rounded as the block recipe says."""
    rotation: int = 0
    """Size of the random-sign Hadamard matrices that multiply the operand along the summed axis
    first, a power of two; 0 is none. Both operands of a product have the same: the rotations then
    cancel in the product, and none is taken back."""
    of_forward: bool = False
    """Whether what is quantized are the values that the forward multiplied, which is a second
    quantization, and not those before. Of the x of wgrad alone."""
    history: int = _USUAL_HISTORY
    """How many updates a delayed scale follows from; it has the largest amax of them."""

    @property
    def name(self) -> str:
        """The name of the encoding."""
        return self.encoding if isinstance(self.encoding, str) else self.encoding.name

    @property
    def blocks(self) -> BlockRecipe | None:
        """The block recipe of the encoding; None if it is a format. ValueError if it is neither."""
        if isinstance(self.encoding, BlockRecipe):
            return self.encoding
        if self.delayed is not None:
            return None
        try:
            format_named(self.encoding)
        except ValueError:
            return recipe_named(self.encoding)
        return None

    @property
    def delayed(self) -> Format | None:
        """The format of an encoding whose scale follows from earlier updates, None of any other."""
        if not self.name.startswith(_DELAYED):
            return None
        return format_named(self.name.removeprefix(_DELAYED))


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
            has_history = operand.history == _USUAL_HISTORY or operand.delayed is not None
            _require(self, place, has_history, f"in {_DELAYED}<format> where it has a history")
            longest = f"of a history of 1 to {_LONGEST_HISTORY} updates"
            _require(self, place, operand.history in range(1, _LONGEST_HISTORY + 1), longest)
            is_again = operand.of_forward and place != "wgrad.right"
            _require(self, place, not is_again, "of_forward in the x of wgrad alone")
        for name in _PRODUCTS:
            left, right = getattr(self, name)
            rule = "a product of two operands with the same rotation"
            _require(self, name, left.rotation == right.rotation, rule)
        for name in ("output", "weight_gradient"):
            known = getattr(self, name) in OUTPUTS
            _require(self, name, known, f"one of {', '.join(OUTPUTS)}")
        _require(self, "last_blocks", 0 <= self.last_blocks < 1, "from 0 to below 1")

    def operands(self) -> Iterator[tuple[str, LinearOperand]]:
        """Give each operand and its place, such as `wgrad.right`."""
        for name in _PRODUCTS:
            product = getattr(self, name)
            yield f"{name}.left", product.left
            yield f"{name}.right", product.right

    def left_out(self, depth: int) -> int:
        """Return how many of a model's `depth` blocks stay in BF16, at least the share that is."""
        return math.ceil(self.last_blocks * depth)

    @property
    def is_delayed(self) -> bool:
        """Whether a scale follows from earlier updates, so that the recipe has a state."""
        return any(operand.delayed is not None for _, operand in self.operands())

    def unscaled_gradients(self) -> Iterator[Format]:
        """Give the format of each gradient that no scale brings into the format's range.

        Those of operands without blocks, and of the results that the backward hands on.
        """
        for operand in (self.dgrad.left, self.wgrad.left):
            if operand.blocks is None and operand.delayed is None:
                yield format_named(operand.name)
        yield format_named(self.output)
        yield format_named(self.weight_gradient)


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


def _tiled(rule: str = "") -> dict[str, Any]:
    """Return DeepSeek's products: x and dy in tiles of 1x128, w in squares, scales by `rule`."""
    tile, square = (
        LinearOperand(encoding=f"{name}{rule}") for name in ("deepseek_1x128", "deepseek_128x128")
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
_TURNED = (replace(_GRADIENT, rotation=16), replace(_ACTIVATION, rotation=16))
_E4M3, _E5M2 = (LinearOperand(encoding=f"fp8_per_tensor{e}") for e in ("", "-e5m2"))
_LATE_E4M3, _LATE_E5M2 = (LinearOperand(encoding=f"{_DELAYED}{e}") for e in ("e4m3", "e5m2"))

_NVFP4 = LinearRecipe(
    name="nvfp4",
    forward=LinearProduct(_ACTIVATION, _WEIGHT),
    dgrad=LinearProduct(_GRADIENT, _WEIGHT),
    wgrad=LinearProduct(*_TURNED),
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
            wgrad=LinearProduct(_TURNED[1], _TURNED[1]),
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
        LinearRecipe(name="deepseek_v3", source="arXiv 2412.19437, section 3.3", **_tiled()),
        LinearRecipe(
            name="deepseek_v3_pow2",
            source="the same, its scales of the input after attention",
            **_tiled("-rceil"),
        ),
        LinearRecipe(
            name="fp8_current",
            forward=LinearProduct(_E4M3, _E4M3),
            dgrad=LinearProduct(_E5M2, _E4M3),
            wgrad=LinearProduct(_E5M2, _E4M3),
            source="Transformer Engine's Float8CurrentScaling, HYBRID",
        ),
        LinearRecipe(
            name="fp8_delayed",
            forward=LinearProduct(_LATE_E4M3, _LATE_E4M3),
            dgrad=LinearProduct(_LATE_E5M2, _LATE_E4M3),
            wgrad=LinearProduct(_LATE_E5M2, _LATE_E4M3),
            source="Transformer Engine's DelayedScaling, HYBRID",
        ),
    )
}
"""The recipes by name."""


def linear_recipe_named(name: str) -> LinearRecipe:
    """Return the recipe called `name`: one of LINEAR_RECIPES, or one that is written in its parts.

    Parts stand apart by spaces, in any order. `forward=`, `dgrad=` and `wgrad=` give the operands
    of a product: one for both, or `LEFT/RIGHT` (x/w, dy/w and dy/x); `all=` those of the products
    that have no part. An operand is a block recipe, a format that FP32 holds or `delayed-<format>`,
    then, each after a `+`, a rounding (`stochastic`), `rotated16`, `of_forward` and, if delayed,
    `history16`. `output=`, `weight_gradient=` and `last_blocks=` are the fields of a recipe. Its
    name is that text in one order and spelling. ValueError, with the nearest names, for anything
    else.
    """
    text = str(name)
    if "=" in text:
        return _written_out(text)
    if text not in LINEAR_RECIPES:
        is_operand = text in BLOCK_RECIPES or text in FORMATS or text.startswith(_DELAYED)
        hint = f"; in every product: {_ALL}={text}" if is_operand else ""
        raise ValueError(
            f"recipe must be one of a linear layer, got {name!r}; nearest: "
            f"{_nearest(text, LINEAR_RECIPES)}{hint}"
        )
    return LINEAR_RECIPES[text]


@functools.lru_cache(maxsize=256)  # a module asks for its recipe in each forward
def _written_out(text: str) -> LinearRecipe:
    """Return the recipe whose parts `text` gives."""
    parts = _parts(text)
    operands = {name: parts.get(name, parts.get(_ALL)) for name in _PRODUCTS}
    missing = [name for name, value in operands.items() if value is None]
    if missing:
        raise ValueError(
            f"recipe: must give the operands of {', '.join(_PRODUCTS)}, or of {_ALL}, each part "
            f"after a space, got none of {', '.join(missing)} in {text!r}"
        )
    products = {
        name: _product(name if name in parts else _ALL, str(value))
        for name, value in operands.items()
    }
    options: dict[str, Any] = {name: parts[name] for name in _OPTIONS if name in parts}
    if "last_blocks" in options:
        options["last_blocks"] = _share(options["last_blocks"])
    recipe = LinearRecipe(name=text, **products, **options)
    return replace(recipe, name=_text(recipe))


def _parts(text: str) -> dict[str, str]:
    """Return the value of each part; ValueError for one that is no part, or is given twice."""
    found: dict[str, str] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or name not in PARTS:
            raise ValueError(
                f"recipe: must be in parts called {', '.join(PARTS)}, each as NAME=VALUE after a "
                f"space, got {part!r}; nearest: {_nearest(name, PARTS)}"
            )
        if name in found:
            raise ValueError(f"recipe: must give {name} once, got it twice in {text!r}")
        found[name] = value
    if _BETWEEN in found.get(_ALL, ""):
        raise ValueError(
            f"recipe: {_ALL} must be one operand, got {found[_ALL]!r}; a pair is of one product"
        )
    return found


def _product(name: str, text: str) -> LinearProduct:
    sides = text.split(_BETWEEN)
    if len(sides) > 2:
        raise ValueError(f"recipe: {name} must be one operand or LEFT/RIGHT, got {text!r}")
    return LinearProduct(_operand(name, sides[0]), _operand(name, sides[-1]))


def _operand(product: str, text: str) -> LinearOperand:
    """Return the operand that `text` describes, as `nvfp4+stochastic+rotated16`."""
    encoding, *words = text.split("+")
    _check_encoding(product, encoding)
    found: dict[str, Any] = {}
    for word in words:
        field, value = _told(product, word)
        if field in found:
            raise ValueError(f"recipe: {product} must say {field} once, got {text!r}")
        if field == "history" and not encoding.startswith(_DELAYED):
            raise ValueError(
                f"recipe: {product} must be in {_DELAYED}<format> where it has a history, got "
                f"{text!r}"
            )
        found[field] = value
    return LinearOperand(encoding=encoding, **found)


def _told(product: str, word: str) -> tuple[str, Any]:
    """Return the field that a word after a `+` sets, and its value."""
    rotated = _ROTATED.fullmatch(word)
    if rotated and int(rotated[1]) <= _LARGEST_ROTATION:
        return "rotation", int(rotated[1])
    if word in ROUNDINGS:
        return "rounding", word
    if word == "of_forward":
        return "of_forward", True
    history = _HISTORY.fullmatch(word)
    if history and 1 <= int(history[1]) <= _LONGEST_HISTORY:
        return "history", int(history[1])
    raise ValueError(
        f"recipe: {product} must have after a + one of {', '.join(ROUNDINGS)}, rotated<size up to "
        f"{_LARGEST_ROTATION}>, of_forward, history<updates up to {_LONGEST_HISTORY}>, got "
        f"{word!r}; nearest: {_nearest(word, (*ROUNDINGS, 'rotated16', 'of_forward', 'history16'))}"
    )


def _check_encoding(product: str, encoding: str) -> None:
    """ValueError unless `encoding` is a block recipe or a format that FP32 holds."""
    operand = LinearOperand(encoding=encoding)
    try:
        blocks, delayed = operand.blocks, operand.delayed
    except ValueError as error:
        names = (*BLOCK_RECIPES, *FORMATS, *(f"{_DELAYED}{name}" for name in ("e4m3", "e5m2")))
        raise ValueError(
            f"recipe: {product} must be in a block recipe, a format or {_DELAYED}<format>, got "
            f"{encoding!r}; nearest: {_nearest(encoding, names)}"
        ) from error
    format = delayed or (format_named(encoding) if blocks is None else None)
    if format is not None and not format.fits(FORMATS["fp32"]):
        raise ValueError(f"recipe: {product} must be in a format that FP32 holds, got {encoding!r}")


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"recipe: last_blocks must be a number, got {text!r}") from error


def _text(recipe: LinearRecipe) -> str:
    """Return the one text for what `recipe` computes, less what is so anyway."""
    usual = {field.name: field.default for field in fields(LinearRecipe)}
    products = (
        f"{name}={_BETWEEN.join(dict.fromkeys(map(_operand_text, getattr(recipe, name))))}"
        for name in _PRODUCTS
    )
    options = (
        f"{name}={getattr(recipe, name)}"
        for name in _OPTIONS
        if getattr(recipe, name) != usual[name]
    )
    return " ".join((*products, *options))


def _operand_text(operand: LinearOperand) -> str:
    words = (
        operand.name,
        operand.rounding * (operand.rounding != "nearest_even"),
        f"rotated{operand.rotation}" * bool(operand.rotation),
        "of_forward" * operand.of_forward,
        f"history{operand.history}" * (operand.history != _USUAL_HISTORY),
    )
    return "+".join(word for word in words if word)


def _nearest(name: str, names: Iterable[str]) -> str:
    allowed = list(names)
    return ", ".join(difflib.get_close_matches(name, allowed, n=3, cutoff=0.4) or allowed)
