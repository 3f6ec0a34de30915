"""The twin's forward: exact at FP64, inside flash-attn's budget below, live at every point."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.testing import HARD_SHAPES, Shape, assert_within_budget, make_qkv

FLASH_ATTN_SHAPES = [
    Shape(1, 2, 2, 113, 203, 32),
    Shape(1, 2, 1, 128, 217, 40),
    Shape(1, 2, 2, 113, 211, 59),
    Shape(1, 2, 1, 108, 256, 96),
    Shape(1, 2, 2, 256, 512, 64),
    Shape(1, 2, 1, 512, 256, 111),
    Shape(1, 1, 1, 1023, 1024, 128),
    Shape(1, 1, 1, 1024, 1023, 256),
]
"""Lengths and head dims of flash-attn's tests/test_flash_attn.py, about half of its pairs."""

FORWARD_POINTS = [
    *("operands", "products", "scores", "statistics", "exponents", "summands", "probabilities"),
    *("rescaled_accumulator", "block_output", "accumulator", "output"),
]


def draw(shape, dtype, seed=0, **law):
    return make_qkv(shape, dtype, torch.Generator().manual_seed(seed), **law)


def twin(q, k, v, profile="fa2", causal=False, scale=None, **changes):
    numerics = PROFILES[profile].with_(**changes)
    return flash_attention(q, k, v, causal=causal, scale=scale, numerics=numerics, engine="twin")


def rmse(x, golden):
    return (x.double() - golden).square().mean().sqrt().item()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
def test_with_every_point_at_fp64_the_twin_is_the_golden(shape, causal):
    q, k, v = draw(shape, torch.float64)
    golden = golden_attention(q, k, v, causal=causal)
    for tiles in ({}, {"block_q": 16, "block_k": 128}, {"block_q": 128, "block_k": 32}):
        out = twin(q, k, v, "golden", causal, **tiles)
        assert (out - golden).norm() <= 1e-13 * golden.norm()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", FLASH_ATTN_SHAPES, ids=str)
def test_fa2_errs_at_most_twice_as_much_as_plain_attention(shape, dtype, causal):
    q, k, v = draw(shape, dtype)
    golden = golden_attention(q, k, v, causal=causal)
    baseline = baseline_attention(q, k, v, causal=causal)
    assert_within_budget(twin(q, k, v, causal=causal), baseline, golden, factor=2, what="out")


def test_lse_is_the_log_sum_exp_of_the_scores():
    q, k, v = draw(Shape(1, 2, 2, 65, 130, 40), torch.float64)
    _, lse = flash_attention(q, k, v, numerics=PROFILES["golden"], engine="twin", return_lse=True)
    expected = torch.logsumexp(q @ k.mT / 40**0.5, dim=-1)
    torch.testing.assert_close(lse, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("point", FORWARD_POINTS)
def test_each_forward_point_moves_the_output(point):
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40), torch.float64)
    exact = twin(q, k, v, "golden")
    lowered = twin(q, k, v, "golden", **{point: "bf16"})
    # One BF16 rounding is 2**-9 of what it rounds; anything above FP32 noise shows it happened.
    assert (lowered - exact).abs().max() > 1e-6


def test_the_lse_point_moves_lse_alone():
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40), torch.float64)
    results = {}
    for format in ("fp64", "bf16"):
        numerics = PROFILES["golden"].with_(lse=format)
        results[format] = flash_attention(
            q, k, v, numerics=numerics, engine="twin", return_lse=True
        )
    assert torch.equal(results["bf16"].out, results["fp64"].out)
    assert torch.equal(results["bf16"].lse, results["fp64"].lse.bfloat16().double())


def test_the_running_sum_adds_what_statistics_rounded_not_what_probabilities_did():
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40), torch.float64)
    numerics = PROFILES["golden"]
    _, exact = flash_attention(q, k, v, numerics=numerics, engine="twin", return_lse=True)
    numerics = numerics.with_(probabilities="bf16")
    _, lowered = flash_attention(q, k, v, numerics=numerics, engine="twin", return_lse=True)
    assert torch.equal(lowered, exact)


def test_every_value_of_all_bf16_lies_on_the_bf16_grid():
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40), torch.float32)
    out, lse = flash_attention(
        q, k, v, numerics=PROFILES["all_bf16"], engine="twin", return_lse=True
    )
    for x in (out, lse):
        assert torch.equal(x, x.bfloat16().float())


