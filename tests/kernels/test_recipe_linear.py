"""A linear layer by a recipe, held against blocks quantized in loops and products in FP64.

The reference is written from the sources and shares no code with what it judges: casts are those of
ml_dtypes, Hadamard's matrix is made of the parity of its indices. Values are multiples of 1/16, so
a rotation is exact in FP32 and no tie can fall to either side.

Recipes in parts are held to the bit against `quantize` of each operand, which has tests of its own,
and a product in FP32.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention_kernels.block_recipes import BLOCK_RECIPES
from attention_kernels.block_scaling import dequantize, quantize
from attention_kernels.linear_recipes import (
    LINEAR_RECIPES,
    LinearOperand,
    LinearProduct,
    LinearRecipe,
    linear_recipe_named,
)
from attention_kernels.points import LINEAR_STREAM
from attention_kernels.random_bits import bits_after
from attention_kernels.recipe_linear import recipe_linear
from attention_kernels.rotation import rotation
from attention_kernels.rounding import round_to
from attention_kernels.rounding_key import draws_of
from tests.kernels.recipe_texts import WRITTEN_OUT

F32 = np.float32
CASTS = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448),
    "e5m2": (ml_dtypes.float8_e5m2, 57344),
}
BLOCKS = {
    "nvfp4": ("e2m1", 1, 16, "two levels"),
    "nvfp4 squares": ("e2m1", 16, 16, "two levels"),
    "mxfp8": ("e4m3", 1, 32, "power of two"),
    "tiles": ("e4m3", 1, 128, "fp32"),
    "squares": ("e4m3", 128, 128, "fp32"),
    "tiles pow2": ("e4m3", 1, 128, "power of two"),
    "squares pow2": ("e4m3", 128, 128, "power of two"),
    "tensor": ("e4m3", 10**6, 10**6, "fp32"),
    "tensor e5m2": ("e5m2", 10**6, 10**6, "fp32"),
    "late": ("e4m3", 10**6, 10**6, "multiplied by"),
    "late e5m2": ("e5m2", 10**6, 10**6, "multiplied by"),
}
"""Elements, block across and along the summed axis, and scale: what the sources say."""

_NVFP4 = {
    "forward": ("nvfp4", "nvfp4 squares"),
    "dgrad": ("nvfp4", "nvfp4 squares"),
    "wgrad": ("nvfp4 rotated", "nvfp4 rotated"),
}
PUBLISHED = {
    "nvfp4": _NVFP4,
    "nvfp4_no_rotation": _NVFP4 | {"wgrad": ("nvfp4", "nvfp4")},
    "nvfp4_nearest": _NVFP4,
    "nvfp4_1d_weights": _NVFP4 | {"forward": ("nvfp4", "nvfp4"), "dgrad": ("nvfp4", "nvfp4")},
    "mxfp8": dict.fromkeys(("forward", "dgrad", "wgrad"), ("mxfp8", "mxfp8")),
    "deepseek_v3": {
        "forward": ("tiles", "squares"),
        "dgrad": ("tiles", "squares"),
        "wgrad": ("tiles", "tiles again"),
    },
    "deepseek_v3_pow2": {
        "forward": ("tiles pow2", "squares pow2"),
        "dgrad": ("tiles pow2", "squares pow2"),
        "wgrad": ("tiles pow2", "tiles pow2 again"),
    },
    "fp8_current": {
        "forward": ("tensor", "tensor"),
        "dgrad": ("tensor e5m2", "tensor"),
        "wgrad": ("tensor e5m2", "tensor"),
    },
    # without scales of earlier updates: by those that the values would leave behind
    "fp8_delayed": {
        "forward": ("late", "late"),
        "dgrad": ("late e5m2", "late"),
        "wgrad": ("late e5m2", "late"),
    },
}
"""The operands of each product: x and w, dy and w, dy and x."""
NEAREST = {
    name: replace(
        recipe,
        output="fp32",
        **{
            product: LinearProduct(
                *(replace(each, rounding="nearest_even") for each in getattr(recipe, product))
            )
            for product in ("forward", "dgrad", "wgrad")
        },
    )
    for name, recipe in LINEAR_RECIPES.items()
}
"""The same to nearest even and without the last rounding, which a reference can have to the bit."""
KEY = (1, 2, 3, 4)


def draw(*shape, seed=0):
    """Multiples of 1/16 below 2^10 whose size varies by row and by column."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(0, 5, (*shape[:-1], 1), generator=generator).float())
    columns = torch.exp2(torch.randint(0, 3, shape[-1:], generator=generator).float())
    values = torch.randn(shape, generator=generator) * rows * columns
    return (values.clamp(-8, 8) * rows).mul(16).round().div(16)


