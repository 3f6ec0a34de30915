"""Each message a user can meet names call, argument, rule, value and way out."""

import re

import pytest
import torch

from attention_kernels import baseline_attention, flash_attention, golden_attention

CALLS = [flash_attention, baseline_attention, golden_attention]


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q = zeros(2, 4, 8, 32)

BAD_TENSORS = {
    "not a tensor": (
        ([1.0], Q, Q),
        "q must be a tensor, got list; pass a torch.Tensor",
    ),
    "three axes": (
        (Q, zeros(4, 8, 32), Q),
        "k must be (batch, heads, length, head_dim) with no empty axis, got (4, 8, 32); add",
    ),
    "an empty axis": (
        (Q, Q, zeros(2, 4, 0, 32)),
        "v must be (batch, heads, length, head_dim) with no empty axis, got (2, 4, 0, 32)",
    ),
    "integers": (
        (zeros(2, 4, 8, 32, dtype=torch.int64), Q, Q),
        "q must be float64, float32, bfloat16 or float16, got torch.int64; convert it first",
    ),
    "two dtypes": (
        (Q, Q, zeros(2, 4, 8, 32, dtype=torch.bfloat16)),
        "v must be of q's dtype torch.float32, got torch.bfloat16; convert q, k and v alike",
    ),
    "two devices": (
        (Q, zeros(2, 4, 8, 32, device="meta"), Q),
        "k must be of q's device cpu, got meta; convert q, k and v alike",
    ),
    "head_dim too small": (
        (zeros(1, 1, 8, 15),) * 3,
        "head_dim must be from 16 to 256, got 15 (q (1, 1, 8, 15), k (1, 1, 8, 15), v",
    ),
    "head_dim too large": (
        (zeros(1, 1, 8, 257),) * 3,
        "head_dim must be from 16 to 256, got 257",
    ),
    "v unlike k": (
        (Q, Q, zeros(2, 4, 9, 32)),
        "v must be shaped as k, got q (2, 4, 8, 32), k (2, 4, 8, 32), v (2, 4, 9, 32); pass one",
    ),
    "another batch": (
        (Q, zeros(1, 4, 8, 32), zeros(1, 4, 8, 32)),
        "k must be of q's batch 2 and head_dim 32, got q (2, 4, 8, 32), k (1, 4, 8, 32)",
    ),
    "another head_dim": (
        (Q, zeros(2, 4, 8, 16), zeros(2, 4, 8, 16)),
        "k must be of q's batch 2 and head_dim 32, got q (2, 4, 8, 32), k (2, 4, 8, 16)",
    ),
    "heads that do not divide": (
        (Q, zeros(2, 3, 8, 32), zeros(2, 3, 8, 32)),
        "heads must be a multiple of kv_heads, got 4 and 3 (q (2, 4, 8, 32), k (2, 3, 8, 32)",
    ),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(call, case):
    tensors, message = BAD_TENSORS[case]
    with pytest.raises(ValueError, match=re.escape(f"{call.__name__}: {message}")):
        call(*tensors)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.1"])
def test_a_scale_that_is_no_finite_number_is_refused(call, scale):
    message = f"{call.__name__}: scale must be a finite number, got {scale!r}; leave it None"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Q, Q, Q, scale=scale)


def test_an_unknown_engine_is_answered_with_the_nearest():
    message = "resolve_engine: engine must be one of auto, twin, triton, got 'tritn'; nearest: trit"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(Q, Q, Q, engine="tritn")


@pytest.mark.parametrize("head_dim", [16, 17, 256])
def test_the_edges_of_head_dim_are_served(head_dim):
    q = torch.ones(1, 1, 3, head_dim)
    for call in CALLS:
        torch.testing.assert_close(call(q, q, q).float(), q)