def test_one_key_block_of_all_bf16_is_the_recurrence_written_out():
    q, k, v = draw(Shape(1, 1, 1, 16, 16, 64), torch.bfloat16)

    def bf16(x):
        return x.bfloat16().float()

    scores = bf16(q.float() @ k.float().mT / 8)
    p = bf16(torch.exp(scores - scores.amax(-1, keepdim=True)))
    out = bf16(bf16(p @ v.float()) / bf16(p.sum(-1, keepdim=True)))
    assert torch.equal(twin(q, k, v, "all_bf16").float(), out)


def test_lower_statistics_and_accumulator_err_more_against_the_golden():
    q, k, v = draw(Shape(1, 4, 4, 512, 512, 64), torch.bfloat16)
    golden = golden_attention(q, k, v)
    assert rmse(twin(q, k, v, "all_bf16"), golden) > 2 * rmse(twin(q, k, v, "fa2"), golden)


def test_swapping_the_sides_of_a_square_tile_is_the_identity_and_of_another_is_not():
    q, k, v = draw(Shape(1, 2, 2, 256, 256, 64), torch.bfloat16)
    tall = twin(q, k, v, "all_bf16", block_q=128, block_k=32)
    wide = twin(q, k, v, "all_bf16", block_q=32, block_k=128)
    golden = golden_attention(q, k, v)
    assert not torch.equal(tall, wide)
    assert rmse(wide, golden) < rmse(tall, golden)  # larger key blocks round acc less often


def test_block_q_alone_moves_additions_only():
    q, k, v = draw(Shape(1, 2, 2, 256, 256, 64), torch.float64)
    tall, flat = (twin(q, k, v, "golden", block_q=rows) for rows in (256, 16))
    torch.testing.assert_close(tall, flat, rtol=1e-13, atol=1e-13)


def test_fa2_at_fp16_reaches_table_3_of_flash_attention_3():
    # 1.9e-4 for FA2 needs unit scale: with 1/sqrt(head_dim) it is 4e-5. The published baseline,
    # 3.2e-4, rounds each step of softmax to FP16 and keeps the scores wider: with FP16 scores it
    # would be 1.3e-3. Rounding softmax once falls between the two.
    q, k, v = draw(Shape(1, 4, 4, 512, 512, 64), torch.float16, seed=5, outliers=True)
    golden = golden_attention(q, k, v, scale=1.0)

    def fp16(x):
        return x.half().float()

    scores = q.float() @ k.float().mT
    p = fp16(torch.exp(scores - scores.amax(-1, keepdim=True)))
    published = fp16(fp16(p / fp16(p.sum(-1, keepdim=True))) @ v.float())
    wide = BASELINE_PROFILES["fp16_softmax"]
    ours = baseline_attention(q, k, v, scale=1.0, numerics=wide)
    once = baseline_attention(q, k, v, scale=1.0, numerics=wide.with_(softmax_rounding="once"))
    fa2 = twin(q, k, v, scale=1.0)
    assert rmse(fa2, golden) == pytest.approx(1.9e-4, rel=0.35)
    assert rmse(published, golden) == pytest.approx(3.2e-4, rel=0.35)
    assert rmse(ours, golden) == pytest.approx(rmse(published, golden), rel=0.02)
    assert rmse(fa2, golden) < rmse(once, golden) < rmse(published, golden)


@settings(max_examples=20)
@given(data=st.data(), causal=st.booleans())
def test_permuting_batch_and_heads_permutes_the_output(data, causal):
    q, k, v = draw(Shape(3, 4, 4, 20, 33, 16), torch.bfloat16)
    batch = data.draw(st.permutations(range(3)))
    heads = data.draw(st.permutations(range(4)))
    moved = twin(*(x[batch][:, heads] for x in (q, k, v)), causal=causal)
    assert torch.equal(moved, twin(q, k, v, causal=causal)[batch][:, heads])


def test_a_group_shares_its_key_head_as_if_it_were_repeated():
    q, k, v = draw(Shape(2, 6, 2, 33, 65, 40), torch.bfloat16)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    assert torch.equal(twin(q, k, v), twin(q, *repeated))


def test_rows_that_attend_nothing_give_zero_and_minus_infinity():
    q, k, v = draw(Shape(1, 2, 1, 70, 5, 16), torch.bfloat16)
    out, lse = flash_attention(q, k, v, causal=True, engine="twin", return_lse=True)
    assert not out[:, :, :65].any()
    assert torch.equal(lse[:, :, :65], torch.full((1, 2, 65), -torch.inf))
    assert out.isfinite().all()
    assert lse[:, :, 65:].isfinite().all()