X, DY = draw(2, 70, 136), draw(2, 70, 132, seed=1)
WEIGHT, BIAS = draw(132, 136, seed=2), draw(132, seed=3)


def block_by_block(x, axis, name):
    """`x` quantized and dequantized in blocks along `axis`, each in a turn of its own."""
    elements, across, along, scale = BLOCKS[name]
    dtype, largest = CASTS[elements]
    height, width = (along, across) if axis == 0 else (across, along)
    tensor = F32(1)
    if scale == "two levels":
        tensor = np.abs(x).max() / F32(448 * 6)
    found = np.zeros_like(x)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            place = slice(top, top + height), slice(left, left + width)
            block = x[place]
            amax = np.abs(block).max()
            if scale == "two levels":
                own = F32(min(amax / F32(6) / tensor, F32(448)).astype(ml_dtypes.float8_e4m3fn))
                scaled = block * (F32(1) / tensor / own)
            elif scale == "multiplied by":
                factor = F32(largest) / amax
                own, scaled = F32(1) / factor, block * factor
            else:
                own = amax / F32(largest)
                if scale == "power of two":
                    own = F32(next(2.0**e for e in range(-60, 60) if 2.0**e >= own))
                scaled = block / own
            clipped = np.clip(scaled, -largest, largest)
            found[place] = clipped.astype(dtype).astype(F32) * (own * tensor)
    return found


def hadamard():
    """Random signs times the Hadamard matrix of 16; the signs are those of our own matrix."""
    signs = np.sign(rotation(16, 0, torch.float64, torch.device("cpu"))[:, 0].numpy())
    parity = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    return signs[:, None] * np.array(parity) / 4


def rotated(x):
    """`x`, filled up with rows of zeros, each 16 rows multiplied by the transposed matrix."""
    padded = np.concatenate([x, np.zeros((-len(x) % 16, x.shape[1]), F32)])
    matrix = hadamard().T
    parts = [matrix @ padded[at : at + 16] for at in range(0, len(padded), 16)]
    exact = np.concatenate(parts)
    assert (exact == exact.astype(F32)).all()
    return exact.astype(F32)


def operand(x, axis, name):
    if name.endswith(" again"):
        name = name.removesuffix(" again")
        x = block_by_block(x, 1, name)
    if name.endswith(" rotated"):
        return block_by_block(rotated(x), axis, name.removesuffix(" rotated"))
    return block_by_block(x, axis, name)


def expected(product, names):
    """A product in FP64, and a bound on the error of a sum in FP32."""
    x, dy = (t.flatten(0, 1).numpy() for t in (X, DY))
    first, second, axes = {
        "forward": (x, WEIGHT.numpy(), (1, 1)),
        "dgrad": (dy, WEIGHT.numpy(), (1, 0)),
        "wgrad": (dy, x, (0, 0)),
    }[product]
    first, second = (
        operand(each, axis, name).astype(np.float64)
        for each, axis, name in zip((first, second), axes, names, strict=True)
    )
    left = first if axes[0] == 1 else first.T
    right = second.T if axes[1] == 1 else second
    added = BIAS.double().numpy() if product == "forward" else 0.0
    size = np.abs(left) @ np.abs(right) + np.abs(added)
    return left @ right + added, (left.shape[1] + 1) * 2.0**-24 * size


