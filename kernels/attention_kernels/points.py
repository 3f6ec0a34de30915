"""The rounding points of the flash recurrence: the format and the random stream of each.

A rounding point is a place where a value inside attention is rounded to a format. This is the one
list of them. `ForwardNumerics` and `BackwardNumerics` hold what a user chooses: a format for each
field. `POINTS` names the roundings that the engines execute. Several may read one field: the
running maximum, P, the rescale factor and the running sum are all rounded to `statistics`, which is
one decision, but each of them draws random bits of its own.

A stream number is folded into the hash that the bits of stochastic rounding come from
(`random_bits.bits_at`), so that two roundings at one place of a tile draw different bits. The
numbers decide bits: they are never reused or renumbered, and a new point takes the next free one.

The twin and the Triton kernels name a point where they round, and read its format and stream from
here. The defaults are FlashAttention-2's in BF16 or FP16: operands of products in the inputs'
format, all else in FP32.

A field that defaults to UNROUNDED names steps that kernels keep in registers, between two of the
other points: nothing is rounded there unless a format is given. An implementation made of PyTorch
operations on BF16 tensors rounds there too, since each operation returns BF16 (`profiles`).

Imports no torch. Leaves out what else decides the bits (`numerics`), and the points of attention
that holds the whole score matrix (`numerics.BaselineNumerics`).
"""

import difflib
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from attention_kernels.block_recipes import OPERAND_RECIPES, check_no_recipe
from attention_kernels.formats import FORMATS, format_named

__all__ = [
    "DROPOUT_STREAM",
    "FIELDS",
    "LINEAR_STREAM",
    "POINTS",
    "ROUNDING_STREAM",
    "SIGNS_STREAM",
    "UNROUNDED",
    "BackwardNumerics",
    "ForwardNumerics",
    "Point",
    "check_formats",
]

UNROUNDED = "work"
"""In place of a format: values stay in the work format. Of the fields that default to it alone."""


