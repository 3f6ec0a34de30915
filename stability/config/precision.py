"""The precision of an arm: of all modules, or a default and what single modules compute in.

In YAML a precision is a name, or a mapping whose globs name modules as `named_modules` does:

    precision: {default: bf16-mixed, "*.mlp_*": emulated:e4m3, "blocks.layer_0": fp32}

A glob that names a module holds for all inside it, and of several the last one decides. A config
holds the mapping as one text, `bf16-mixed, *.mlp_*=emulated:e4m3, blocks.layer_0=fp32`: in a
mapping the order would be lost in JSON, and each glob would be a change of its own.

`recipe:NAME` is a recipe of linear layers (`attention_kernels.linear_recipes`), a published one or
one written in its parts (`recipe:forward=mxfp4 dgrad=mxfp8 wgrad=mxfp8`, in YAML a mapping of its
own, in place of a name: `{forward: mxfp4, dgrad: mxfp8, wgrad: mxfp8}`). It is of single modules
or, as the default, of all blocks of a model of ours: less the last ones, if the recipe leaves those
in BF16, and less all that is no block, such as embeddings, output and final norm. Leaves out what
computes so (`model.precision`, `model.module_precision`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from attention_kernels.formats import FORMATS, Format, format_named
from attention_kernels.linear_recipes import (
    LINEAR_RECIPES,
    PARTS,
    LinearRecipe,
    linear_recipe_named,
)
from stability.config.convert import Place, nearest

__all__ = [
    "EMULATED",
    "NATIVE",
    "OF_MODULES",
    "OPERANDS",
    "RECIPE",
    "Precision",
    "emulated_format",
    "linear_recipe",
    "parse_precision",
    "precision_change",
    "precision_text",
    "with_precision_text",
]

NATIVE = ("64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed")
"""PyTorch's own precisions, as Lightning names them."""
EMULATED = "emulated:"
"""Opens the name of an emulated precision; a format's name follows. The operands and outputs of
matmuls are rounded to any format that FP32 holds, and multiplied in FP32, so that an FP16 or FP8
run is affordable where no hardware has it (`model.precision`)."""
RECIPE = "recipe:"
"""Opens the name of a recipe of linear layers; the recipe's name follows. All that such a module
does besides its linear layers is in the default's precision."""
OF_MODULES = ("fp32", "bf16", "fp16")
"""What single modules may compute in besides emulated formats: FP32 takes them out of autocast."""

