"""Operands are on the grid of their format, fill its range, and keep q k^T when rotated."""

import pytest
import torch

from attention_kernels import PROFILES, FlashNumerics, round_to
from attention_kernels.formats import FORMATS, format_named
from attention_kernels.operands import prepare, rotate_back

FP8 = PROFILES["fa3_fp8"].with_(block_q=16, block_k=16)
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numerics(dtype=torch.float32, **changes):
    return FlashNumerics().with_(**changes).resolve(dtype)


def scales_by_row(operand, block):
    rows = operand.values.shape[2]
    return operand.scales.repeat_interleave(block, dim=2)[:, :, :rows, None]


@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 111, 256])
def test_the_rotation_is_orthogonal_and_keeps_q_k(head_dim):
    rotating = numerics(torch.float64, incoherent=True, operands="fp64")
    q, k = (draw(1, 2, 9, head_dim, dtype=torch.float64, seed=seed) for seed in (0, 1))
    rotated_q, rotated_k = (prepare(x, x_name, rotating, 64) for x, x_name in ((q, "q"), (k, "k")))
    assert (rotated_q.values - q).abs().max() > 0.1
    torch.testing.assert_close(
        rotated_q.values @ rotated_k.values.mT, q @ k.mT, rtol=1e-14, atol=1e-14 * head_dim
    )
    eye = torch.eye(head_dim, dtype=torch.float64).expand(1, 1, -1, -1)
    matrix = prepare(eye, "q", rotating, 64).values
    torch.testing.assert_close(matrix @ matrix.mT, eye, rtol=0, atol=1e-14)


