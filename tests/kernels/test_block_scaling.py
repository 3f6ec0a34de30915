"""Block scaling against a reference written from the sources, and against what torchao makes."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.block_recipes import BLOCK_RECIPES, POWER_OF_TWO_RULES, recipe_named
from attention_kernels.block_scaling import dequantize, quantize, round_blocks
from attention_kernels.rounding import round_to
from tests.kernels import torchao_blocks

ML_DTYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448, 8, 3),
    "e5m2": (ml_dtypes.float8_e5m2, 57344, 15, 2),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2, 3),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28, 4, 2),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6, 2, 1),
}
"""Of each element format: its dtype, largest value, the exponent of that, mantissa bits."""
MX = [name for name, recipe in BLOCK_RECIPES.items() if recipe.scales == "e8m0"]
MX_RULES = [
    name if rule == "floor" else f"{name}-{rule}" for name in MX for rule in POWER_OF_TWO_RULES
]
WITHOUT_TORCHAO = "torchao is not installed: pip install --no-deps torchao==0.18.0"
ONE_ROW = [n for n, r in BLOCK_RECIPES.items() if isinstance(r.block, tuple) and r.block[0] == 1]


def draw(*shape, seed=0, spread=8):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-spread, spread + 1, shape, generator=generator).float())
    return torch.randn(shape, generator=generator) * sizes


def cast(x, elements):
    """Elements by ml_dtypes; of `int8` by numpy, in units of 1/64."""
    if elements == "int8":
        return np.clip(np.rint(x * 64), -127, 127) / 64
    dtype, largest, *_ = ML_DTYPES[elements]
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)


def power_of_two(amax, elements, rule):
    """The scale of MX by one of its rules, in exact arithmetic of Python."""
    _, largest, exponent, mantissa = ML_DTYPES.get(elements, (None, 127 / 64, 0, 6))
    if amax == 0:
        return 2.0**-127
    if rule == "rceil":
        quotient = float(np.float32(amax) / np.float32(largest))
        power = next(e for e in range(-160, 160) if 2.0**e >= quotient)
    else:
        low = next(e for e in range(130, -160, -1) if 2.0**e <= amax)
        if rule == "ceil":
            low += amax > 2.0**low
        if rule == "even":
            unit = 2.0 ** (low - mantissa)
            low += math.floor(amax / unit + 0.5) * unit >= 2.0 ** (low + 1)
        power = low - exponent
    return 2.0 ** min(max(power, -127), 127)


def reference(x, name):
    """Elements and scales of FP32 rows, block by block."""
    recipe = recipe_named(name)
    columns = recipe.block[1]
    elements = np.zeros_like(x)
    scales = np.zeros((len(x), x.shape[1] // columns), np.float32)
    largest = ML_DTYPES.get(recipe.elements, (None, 127 / 64))[1]
    for row, block in np.ndindex(*scales.shape):
        place = row, slice(block * columns, (block + 1) * columns)
        amax = np.abs(x[place]).max()
        if recipe.scales == "e8m0":
            scale = np.float32(power_of_two(float(amax), recipe.elements, recipe.rule))
        else:
            scale = np.float32(amax) / np.float32(largest) if amax else np.float32(1)
        scales[row, block] = scale
        elements[place] = cast(x[place] / scale, recipe.elements)
    return elements, scales


def nvfp4_reference(x, largest_scale, at=6):
    """Elements, scales and the tensor's scale of NVFP4, amax of each block at 6 or at 4."""
    f32 = np.float32
    tensor = np.abs(x).max() / f32(largest_scale * 6)
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(-1)
    scales = np.minimum(amax / f32(at) / tensor, f32(448))
    scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(f32)
    with np.errstate(divide="ignore"):
        factors = np.where(scales == 0, f32(0), f32(1) / tensor / scales)
    return cast(blocks * factors[..., None], "e2m1"), scales, tensor


def assert_quantized(found, elements, scales):
    np.testing.assert_array_equal(found.scales.numpy(), scales)
    np.testing.assert_array_equal(found.elements.float().numpy(), elements)