def computed(recipe, x=X, weight=WEIGHT, bias=BIAS, dy=DY, **options):
    """The three products of a recipe: y, dx and dw, and db."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = recipe_linear(*leaves, recipe, **options)
    y.backward(dy.to(y.dtype))
    found = {"forward": y.detach(), "dgrad": leaves[0].grad, "wgrad": leaves[1].grad}
    return found | {"bias": leaves[2].grad}


@pytest.fixture(scope="module")
def found():
    return {name: computed(recipe) for name, recipe in NEAREST.items()}


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", LINEAR_RECIPES)
def test_each_product_is_as_blocks_in_loops_have_it(found, name, product):
    exact, bound = expected(product, PUBLISHED[name][product])
    values = found[name][product]
    values = values.flatten(0, -2).double().numpy()
    assert (np.abs(values - exact) <= bound).all()
    # far from what is not quantized at all: the bound would tell
    plain = {"forward": X @ WEIGHT.T + BIAS, "dgrad": DY @ WEIGHT}
    plain["wgrad"] = DY.flatten(0, 1).T @ X.flatten(0, 1)
    assert (np.abs(plain[product].flatten(0, -2).numpy() - exact) > 10 * bound).mean() > 0.5


def test_gradients_of_the_bias_are_sums_in_fp32(found):
    for name in ("nvfp4", "mxfp8"):
        torch.testing.assert_close(found[name]["bias"], DY.sum((0, 1)))


def _one_sided(recipe, size):
    left, right = recipe.wgrad
    return replace(recipe, wgrad=LinearProduct(left, replace(right, rotation=size)))


def test_rotations_cancel_in_the_product_and_one_alone_is_refused():
    exact = LinearOperand(encoding="fp32", rotation=16)
    both = LinearProduct(exact, exact)
    recipe = LinearRecipe(name="turned", forward=both, dgrad=both, wgrad=both, output="fp32")
    plain = {"forward": X @ WEIGHT.T + BIAS, "dgrad": DY @ WEIGHT}
    plain["wgrad"] = DY.flatten(0, 1).T @ X.flatten(0, 1)
    for product, values in computed(recipe).items():
        if product != "bias":
            # 140 terms, each off by a few parts in 2^24
            assert (values - plain[product]).norm() < 1e-5 * plain[product].norm()
    with pytest.raises(ValueError, match=r"wgrad must be a product of two .* same rotation"):
        _one_sided(LINEAR_RECIPES["nvfp4"], 0)


def test_forward_and_dgrad_see_the_same_weight_in_squares_alone():
    """Of one-hot rows y holds the weight's columns, and dx of one-hot dy its rows."""
    seen = {}
    for name in ("nvfp4", "deepseek_v3", "nvfp4_1d_weights"):
        ones = computed(
            NEAREST[name], torch.eye(136), WEIGHT, torch.zeros(132), torch.zeros(136, 132)
        )
        others = computed(
            NEAREST[name], torch.zeros(132, 136), WEIGHT, torch.zeros(132), torch.eye(132)
        )
        # one-hot rows are exact up to the last bit of their scales
        seen[name] = (ones["forward"].T - others["dgrad"]).abs().max() / WEIGHT.abs().max()
    assert max(seen["nvfp4"], seen["deepseek_v3"]) < 1e-6
    assert seen["nvfp4_1d_weights"] > 0.1


GRADIENT = torch.rand(64, 32, generator=torch.Generator().manual_seed(4)) * 12 - 6
GRADIENT[:, ::16] = 6.0  # the same amax in each block, so that its scale is exact
UNIT = {"x": torch.zeros(64, 32), "weight": torch.eye(32), "bias": torch.zeros(32)}


def rounded_gradient(key, name="nvfp4", **options):
    """dy as dgrad multiplies it: dx of a weight that is the unit matrix."""
    recipe = replace(LINEAR_RECIPES[name], output="fp32")
    return computed(recipe, **UNIT, dy=GRADIENT, rounding_key=key, **options)["dgrad"]


def test_a_gradient_is_rounded_to_one_of_its_two_neighbours():
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = GRADIENT.abs()
    below = grid[torch.searchsorted(grid, size, right=True) - 1]
    above = grid[torch.searchsorted(grid, size)]
    found = rounded_gradient(KEY)
    is_below = (found.abs() - below).abs() < 1e-5
    assert (is_below | ((found.abs() - above).abs() < 1e-5)).all()
    assert (found * GRADIENT >= 0).all()
    between = below < above
    assert 0.2 < is_below[between].double().mean() < 0.8
    nearest = rounded_gradient(KEY, "nvfp4_nearest")
    assert 0.1 < (nearest != found)[between].double().mean() < 0.5


