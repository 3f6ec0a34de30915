"""The golden is softmax(scale q k^T) v, in FP64, whatever the chunk, and small in memory."""

import subprocess
import sys

import pytest
import torch

from attention_kernels import golden, golden_attention
from attention_kernels.testing import HARD_SHAPES, Shape, make_qkv, with_gradients

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(1000) * 2**-53 = 4e-15 each, with room."""


def textbook(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        allowed = allowed.tril(k.shape[2] - q.shape[2])
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
    return torch.nan_to_num(weights) @ v


def draw(shape):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, torch.float64, generator)
    return q, k, v, torch.randn(q.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [s for s in HARD_SHAPES if s.key_len >= s.query_len], ids=str)
def test_golden_is_textbook_attention_forward_and_backward(shape, causal):
    q, k, v, dout = draw(shape)
    ours = with_gradients(golden_attention, q, k, v, dout, causal=causal)
    book = with_gradients(textbook, q, k, v, dout, causal=causal)
    for name in ours:
        scale = book[name].abs().max().item()
        torch.testing.assert_close(ours[name], book[name], rtol=0, atol=FP64_RTOL * scale)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_chunk_size_moves_the_result_by_roundings_only(monkeypatch, rows, causal):
    q, k, v, dout = draw(Shape(1, 4, 2, 65, 40, 16))
    whole = with_gradients(golden_attention, q, k, v, dout, causal=causal)
    monkeypatch.setattr(golden, "CHUNK_BYTES", 8 * 4 * 40 * rows)
    chunked = with_gradients(golden_attention, q, k, v, dout, causal=causal)
    for name in whole:
        torch.testing.assert_close(chunked[name], whole[name], rtol=FP64_RTOL, atol=FP64_RTOL)


def test_a_chunk_of_causal_rows_holds_the_budget():
    for budget, visible in ((100, 0), (100, 7), (10_000, 3), (5, 50)):
        rows = golden._chunk_rows(budget, visible, causal=True)
        assert rows * (visible + rows) <= budget or rows == 1
        assert (rows + 1) * (visible + rows + 1) > budget


def test_low_precision_inputs_give_fp64_out_and_gradients_in_their_dtype():
    q, k, v = (x.bfloat16() for x in draw(HARD_SHAPES[4])[:3])
    results = with_gradients(golden_attention, q, k, v, torch.ones_like(q))
    assert [x.dtype for x in results.values()] == [torch.float64] + 3 * [torch.bfloat16]
    assert torch.equal(results["out"], golden_attention(q.double(), k.double(), v.double()))


def test_length_8192_forward_and_backward_stay_below_2_gigabytes():
    script = """
import resource, torch
from attention_kernels import golden_attention
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 2, 8192, 16, requires_grad=True) for _ in range(3))
torch.autograd.grad(golden_attention(q, k, v).sum(), (q, k, v))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    # One T x T matrix of FP64 is 1.07 GB for the two heads: not even one is ever held.
    assert int(run.stdout) < 1.0e9