@pytest.mark.parametrize("name", [*MX_RULES, "deepseek_1x128"])
def test_each_block_is_as_a_reference_in_numpy_has_it(name):
    x = torch.cat([draw(5, 256), round_to(draw(4, 256, seed=1, spread=0), "e8m4")])
    x[-1] = 0
    x[-2, :32] = 2.0**-3  # all equal, at a power of two
    assert_quantized(quantize(x, name), *reference(x.numpy(), name))


@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
@pytest.mark.parametrize("name", MX)
def test_a_scale_changes_where_its_rule_says(name, rule):
    """At amax a power of two, the largest value and where it rounds up, and beside each."""
    _, largest, _, mantissa = ML_DTYPES.get(BLOCK_RECIPES[name].elements, (None, 127 / 64, 0, 6))
    edges = [1.0, largest, 2 - 2.0 ** -(mantissa + 1), 2 - 2.0**-mantissa]
    points = torch.tensor([edge * 2.0**k for edge in edges for k in (-133, -100, -3, 0, 40, 110)])
    up = torch.nextafter(points, torch.tensor(torch.inf))
    down = torch.nextafter(points, torch.tensor(0.0))
    x = torch.zeros(3 * len(points) + 1, 32)
    x[:, 7] = -torch.cat([points, up, down, torch.tensor([2.0**-149])])
    name = name if rule == "floor" else f"{name}-{rule}"
    assert_quantized(quantize(x, name), *reference(x.numpy(), name))


@pytest.mark.parametrize("name", torchao_blocks.RECIPES)
def test_results_are_those_that_torchao_gave(name):
    stored = np.load(torchao_blocks.STORED)
    x = torch.from_numpy(stored["x"])
    found = quantize(torchao_blocks.taken(x, name), name)
    scales = stored[f"{name}/scales"].reshape(found.scales.shape)
    assert_quantized(found, stored[f"{name}/elements"], scales)