def rms(x):
    return float(x.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("counted", ["seed", "step", "layer", "call", "part"])
def test_the_mean_of_stochastic_gradients_falls_with_the_square_root_of_their_number(counted):
    place = ("seed", "step", "layer", "call", "part").index(counted)
    keys = [[*KEY, 0] for _ in range(100)]
    for number, key in enumerate(keys):
        key[place] = number
    errors = torch.stack([rounded_gradient(k[:4], part=k[4]) - GRADIENT for k in keys])
    one = rms(errors[0])
    assert one > 0.1
    for count in (16, 100):
        # 2000 elements that are no grid points: the RMS of their means is known to 2 %
        assert rms(errors[:count].mean(0)) == pytest.approx(one / count**0.5, rel=0.12)


def test_the_largest_of_a_block_is_clipped_at_each_draw_where_its_scale_was_rounded_down():
    """The other block's scale is 271, and 256 in e4m3, where the largest is 448."""
    dy = torch.full((1, 32), 0.5)
    dy[0, 0], dy[0, 16] = 6.0, 6.0 * 271 / 448
    recipe = replace(LINEAR_RECIPES["nvfp4"], output="fp32")
    x = torch.zeros(1, 32)
    drawn = [
        computed(recipe, x, UNIT["weight"], UNIT["bias"], dy, rounding_key=(1, n, 0, 0))["dgrad"]
        for n in range(50)
    ]
    own, other = torch.stack(drawn)[:, 0, 0], torch.stack(drawn)[:, 0, 16]
    torch.testing.assert_close(own, torch.full((50,), 6.0))
    torch.testing.assert_close(other, torch.full((50,), 6.0 * 256 / 448), rtol=1e-6, atol=0)


def test_without_a_key_or_with_one_key_the_bits_are_those_of_the_call_before():
    assert torch.equal(rounded_gradient(()), rounded_gradient(()))
    assert torch.equal(rounded_gradient(KEY), rounded_gradient(KEY))
    assert not torch.equal(rounded_gradient(()), rounded_gradient(KEY))
    frozen = torch.stack([rounded_gradient(()) - GRADIENT for _ in range(3)])
    assert rms(frozen.mean(0)) == pytest.approx(rms(frozen[0]))


_PLAIN = LinearOperand(encoding="fp32")
_DRAWN = LinearOperand(encoding="e8m1", rounding="stochastic")
DRAWN = LinearRecipe(
    name="drawn",
    forward=LinearProduct(_PLAIN, _PLAIN),
    dgrad=LinearProduct(_DRAWN, _PLAIN),
    wgrad=LinearProduct(_DRAWN, _PLAIN),
    output="fp32",
)
"""Without scales, so that what is drawn is seen alone."""


def test_dgrad_and_wgrad_draw_bits_of_their_own():
    eye = torch.eye(32)
    found = computed(DRAWN, eye, eye, torch.zeros(32), GRADIENT[:32], rounding_key=KEY)
    dgrad, wgrad = found["dgrad"], found["wgrad"].T
    assert 0.1 < (dgrad != wgrad).double().mean() < 0.6
    assert not torch.equal(dgrad, GRADIENT[:32])


def test_a_part_of_a_batch_draws_what_it_draws_in_the_whole():
    x, dy = torch.zeros(4, 16, 32), GRADIENT.reshape(4, 16, 32)
    whole = computed(DRAWN, x, torch.eye(32), torch.zeros(32), dy, rounding_key=KEY)["dgrad"]
    key = (*KEY, 1, 0, 0)
    part = computed(DRAWN, x[1:3], torch.eye(32), torch.zeros(32), dy[1:3], rounding_key=key)
    assert torch.equal(part["dgrad"], whole[1:3])
    begun = computed(DRAWN, x[1:3], torch.eye(32), torch.zeros(32), dy[1:3], rounding_key=KEY)
    assert not torch.equal(begun["dgrad"], whole[1:3])


def test_a_recomputed_layer_draws_again_what_it_drew():
    weight = WEIGHT.clone().requires_grad_()
    grads = []
    for recomputes in (False, True):
        x = X.clone().requires_grad_()

        def layer(x):
            return recipe_linear(x, weight, None, LINEAR_RECIPES["nvfp4"], rounding_key=KEY)

        y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        grads.append(torch.autograd.grad(y, (x, weight), DY.to(y.dtype)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_results_have_the_dtypes_of_a_layer_under_autocast_and_its_caller_changes_no_bit():
    recipe = LINEAR_RECIPES["mxfp8"]
    found = computed(recipe)
    assert found["forward"].dtype == torch.bfloat16
    assert torch.equal(found["dgrad"], found["dgrad"].bfloat16().float())
    assert not torch.equal(found["wgrad"], found["wgrad"].bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        cast = computed(recipe)
    assert all(torch.equal(cast[name], values) for name, values in found.items())
    narrow = [t.bfloat16() for t in (X, WEIGHT, BIAS)]
    dtypes = {values.dtype for values in computed(recipe, *narrow).values()}
    assert dtypes == {torch.bfloat16}


def test_values_that_fp32_does_not_hold_are_refused():
    with pytest.raises(ValueError, match="weight must be float32, bfloat16 or float16, got"):
        recipe_linear(X, WEIGHT.double(), None, LINEAR_RECIPES["mxfp8"])


def test_a_single_vector_and_one_dimension_of_rows_are_layers_too():
    recipe = LINEAR_RECIPES["mxfp8"]
    rows = recipe_linear(X[0], WEIGHT, BIAS, recipe)
    assert torch.equal(recipe_linear(X, WEIGHT, BIAS, recipe)[0], rows)
    assert torch.equal(recipe_linear(X[0, 3], WEIGHT, BIAS, recipe), rows[3])


PLACES = tuple(f"{product}.{side}" for product in PUBLISHED["mxfp8"] for side in ("left", "right"))
_MIXED = ("mxfp4", "mxfp6-e2m3", "mxfp8-e5m2 drawn", "fp8_per_row", "mxint8-even", "nvfp4_4over6")
_TURNED = ("mxfp4 drawn", "deepseek_128x128-ceil", "mxfp8 drawn", "mxfp6-e3m2")
_TURNED += ("nvfp4 drawn rotated", "mxfp4-even rotated")
_FORMATS = ("e4m3-saturate format", "bf16 format", "e5m2 format", "fp32 format")
_FORMATS += ("e3m4-saturate format", "tf32 format")
WRITTEN = {f"all={name}": (name,) * 6 for name in BLOCK_RECIPES} | {
    "forward=mxfp4/mxfp6-e2m3 dgrad=mxfp8-e5m2+stochastic/fp8_per_row "
    "wgrad=mxint8-even/nvfp4_4over6": _MIXED,
    "forward=mxfp4+stochastic/deepseek_128x128-ceil dgrad=mxfp8+stochastic/mxfp6-e3m2 "
    "wgrad=nvfp4+stochastic+rotated16/mxfp4-even+rotated16": _TURNED,
    "forward=e4m3-saturate/bf16 dgrad=e5m2/fp32 wgrad=e3m4-saturate/tf32": _FORMATS,
}
"""Recipes by their text, and what each of PLACES is in by it."""


def by_blocks(x, axis, place, told):
    """`x` as the operand of one place, quantized by what quantizes any tensor."""
    name, *words = told.split()
    if "rotated" in words:
        assert axis == 0
        x = torch.from_numpy(rotated(x.numpy()))
    if "format" in words:
        return round_to(x, name)
    rows, columns = (torch.arange(length) for length in x.shape)
    stream = LINEAR_STREAM, PLACES.index(place), 0
    drawn = bits_after(draws_of(0, KEY).word, *stream, rows[:, None], columns)
    options = {"rounding": "stochastic", "bits": drawn} if "drawn" in words else {}
    return dequantize(quantize(x, name, axis, partial=True, **options))


@pytest.mark.parametrize("text", WRITTEN)
def test_a_recipe_in_parts_multiplies_what_its_blocks_make_of_each_operand_to_the_bit(text):
    x, dy = X.flatten(0, 1), DY.flatten(0, 1)
    axes = dict(zip(PLACES, (1, 1, 1, 0, 0, 0), strict=True))
    values = dict(zip(PLACES, (x, WEIGHT, dy, WEIGHT, dy, x), strict=True))
    told = dict(zip(PLACES, WRITTEN[text], strict=True))
    of = {place: by_blocks(values[place], axes[place], place, told[place]) for place in PLACES}
    wanted = {
        "forward": torch.nn.functional.linear(of["forward.left"], of["forward.right"], BIAS),
        "dgrad": of["dgrad.left"] @ of["dgrad.right"],
        "wgrad": of["wgrad.left"].T @ of["wgrad.right"],
    }
    found = computed(linear_recipe_named(f"{text} output=fp32"), rounding_key=KEY)
    for product, values in wanted.items():
        assert torch.equal(found[product].flatten(0, -2), values), product


def test_results_of_a_recipe_in_parts_have_the_formats_that_it_says():
    text = "all=mxfp8 output="
    wide = computed(linear_recipe_named(f"{text}fp32"))
    narrow = computed(linear_recipe_named(f"{text}fp32 weight_gradient=bf16"))
    assert torch.equal(narrow["wgrad"], wide["wgrad"].bfloat16().float())
    assert torch.equal(narrow["forward"], wide["forward"])
    half = computed(linear_recipe_named(f"{text}fp16"), X / 16)["forward"]
    assert torch.equal(half, computed(linear_recipe_named(f"{text}fp32"), X / 16)["forward"].half())


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_the_parts_of_a_published_recipe_give_its_bits(name):
    published = computed(LINEAR_RECIPES[name], rounding_key=KEY)
    own = computed(linear_recipe_named(WRITTEN_OUT[name]), rounding_key=KEY)
    for product, values in own.items():
        assert torch.equal(values, published[product]), product
