"""The twin's gradients: exact at FP64, inside flash-attn's budget below, live at every point."""

from dataclasses import fields
from functools import partial

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.points import BackwardNumerics, ForwardNumerics
from attention_kernels.testing import (
    HARD_SHAPES,
    Shape,
    assert_within_budget,
    make_qkv,
    with_gradients,
)

GRADIENTS = ("dq", "dk", "dv")

FLASH_ATTN_SHAPES = [
    Shape(1, 2, 1, 113, 203, 40),
    Shape(1, 2, 2, 108, 256, 96),
    Shape(1, 2, 1, 512, 256, 64),
    Shape(1, 1, 1, 1023, 1024, 32),
]
"""Lengths and head dims of flash-attn's tests/test_flash_attn.py."""

MOVED_BY = {
    "operands": "dq dk dv",
    "products": "dq dk dv",
    "scores": "dq dk dv",
    "statistics": "dq dk dv",
    "exponents": "dq dk dv",
    "summands": "dq dk dv",
    "probabilities": "dq dk dv",
    "rescaled_accumulator": "dq dk",
    "block_output": "dq dk",
    "accumulator": "dq dk",
    "output": "dq dk",
    "lse": "dq dk dv",
    "delta_products": "dq dk",
    "delta": "dq dk",
    "dp": "dq dk",
    "ds_factors": "dq dk",
    "ds": "dq dk",
    "gradient_products": "dq dk dv",
    "dq_accumulator": "dq",
    "dkv_accumulator": "dk dv",
    "gradients": "dq dk dv",
}
"""The gradients each rounding point reaches. Statistics and probabilities reach dq and dk through
the rounded out as well, accumulator and output through delta alone.
"""


def draw(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


def twin(profile="fa2", **changes):
    return partial(flash_attention, numerics=PROFILES[profile].with_(**changes), engine="twin")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
def test_with_every_point_at_fp64_the_gradients_are_the_goldens(shape, causal):
    q, k, v, dout = draw(shape, torch.float64)
    golden = with_gradients(golden_attention, q, k, v, dout, causal=causal)
    # With one key the true dq and dk are 0: the error is held against what cancels there.
    floor = dout.norm() * v.norm() * (q.norm() + k.norm()) if shape.key_len == 1 else 0.0
    for tiles in ({}, {"block_q": 16, "block_k": 128}, {"block_q": 128, "block_k": 32}):
        ours = with_gradients(twin("golden", **tiles), q, k, v, dout, causal=causal)
        for name in GRADIENTS:
            error = (ours[name] - golden[name]).norm()
            assert error <= 1e-13 * (golden[name].norm() + floor), name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", FLASH_ATTN_SHAPES, ids=str)
def test_fa2_gradients_err_at_most_three_times_as_much_as_plain_attention(shape, dtype, causal):
    inputs = draw(shape, dtype)
    wide = (x.double() for x in inputs)
    golden = with_gradients(golden_attention, *wide, causal=causal)
    baseline = with_gradients(baseline_attention, *inputs, causal=causal)
    ours = with_gradients(twin(), *inputs, causal=causal)
    for name in GRADIENTS:
        assert_within_budget(ours[name], baseline[name], golden[name], factor=3, what=name)


def test_every_rounding_point_is_listed():
    points = [f.name for group in (ForwardNumerics, BackwardNumerics) for f in fields(group)]
    assert list(MOVED_BY) == points


@pytest.mark.parametrize("point", MOVED_BY)
def test_each_point_moves_exactly_the_gradients_it_reaches(point):
    inputs = draw(Shape(1, 4, 2, 130, 130, 40), torch.float64)
    exact = with_gradients(twin("golden"), *inputs, causal=True)
    moved = with_gradients(twin("golden", **{point: "bf16"}), *inputs, causal=True)
    for name in GRADIENTS:
        distance = (moved[name] - exact[name]).abs().max().item()
        if name in MOVED_BY[point].split():
            assert distance > 1e-6, name
        else:
            assert distance == 0.0, name


def test_all_bf16_gradients_err_more_than_fa2():
    inputs = draw(Shape(1, 2, 2, 256, 256, 64), torch.bfloat16)
    golden = with_gradients(golden_attention, *(x.double() for x in inputs))
    errors = {}
    for profile in ("fa2", "all_bf16"):
        ours = with_gradients(twin(profile), *inputs)
        errors[profile] = {n: (ours[n].double() - golden[n]).norm().item() for n in GRADIENTS}
    for name in GRADIENTS:
        assert errors["all_bf16"][name] > 1.5 * errors["fa2"][name], name


def test_delta_reads_the_output_that_was_stored():
    q, k, v, dout = draw(Shape(1, 1, 1, 64, 64, 16), torch.float32)
    numerics = PROFILES["fa2"].with_(output="bf16")
    ours = with_gradients(partial(flash_attention, numerics=numerics), q, k, v, dout)
    stored = golden_attention(q, k, v).float().bfloat16().double()
    p = torch.softmax(q.double() @ k.double().mT / 4, dim=-1)
    dp = dout.double() @ v.double().mT
    delta = (dout.double() * stored).sum(-1, keepdim=True)
    dq = p * (dp - delta) @ k.double() / 4
    # FP32 elsewhere; with the unrounded out dq would be 2**-9 * |out| off.
    torch.testing.assert_close(ours["dq"].double(), dq, rtol=1e-4, atol=1e-5)


def test_group_gradients_are_the_sum_over_the_heads_of_the_group():
    q, k, v, dout = draw(Shape(2, 6, 2, 33, 65, 40), torch.float64)
    # a power of two, which rounds nothing, whether heads are added before or after it
    shared = with_gradients(twin("golden"), q, k, v, dout, scale=0.125)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    apart = with_gradients(twin("golden"), q, *repeated, dout, scale=0.125)
    assert torch.equal(shared["dq"], apart["dq"])
    for name in ("dk", "dv"):
        assert torch.equal(shared[name], apart[name].unflatten(1, (2, 3)).sum(dim=2))


# Blocks of fa3_fp8 have factors of their own, and the two calls cut them elsewhere.
@pytest.mark.parametrize("profile", [p for p in PROFILES if "fp8" not in p])
def test_rows_that_attend_nothing_give_zero_gradients(profile):
    q, k, v, dout = draw(Shape(1, 2, 1, 70, 5, 16), torch.bfloat16)
    dead = with_gradients(twin(profile), q, k, v, dout, causal=True)
    live = with_gradients(twin(profile), q[:, :, 65:], k, v, dout[:, :, 65:], causal=True)
    assert not dead["dq"][:, :, :65].any()
    for name in ("dk", "dv"):
        torch.testing.assert_close(dead[name], live[name], rtol=2**-7, atol=2**-9)