OPERANDS = {
    "64-true": "float64",
    "32-true": "float32",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "16-mixed": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""What linear layers multiply in each native precision, of all modules or of single ones: torch's
names of dtypes. `records.witness` has a table of its own, by which a run is judged."""

_DEFAULT = "default"
_SEPARATOR, _EQUALS = ", ", "="
_BF16_EXPONENT_BITS = 8
_AROUND_RECIPES = "bf16-mixed"
_RECIPE_NAMES = tuple(RECIPE + name for name in LINEAR_RECIPES)
_BLOCK = "blocks.{}"
"""The name of a layer's block in a model of ours."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision taken apart: that of all modules but those that a glob names."""

    default: str
    """What computes all that no glob names, a name of NATIVE or an emulated one."""
    modules: tuple[tuple[str, str], ...] = ()
    """Glob and precision, in order."""
    of_blocks: str = ""
    """The recipe of all blocks, less those that it leaves out and those that a glob names."""

    @property
    def text(self) -> str:
        """The text that a config holds; `parse_precision` undoes it."""
        own = (f"{glob}{_EQUALS}{value}" for glob, value in self.modules)
        return _SEPARATOR.join((self.whole, *own))

    @property
    def whole(self) -> str:
        """What stands before the globs."""
        return self.of_blocks or self.default

    def over(self, layers: Sequence[str]) -> "Precision":
        """Return the same with a recipe of all blocks as globs that name those of `layers`.

        `layers` are all of a model of ours, in order. ValueError if the recipe leaves all of them
        out.
        """
        recipe = linear_recipe(self.of_blocks)
        if recipe is None:
            return self
        computed = layers[: len(layers) - recipe.left_out(len(layers))]
        if not computed:
            raise ValueError(
                f"precision: {self.whole} must leave a block to compute so, got {len(layers)} in "
                f"all, of which {recipe.left_out(len(layers))} stay in BF16; name modules by globs"
            )
        blocks = tuple((_BLOCK.format(layer), self.of_blocks) for layer in computed)
        return replace(self, modules=(*blocks, *self.modules), of_blocks="")

    def of_module(self, name: str) -> str:
        """Return what the module `name` computes in: one of `OF_MODULES`, emulated, or a recipe.

        Empty where it computes in the default. A recipe of all blocks is not seen: `over` names
        them.
        """
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        found = ""
        for glob, value in self.modules:
            if any(fnmatchcase(each, glob) for each in around):
                found = value
        return found

    @property
    def emulates(self) -> bool:
        """Whether anything in it is emulated, by a recipe too."""
        values = (self.whole, *dict(self.modules).values())
        return any(each.startswith((EMULATED, RECIPE)) for each in values)

    @property
    def is_delayed(self) -> bool:
        """Whether a recipe in it has scales that follow from earlier updates, a run's state."""
        values = (self.of_blocks, *dict(self.modules).values())
        return any(recipe.is_delayed for recipe in map(linear_recipe, values) if recipe)

    @property
    def needs_scaler(self) -> bool:
        """Whether a loss scaler has to keep gradients from the end of some format's range.

        A recipe needs one where it gives gradients no scales, which bring them into range.
        """
        values = (self.default, self.of_blocks, *(value for _, value in self.modules))
        formats = [emulated_format(value) for value in values if value not in OF_MODULES]
        for recipe in map(linear_recipe, values):
            formats += recipe.unscaled_gradients() if recipe else ()
        is_narrow = any(f.exponent_bits < _BF16_EXPONENT_BITS for f in formats if f is not None)
        return is_narrow or "16-mixed" in values or "fp16" in values


def emulated_format(name: str) -> Format | None:
    """Return the format that the precision `name` emulates by default, None if it is native.

    ValueError if there is no such format, or if FP32 does not hold it.
    """
    name = name.partition(_SEPARATOR)[0]
    if not name.startswith(EMULATED):
        return None
    try:
        format = format_named(name.removeprefix(EMULATED))
    except ValueError as error:
        said = str(error).removeprefix("format_named: ")
        raise ValueError(f"precision: {said}, in {name!r}") from error
    if not format.fits(FORMATS["fp32"]):
        raise ValueError(
            f"precision: must emulate a format that FP32 holds, got {name!r}; use 64-true"
        )
    return format


def linear_recipe(name: str) -> LinearRecipe | None:
    """Return the recipe that the precision `name` is, None if it is none. ValueError if unknown."""
    if not name.startswith(RECIPE):
        return None
    try:
        return linear_recipe_named(name.removeprefix(RECIPE))
    except ValueError as error:
        said = str(error).removeprefix("LinearRecipe: ")
        raise ValueError(f"precision: {said}, in {name!r}") from error


def parse_precision(text: str) -> Precision:
    """Return the precision that a config's text means; ValueError if it means none."""
    default, *own = (part.strip() for part in text.split(","))
    modules: list[tuple[str, str]] = []
    for part in own:
        glob, equals, value = (each.strip() for each in part.partition(_EQUALS))
        if not (glob and equals):
            raise ValueError(
                f"precision: must be a name, and after it GLOB=PRECISION for single modules, got "
                f"{part!r} in {text!r}"
            )
        modules.append((glob, value))
    _check_default(default, has_modules=bool(modules))
    for glob, value in modules:
        _check_of_module(glob, value)
    twice = {glob for glob, _ in modules if [each for each, _ in modules].count(glob) > 1}
    if twice:
        raise ValueError(f"precision: must name a glob once, got {min(twice)!r} twice in {text!r}")
    own_values = tuple((glob, _in_one_spelling(value)) for glob, value in modules)
    if default.startswith(RECIPE):
        return Precision(_AROUND_RECIPES, own_values, _in_one_spelling(default))
    return Precision(default, own_values)


def _in_one_spelling(value: str) -> str:
    """Return a precision with the parts of a recipe, if it has such, in one order and spelling."""
    recipe = linear_recipe(value)
    return RECIPE + recipe.name if recipe else value


def _check_default(name: str, *, has_modules: bool) -> None:
    """ValueError unless `name` is a precision, with modules of their own one that can have such."""
    if name not in NATIVE and not name.startswith((EMULATED, RECIPE)):
        raise ValueError(
            f"precision: must be a known name or {EMULATED}<format> or {RECIPE}<name>, got "
            f"{name!r}; nearest: {nearest(name, (*NATIVE, *_RECIPE_NAMES))}"
        )
    emulated_format(name)
    linear_recipe(name)
    if has_modules and name.endswith("-true"):
        raise ValueError(
            f"precision: default must be bf16-mixed, 16-mixed or {EMULATED}<format> where modules "
            f"have precisions of their own, got {name!r}: it is that of the weights themselves"
        )


def _check_of_module(glob: str, value: str) -> None:
    if value.startswith((EMULATED, RECIPE)):
        emulated_format(value)
        linear_recipe(value)
        if "last_blocks=" in value:
            raise ValueError(
                f"precision: {glob} must not have last_blocks, got {value!r}; that is of a recipe "
                "of all blocks, and a glob names its modules itself"
            )
    elif value not in OF_MODULES:
        names = (*OF_MODULES, f"{EMULATED}<format>", *_RECIPE_NAMES)
        is_of_all = value in NATIVE
        why = "that is one of all modules" if is_of_all else f"nearest: {nearest(value, names)}"
        raise ValueError(
            f"precision: {glob} must be {', '.join(OF_MODULES)}, {EMULATED}<format> or "
            f"{RECIPE}<name>, got {value!r}; {why}"
        )


def precision_text(value: Any, below: str = "") -> Any:
    """Return the text of a precision that YAML gives as a mapping; anything else as it is.

    `below` is the text that the mapping is laid over, key by key: its globs come first. ValueError
    for what is no glob or no precision; of a text the config itself says what is wrong with it.
    """
    if not isinstance(value, Mapping):
        return value
    if set(value) <= set(PARTS) and not set(value).isdisjoint(("all", "dgrad", "wgrad")):
        parts = ", ".join(f"{name}: {part}" for name, part in value.items())
        raise ValueError(
            f"precision: parts of a recipe must stand below {_DEFAULT} or a glob, as in "
            f"`{{{_DEFAULT}: {{{parts}}}}}`, got `{{{parts}}}`"
        )
    value = {glob: _recipe_text(name) for glob, name in value.items()}
    for glob, name in value.items():
        is_text = isinstance(glob, str) and isinstance(name, str)
        if not is_text or not glob or set(glob) & {",", "="} or "," in name:
            raise ValueError(
                f"precision: must map globs of modules to names of precisions, got {glob!r}: "
                f"{name!r}"
            )
    under = parse_precision(below) if below else Precision("")
    default = value.get(_DEFAULT, under.whole)
    if not default:
        raise ValueError(f"precision: must have a {_DEFAULT}, for modules that no glob names")
    kept = [(glob, name) for glob, name in under.modules if glob not in value]
    own = [(glob, name) for glob, name in value.items() if glob != _DEFAULT]
    return parse_precision(Precision(default, (*kept, *own)).text).text


def _recipe_text(value: Any) -> Any:
    """Return the text of a recipe that YAML gives as a mapping of parts; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    for name, part in value.items():
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise ValueError(
                f"precision: {name} must be operands of a recipe as text, such as mxfp8+stochastic "
                f"or LEFT/RIGHT, got {part!r}"
            )
    return RECIPE + " ".join(f"{name}{_EQUALS}{part}" for name, part in value.items())


def precision_change(before: str, after: str) -> str:
    """Return in words what differs between two texts, only of modules where only that does."""
    was, now = (parse_precision(text) for text in (before, after))
    if was.whole != now.whole or was == now:
        return f"{before} -> {after}"
    others = (each for each in now.modules if each not in was.modules)
    added = [f"{glob} in {value}" for glob, value in others]
    gone = [f"{glob} as others" for glob, _ in was.modules if glob not in dict(now.modules)]
    return "; ".join([*added, *gone]) or f"{before} -> {after}"


def with_precision_text(values: Mapping[str, Any], below: str, place: Place) -> dict[str, Any]:
    """Return the `values` of an arm with their precision as a text; ConfigError if it is none."""
    if not isinstance(values.get("precision"), Mapping):
        return dict(values)
    try:
        return {**values, "precision": precision_text(values["precision"], below)}
    except ValueError as error:
        said = str(error).removeprefix("precision: ")
        raise place.at("precision").error(said) from error