def check_formats(group: Any, *others: str) -> None:
    """Raise ValueError unless every field of `group` but `others` names a format or is "input".

    A field that is UNROUNDED by default may be that as well, and the operands of flash attention
    may be in blocks.
    """
    for point in fields(group):
        name = getattr(group, point.name)
        if point.name in others or name in ("input", point.default):
            continue
        if isinstance(name, str):  # a list from YAML has no hash, and is refused below
            in_blocks = isinstance(group, ForwardNumerics) and point.name == "operands"
            check_no_recipe(f"{type(group).__name__}: {point.name}", name, operands=in_blocks)
            if in_blocks and name in OPERAND_RECIPES:
                continue
        try:
            format_named(name)
        # TypeError: a list from YAML can't be hashed by the cache of `format_named`
        except (ValueError, TypeError) as error:
            allowed = ["input", *([UNROUNDED] if point.default == UNROUNDED else []), *FORMATS]
            near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4) or allowed
            raise ValueError(
                f"{type(group).__name__}: {point.name} must be a format, got {name!r}; "
                f"nearest: {', '.join(near)}"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardNumerics:
    """Formats at the rounding points of the forward recurrence, in the order they occur."""

    operands: str = "input"
    """q, k, v (and dO in the backward) as they enter the dot products: a format, or a block recipe
    such as `nvfp4`, in blocks along the head_dim, and of v along the keys."""
    products: str = UNROUNDED
    """q k^T, before it is multiplied by scale."""
    scores: str = "fp32"
    """scale * q k^T with softcap and bias, once per element, before the mask."""
    statistics: str = "fp32"
    """Running max, exp(score - max), rescale factor and running sum."""
    exponents: str = UNROUNDED
    """score - max and old max - new max, which exp is taken of (score - lse in the backward)."""
    summands: str = UNROUNDED
    """What the running sum and lse add up: a block's sum of P, rescaled old sum, log(sum)."""
    probabilities: str = "input"
    """exp(score - max) as operand of the product with v (P in the backward, of dV)."""
    rescaled_accumulator: str = UNROUNDED
    """Rescale factor * accumulator, before P v is added."""
    block_output: str = UNROUNDED
    """P v of one key block, before it is added to the accumulator."""
    accumulator: str = "fp32"
    """Unnormalised output after each key block; the output of each split."""
    output: str = "input"
    """accumulator / sum, as stored; the backward's delta reads it."""
    lse: str = "fp32"
    """max + log(sum), as stored; the backward's P is recomputed from it."""

    def __post_init__(self) -> None:
        check_formats(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardNumerics:
    """Formats at the rounding points of the backward recurrence, in the order they occur."""

    delta_products: str = UNROUNDED
    """dO * O, before it is summed."""
    delta: str = "fp32"
    """rowsum(dO * O)."""
    dp: str = "fp32"
    """dO v^T."""
    ds_factors: str = UNROUNDED
    """dP - delta, and P * scale where `gradient_scale` is "probabilities": what dS multiplies."""
    ds: str = "input"
    """P * (dP - delta), as operand of the products for dQ and dK."""
    gradient_products: str = UNROUNDED
    """dS k, dS^T q and P^T dO of one tile, before they are added to dQ, dK and dV."""
    dq_accumulator: str = "fp32"
    """dQ after each key block."""
    dkv_accumulator: str = "fp32"
    """dK and dV of one query head after each query block."""
    gradients: str = "input"
    """dQ, dK and dV as returned; the heads of a group are added before."""

    def __post_init__(self) -> None:
        check_formats(self)


class Point(NamedTuple):
    """One rounding: the field that names its format, and the stream of its random bits."""

    field: str
    stream: int


SIGNS_STREAM = 5
"""Stream of the random signs of incoherent processing, which are no rounding."""

DROPOUT_STREAM = 40
"""Stream of dropout, which is no rounding either."""

ROUNDING_STREAM = 59
"""Stream of the words of calls that have a rounding key (`rounding_key`)."""

LINEAR_STREAM = 60
"""Stream of the operands of linear layers, which are told apart by further coordinates."""

POINTS = {
    "q": Point("operands", 1),
    "k": Point("operands", 2),
    "v": Point("operands", 3),
    "dout": Point("operands", 4),
    "products": Point("products", 41),
    "scores": Point("scores", 16),
    "max": Point("statistics", 17),
    "p": Point("statistics", 18),
    "alpha": Point("statistics", 19),
    "sum": Point("statistics", 20),
    "exponents": Point("exponents", 42),
    "alpha_exponent": Point("exponents", 43),
    "block_sum": Point("summands", 44),
    "rescaled_sum": Point("summands", 45),
    "log_sum": Point("summands", 46),
    "probabilities": Point("probabilities", 21),
    "rescaled_accumulator": Point("rescaled_accumulator", 47),
    "block_output": Point("block_output", 48),
    "accumulator": Point("accumulator", 22),
    "output": Point("output", 23),
    "lse": Point("lse", 24),
    # The merger of splits: what each split leaves behind, and its weight in the sum.
    "split_output": Point("accumulator", 38),
    "split_lse": Point("lse", 39),
    "split_weights": Point("statistics", 25),
    "split_total": Point("statistics", 26),
    "split_exponent": Point("exponents", 49),
    "split_log": Point("summands", 50),
    "split_rescaled": Point("rescaled_accumulator", 51),
    "delta_products": Point("delta_products", 52),
    "delta": Point("delta", 27),
    # The backward computes P again, from lse instead of the running maximum, and rounds it anew.
    "backward_exponents": Point("exponents", 53),
    "backward_p": Point("statistics", 36),
    "dp": Point("dp", 28),
    "ds_difference": Point("ds_factors", 54),
    "ds_probabilities": Point("ds_factors", 55),
    "ds": Point("ds", 29),
    "backward_probabilities": Point("probabilities", 37),
    "dq_product": Point("gradient_products", 56),
    "dk_product": Point("gradient_products", 57),
    "dv_product": Point("gradient_products", 58),
    "dq_accumulator": Point("dq_accumulator", 30),
    "dk_accumulator": Point("dkv_accumulator", 31),
    "dv_accumulator": Point("dkv_accumulator", 32),
    "dq": Point("gradients", 33),
    "dk": Point("gradients", 34),
    "dv": Point("gradients", 35),
}
"""Every rounding that the engines execute, by the name they round it under."""

FIELDS = tuple(dict.fromkeys(point.field for point in POINTS.values()))
"""The fields of both groups of formats, in the order in which a call reads them."""