@pytest.mark.slow
def test_the_stored_results_are_those_of_the_torchao_that_is_here():
    pytest.importorskip("torchao", reason=WITHOUT_TORCHAO)
    stored = np.load(torchao_blocks.STORED)
    x = torchao_blocks.drawn()
    np.testing.assert_array_equal(x.numpy(), stored["x"])
    found = torchao_blocks.computed(x)
    assert {*found, "x"} == set(stored.files)
    for name, values in found.items():
        np.testing.assert_array_equal(values, stored[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_million_values_a_recipe_are_quantized_as_torchao_does(seed):
    pytest.importorskip("torchao", reason=WITHOUT_TORCHAO)
    x = torchao_blocks.drawn(4000, seed=seed + 1)  # half of them for nvfp4 and deepseek
    for name, wanted in torchao_blocks.computed(x).items():
        recipe, what = name.rsplit("/", 1)
        found = getattr(quantize(torchao_blocks.taken(x, recipe), recipe), what)
        np.testing.assert_array_equal(found.numpy().reshape(wanted.shape), wanted, err_msg=name)


def test_nvfp4_has_two_levels_of_scales():
    x = draw(6, 64, spread=3)
    found = quantize(x, "nvfp4")
    elements, scales, tensor_scale = nvfp4_reference(x.numpy(), 448)
    assert_quantized(found, elements.reshape(x.shape), scales)
    assert found.tensor_scale.item() == tensor_scale
    assert found.scales.max() == 448


def test_nvfp4_scales_below_the_normal_numbers_of_e4m3_are_kept_or_cut_as_the_recipe_says():
    x = draw(2, 32, spread=0)
    x[0, :16] *= 2.0**-16
    kept, cut = (quantize(x, replace(BLOCK_RECIPES["nvfp4"], least_scale=s)) for s in (0, 2**-6))
    assert 0 < kept.scales[0, 0] < 2**-6
    assert cut.scales[0, 0] == 2**-6
    assert torch.equal(kept.scales[1:], cut.scales[1:])


def test_a_block_far_below_the_others_of_nvfp4_is_zero():
    x = draw(2, 32, spread=0)
    x[0, :16] *= 2.0**-40
    found = quantize(x, "nvfp4")
    assert found.scales[0, 0] == 0
    assert not found.elements[0, :16].any()
    assert not dequantize(found)[0, :16].any()


def test_four_over_six_takes_the_scale_of_the_smaller_error():
    x = draw(40, 64, spread=1)
    found = quantize(x, "nvfp4_4over6")
    tried = [nvfp4_reference(x.numpy(), 256, at) for at in (6, 4)]
    blocks = x.numpy().reshape(40, -1, 16).astype(np.float64)
    errors = [((e * (s * t)[..., None] - blocks) ** 2).sum(-1) for e, s, t in tried]
    lower = errors[1] < errors[0]
    assert 0.2 < lower.mean() < 0.8
    elements = np.where(lower[..., None], tried[1][0], tried[0][0])
    assert_quantized(found, elements.reshape(x.shape), np.where(lower, tried[1][1], tried[0][1]))


def test_four_over_six_holds_quarters_that_six_cannot():
    """1, 2, 3, 4 times 16 lie on the grid with 4 at the top; with 6 there, 3 becomes 4.5."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(4)[None] * 2.0**4
    assert torch.equal(round_blocks(x, "nvfp4_4over6"), x)
    assert round_blocks(x, "nvfp4")[0, 2] != x[0, 2]
    # a value alone is exact by either scale, and stays at 6
    alone = torch.zeros(1, 16)
    alone[0, 5] = -3.0
    assert quantize(alone, "nvfp4_4over6").elements[0, 5] == -6


@pytest.mark.parametrize("name", ["deepseek_128x128", "nvfp4_16x16"])
def test_a_square_block_has_one_scale(name):
    recipe = BLOCK_RECIPES[name]
    size = recipe.block[0]
    x = draw(2, 2 * size, 3 * size, spread=2)
    found = quantize(x, name)
    assert found.scales.shape == (2, 2, 3)
    # a block laid out as one row has the same amax, so the same scale and elements
    blocks = x.unflatten(2, (3, size)).unflatten(1, (2, size)).transpose(2, 3)
    row = replace(recipe, block=(1, size * size))
    flat = quantize(blocks.flatten(3).flatten(0, 1).flatten(1), row)
    assert torch.equal(flat.scales.flatten(), found.scales.flatten())
    back = flat.elements.reshape(2, 2, 3, size, size).transpose(2, 3).reshape(x.shape)
    assert torch.equal(back, found.elements)


def test_a_row_and_a_tensor_have_one_scale_each():
    x = draw(3, 5, 40)
    by_row, whole = quantize(x, "fp8_per_row"), quantize(x, "fp8_per_tensor")
    assert torch.equal(by_row.scales[..., 0], x.abs().amax(-1) / 448)
    assert whole.scales.shape == (1, 1, 1)
    assert whole.scales.item() == x.abs().max().item() / np.float32(448)
    assert by_row.elements.abs().amax(-1).eq(448).all()


@pytest.mark.parametrize("name", [*BLOCK_RECIPES, "mxfp4-even"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_elements_and_scales_are_on_their_grids_in_the_dtype_of_the_tensor(name, dtype):
    recipe = recipe_named(name)
    x = draw(2, 128, 128, spread=2).to(dtype)
    found = quantize(x, name)
    assert found.elements.dtype == dequantize(found).dtype == dtype
    assert torch.equal(round_to(found.elements.double(), recipe.elements), found.elements.double())
    scales = found.scales.double()
    on_grid = {"e8m0": torch.exp2(scales.log2().round()), "fp32": scales.float().double()}
    assert torch.equal(on_grid.get(recipe.scales, round_to(scales, "e4m3")), scales)
    restored = round_blocks(x, name).double()
    assert (restored - x.double()).norm() < 0.15 * x.double().norm()


@pytest.mark.parametrize("name", ONE_ROW)
def test_another_axis_is_the_last_one_of_the_transpose(name):
    x = draw(128, 3, 20)
    found, moved = quantize(x, name, axis=0), quantize(x.movedim(0, -1), name)
    assert torch.equal(found.elements, moved.elements.movedim(-1, 0))
    assert torch.equal(found.scales, moved.scales.movedim(-1, 0))
    assert torch.equal(dequantize(found), dequantize(moved).movedim(-1, 0))


def test_random_bits_go_with_their_value_along_another_axis():
    x, bits = (
        draw(32, 20),
        torch.randint(0, 2**32, (32, 20), generator=torch.Generator().manual_seed(0)),
    )
    found = quantize(x, "mxfp4", axis=0, rounding="stochastic", bits=bits)
    turned = quantize(x.T, "mxfp4", rounding="stochastic", bits=bits.T)
    assert torch.equal(found.elements, turned.elements.T)


@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
def test_a_power_of_two_in_fp32_goes_below_those_of_e8m0(rule):
    mx = replace(BLOCK_RECIPES["mxfp8"], rule=rule)
    fp32 = replace(mx, scales="fp32")
    x = draw(4, 64)
    assert torch.equal(quantize(x, fp32).scales, quantize(x, mx).scales)
    tiny = torch.zeros(2, 32)
    tiny[0, 3] = 2.0**-130
    assert quantize(tiny, fp32).scales.tolist() == [[2.0**-138], [1.0]]
    assert quantize(tiny, mx).scales.tolist() == [[2.0**-127], [2.0**-127]]


def test_rows_of_a_block_run_along_the_axis_before():
    x = draw(16, 32)
    found, turned = quantize(x, "nvfp4_16x16"), quantize(x.T, "nvfp4_16x16", axis=0)
    assert found.scales.shape == (1, 2)
    assert torch.equal(turned.scales, found.scales.T)


@pytest.mark.parametrize("name", [*ONE_ROW, "nvfp4_16x16", "deepseek_128x128"])
def test_a_partial_block_is_one_filled_up_with_zeros(name):
    rows, columns = BLOCK_RECIPES[name].block
    height, width = (1 if rows == 1 else rows + 3), columns + 5
    x = draw(2, height, width, spread=2)
    full = torch.nn.functional.pad(x, (0, -width % columns, 0, -height % rows))
    found, filled = quantize(x, name, partial=True), quantize(full, name)
    assert torch.equal(found.scales, filled.scales)
    assert torch.equal(found.elements, filled.elements[:, :height, :width])
    assert torch.equal(dequantize(found), dequantize(filled)[:, :height, :width])


@pytest.mark.parametrize("name", BLOCK_RECIPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(name, bad):
    """A scale of the whole tensor is that of every block."""
    recipe = BLOCK_RECIPES[name]
    x = draw(256, 256, spread=2)
    clean = round_blocks(x, name)
    x[3, 5] = bad
    found = quantize(x, name)
    restored = dequantize(found)
    if recipe.block == "tensor" or recipe.largest_scale:
        assert restored.isnan().all()
        return
    rows, columns = (1, 256) if recipe.block == "row" else recipe.block
    hit = torch.zeros(256, 256, dtype=torch.bool)
    first = 3 - 3 % rows
    hit[first : first + rows, :columns] = True
    assert restored[hit].isnan().all()
    assert torch.equal(restored[~hit], clean[~hit])
    assert found.scales.isnan().sum() == 1


@pytest.mark.parametrize("name", BLOCK_RECIPES)
def test_zeros_stay_zeros_and_scales_finite(name):
    found = quantize(torch.zeros(128, 128), name)
    assert found.scales.isfinite().all()
    assert not found.elements.any()
    assert not dequantize(found).any()


@pytest.mark.parametrize("name", MX)
def test_the_smallest_blocks_fit_their_scale(name):
    """torchao divides by 2**-126 where the scale says 2**-127, and loses a factor of two."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([2.0**-128, -(2.0**-128)])
    found = quantize(x, name)
    assert found.scales.item() == 2.0**-127
    assert torch.equal(dequantize(found), x)


blocks = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32
)


@settings(max_examples=60)
@given(blocks, st.sampled_from(MX))
def test_rounding_a_block_twice_is_rounding_it_once(values, name):
    once = round_blocks(torch.tensor(values), name)
    assert torch.equal(round_blocks(once, name), once)


@settings(max_examples=60)
@given(blocks, st.sampled_from([*MX_RULES, "fp8_per_row"]))
def test_a_block_keeps_signs_and_order(values, name):
    x = torch.tensor(values).sort().values
    found = quantize(x, name)
    assert (found.elements.diff() >= 0).all()
    turned = quantize(-x, name)
    assert torch.equal(turned.elements, -found.elements)
    assert torch.equal(turned.scales, found.scales)


@settings(max_examples=60)
@given(blocks, st.sampled_from(MX_RULES))
def test_no_rule_but_floor_and_even_cuts_the_largest_value_by_more_than_a_rounding(values, name):
    x = torch.tensor(values, dtype=torch.float64)
    recipe = recipe_named(name)
    found = quantize(x, name)
    error = (found.elements * found.scales - x).abs().amax()
    step = found.scales.item() * 2.0 ** (recipe.format.max_exponent - recipe.format.mantissa_bits)
    cut = max(x.abs().amax().item() - recipe.format.max_value * found.scales.item(), 0.0)
    assert error.item() <= max(step / 2, cut) * (1 + 1e-12)
    if recipe.rule in ("ceil", "rceil") and found.scales.item() < 2.0**127:
        assert cut <= step / 2


@settings(max_examples=40)
@given(st.integers(-60, 60), st.sampled_from([*MX_RULES, *ONE_ROW]))
def test_a_power_of_two_moves_into_the_scales(power, name):
    x = draw(2, 128, seed=power + 60, spread=2)
    found, moved = quantize(x, name), quantize(x * 2.0**power, name)
    assert torch.equal(moved.elements, found.elements)
    assert torch.equal(dequantize(moved), dequantize(found) * 2.0**power)


def test_stochastic_rounding_keeps_the_mean_of_a_block():
    x = draw(1, 32, spread=0)
    x[0, 0] = 4.0  # a power of two, so nothing saturates under floor
    draws = torch.stack(
        [round_blocks(x, "mxfp4", rounding="stochastic", seed=s) for s in range(400)]
    )
    # a spacing is at most 2 here; the mean of 400 draws has a standard error of at most 1 / 20
    assert (draws.mean(0) - x).abs().max() < 5 / 20
    assert draws.std(0).max() > 0.1
    again = round_blocks(x, "mxfp4", rounding="stochastic", seed=0)
    assert torch.equal(again, draws[0])


def test_a_rotation_spreads_an_outlier_and_is_taken_back():
    rotating = replace(BLOCK_RECIPES["nvfp4"], rotation=16)
    x = torch.zeros(2, 64)
    x[:, 7] = 8.0
    found = quantize(x, rotating, seed=3)
    assert (found.elements[:, :16].abs() == 6).all()
    assert torch.allclose(dequantize(found), x, atol=0.3)
    # two operands in the same rotation have their own product
    fine = replace(rotating, elements="e8m18", block="row", scales="fp32", largest_scale=0.0)
    q, k = draw(4, 64, seed=1), draw(5, 64, seed=2)
    one, other = (quantize(y, fine, seed=3) for y in (q, k))
    product = (one.elements * one.scales) @ (other.elements * other.scales).T
    assert torch.allclose(product, q @ k.T, rtol=1e-3, atol=1e-3 * product.abs().max().item())
    assert not torch.equal(quantize(q, fine, seed=4).elements, one.elements)


def test_the_tensor_is_not_written_to():
    for name in BLOCK_RECIPES:
        x = draw(128, 128)
        before = x.clone()
        round_blocks(x, name)
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("shape", "name", "axis", "message"),
    [
        ((4, 40), "mxfp8", -1, r"axis must be a multiple of 32 for mxfp8, got 40; pass partial="),
        ((40, 64), "deepseek_128x128", -1, r"multiple of 128 for deepseek_128x128, got 64"),
        ((40, 128), "deepseek_128x128", -1, r"axis before it must be a multiple of 128 .*got 40"),
        ((32,), "nvfp4_16x16", -1, r"at least 2 axes for nvfp4_16x16, got shape \(32,\)"),
        ((0, 32), "mxfp8", -1, r"x must hold values along axis -1 .*got shape \(0, 32\)"),
        ((4, 32), "mxfp8", 2, r"x must hold values along axis 2"),
        ((), "mxfp8", -1, r"x must hold values along axis -1 and have at least 1 axes"),
        (
            (4, 32),
            replace(BLOCK_RECIPES["mxfp8"], rotation=64),
            -1,
            r"64, the size of the rotation",
        ),
    ],
)
def test_a_tensor_that_has_no_such_blocks_is_refused(shape, name, axis, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(shape), name, axis)


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"quantize: x must be float64, .*got torch.int32"):
        quantize(torch.ones(32, dtype=torch.int32), "mxfp8")