def test_rotating_back_is_the_transpose_and_nothing_without_a_rotation():
    rotating = numerics(torch.float64, incoherent=True, operands="fp64")
    x, y = (draw(1, 2, 9, 40, dtype=torch.float64, seed=seed) for seed in (0, 1))
    rotated = prepare(x, "q", rotating, 64).values
    torch.testing.assert_close(rotate_back(rotated, rotating), x, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close((rotated * y).sum(), (x * rotate_back(y, rotating)).sum())
    assert rotate_back(x, numerics(torch.float64)) is x


def test_the_rotation_spreads_an_outlier():
    x = torch.zeros(1, 1, 1, 64)
    x[..., 7] = 1.0
    values = prepare(x, "q", numerics(incoherent=True), 64).values
    assert torch.equal(values.abs(), torch.full_like(values, 1 / 8))


def test_the_seed_decides_the_signs_and_v_and_dout_are_never_rotated():
    x = draw(1, 1, 5, 32)
    rotated = [prepare(x, "q", numerics(incoherent=True, seed=s), 64).values for s in (0, 0, 1)]
    assert torch.equal(rotated[0], rotated[1])
    assert not torch.equal(rotated[0], rotated[2])
    for name in ("v", "dout"):
        assert prepare(x, name, numerics(incoherent=True), 64).values is x


@pytest.mark.parametrize("length", [16, 37])
@pytest.mark.parametrize("rounding", ["nearest_even", "away"])
@pytest.mark.parametrize("scaling", ["per_tensor", "per_block"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "fp16", "e3m2"])
def test_scales_bring_the_largest_magnitude_onto_the_largest_value(
    format, scaling, rounding, length
):
    x = draw(2, 30, length, 40) * 10 ** draw(2, 30, length, 1, seed=1)
    scaled = numerics(operands=format, scaling=scaling, rounding=rounding)
    operand = prepare(x, "k", scaled, 16)
    largest = format_named(format).max_value
    assert operand.scales.shape == (2, 30, -(-length // 16))
    assert operand.scales.dtype == torch.float32
    rows = 16 if scaling == "per_block" else length
    for part, scaled in zip(x.split(rows, 2), operand.values.double().split(rows, 2), strict=True):
        peaks, at = part.abs().flatten(2).max(-1)
        found = scaled.abs().flatten(2).gather(-1, at.unsqueeze(-1)).squeeze(-1)
        assert (found == largest).all()
        assert (scaled.abs() <= largest).all()
        assert (peaks > 0).all()
    if scaling == "per_tensor":
        assert (operand.scales == operand.scales[:, :, :1]).all()
    restored = operand.values.double() * scales_by_row(operand, 16)
    step = 2.0 ** -format_named(format).mantissa_bits
    tiny = 2.0 ** (format_named(format).min_exponent - format_named(format).mantissa_bits)
    allowed = (x.abs() * step).maximum(scales_by_row(operand, 16) * tiny)
    assert ((restored - x).abs() <= allowed).all()


def test_blocks_of_zeros_have_a_scale_of_one():
    x = draw(1, 1, 48, 16)
    x[:, :, 16:32] = 0
    operand = prepare(x, "v", numerics(operands="e4m3", scaling="per_block"), 16)
    assert operand.scales[0, 0, 1] == 1
    assert (operand.scales[0, 0, ::2] != 1).all()
    assert not operand.values[:, :, 16:32].any()
    assert operand.values.isfinite().all()


def test_values_too_small_for_a_scale_are_rounded_to_zero():
    x = torch.tensor([1.0, 0.0]).repeat(8).reshape(1, 1, 1, 16) * 2.0**-149
    operand = prepare(x, "dout", numerics(operands="e4m3", scaling="per_tensor"), 16)
    assert operand.scales.item() == 1
    assert not operand.values.any()


def test_formats_with_the_range_of_fp32_get_scales_of_one():
    # Their largest value squared is beyond FP32: products of such operands would overflow.
    x = draw(1, 2, 20, 16)
    operand = prepare(x, "q", numerics(operands="bf16", scaling="per_block"), 16)
    assert torch.equal(operand.scales, torch.ones(1, 2, 2))
    assert torch.equal(operand.values, x.bfloat16())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("scaling", ["per_tensor", "per_block"])
def test_values_that_are_not_finite_are_refused_where_they_are_scaled(scaling, name, bad):
    x = draw(1, 1, 20, 16)
    x[0, 0, 17, 3] = bad
    message = f"flash_attention: {name} must be finite when its scaling is per tensor or per block"
    with pytest.raises(ValueError, match=message + ", got NaN or infinity"):
        prepare(x, name, numerics(operands="e4m3", scaling=scaling), 16)
    assert prepare(x, name, numerics(operands="fp32"), 16).values is x


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "stochastic"])
@pytest.mark.parametrize("changes", [{}, {"scaling": "per_block"}, {"incoherent": True}], ids=str)
@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32", "e4m3", "e5m2", "e3m4", "e6m9"])
def test_values_are_on_the_grid_in_a_narrow_dtype_that_holds_it(format, changes, rounding):
    x = draw(1, 2, 20, 40, dtype=torch.float32)
    operand = prepare(x, "q", numerics(operands=format, rounding=rounding, **changes), 16)
    values = operand.values.double()
    assert torch.equal(round_to(values, format), values)
    fitting = [d for d in ("bf16", "fp16", "fp32") if format_named(format).fits(FORMATS[d])]
    assert operand.values.dtype == DTYPES[fitting[0]]


def test_a_format_that_is_the_dtype_of_the_input_stays_in_it():
    x = draw(1, 1, 5, 16, dtype=torch.bfloat16)
    operand = prepare(x, "q", numerics(torch.bfloat16, incoherent=True), 64)
    assert operand.values.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_tensor_itself_is_the_operand_where_nothing_is_done_to_it(dtype):
    x = draw(1, 1, 5, 16, dtype=dtype)
    for format in ("input", "fp64"):
        operand = prepare(x, "q", numerics(dtype, operands=format), 64)
        assert operand.values is x
        assert operand.scales is None


def test_an_fp64_input_is_rounded_once_even_where_the_work_format_is_fp32():
    # 1 + 2**-8 + 2**-40 rounds up to 1 + 2**-7 in BF16; through FP32 it would tie and become 1.
    x = torch.full((1, 1, 1, 16), 1 + 2**-8 + 2**-40, dtype=torch.float64)
    narrow = PROFILES["all_bf16"].resolve(torch.float64)
    assert narrow.work_dtype() == torch.float32
    assert (prepare(x, "q", narrow, 64).values == 1 + 2**-7).all()


def test_flushing_operands_flush_though_their_dtype_has_subnormals():
    x = torch.full((1, 1, 1, 16), 2.0**-20, dtype=torch.float16)
    assert prepare(x, "q", numerics(torch.float16), 64).values is x
    flushing = numerics(torch.float16, operands="fp16-flush")
    assert not prepare(x, "q", flushing, 64).values.any()


def test_stochastic_rounding_repeats_itself_and_differs_between_tensors_and_seeds():
    x = draw(2, 2, 20, 16)

    def values(name, seed):
        rounding = numerics(operands="e4m3", rounding="stochastic", seed=seed)
        return prepare(x, name, rounding, 16).values

    assert torch.equal(values("q", 0), values("q", 0))
    assert not torch.equal(values("q", 0), values("k", 0))
    assert not torch.equal(values("q", 0), values("q", 1))
    mean = torch.stack([values("v", seed).float() for seed in range(200)]).mean(0)
    # A spacing is at most 1/8 of the value; the mean of 200 draws has a standard error of 1/16/14.
    assert (mean - x).abs().max() < 5 / 16 / 14 * x.abs().max()


def test_the_block_of_rows_decides_which_share_a_scale():
    x = draw(1, 1, 48, 16)
    scaling = FP8.with_(incoherent=False).resolve(torch.float32)
    fine, coarse = (prepare(x, "q", scaling, block).scales for block in (16, 32))
    assert fine.shape == (1, 1, 3)
    assert torch.equal(coarse[0, 0, 0], fine[0, 0, :2].max())
    assert torch.equal(coarse[0, 0, 1], fine[0, 0, 2])
