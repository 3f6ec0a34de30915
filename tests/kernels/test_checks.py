"""Each message a user can meet names call, argument, rule, value and way out."""

import re

import pytest
import torch

from attention_kernels import (
    PROFILES,
    FlashNumerics,
    baseline_attention,
    flash_attention,
    golden_attention,
)

CALLS = [flash_attention, baseline_attention, golden_attention]


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q = zeros(2, 4, 8, 32)

BAD_TENSORS = {
    "not a tensor": (
        ([1.0], Q, Q),
        "q must be a tensor, got list; pass a torch.Tensor",
    ),
    "two axes": (
        (Q, zeros(8, 32), Q),
        "k must be (batch, heads, length, head_dim), or packed (total_tokens, heads, head_dim), "
        "with no empty axis, got (8, 32); add the missing axes or drop the empty batch",
    ),
    "packed beside a batch": (
        (Q, zeros(4, 8, 32), zeros(4, 8, 32)),
        "k must be of q's batch and head_dim 32, got q (2, 4, 8, 32), k (4, 8, 32), v (4, 8, 32)",
    ),
    "an empty axis": (
        (Q, Q, zeros(2, 4, 0, 32)),
        "v must be (batch, heads, length, head_dim), or packed (total_tokens, heads, head_dim), "
        "with no empty axis, got (2, 4, 0, 32); add",
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
        "k must be of q's batch and head_dim 32, got q (2, 4, 8, 32), k (1, 4, 8, 32)",
    ),
    "another head_dim": (
        (Q, zeros(2, 4, 8, 16), zeros(2, 4, 8, 16)),
        "k must be of q's batch and head_dim 32, got q (2, 4, 8, 32), k (2, 4, 8, 16)",
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


def test_an_unknown_engine_is_answered_with_the_nearest():
    message = "resolve_engine: engine must be one of auto, twin, triton, got 'tritn'; nearest: trit"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(Q, Q, Q, engine="tritn")


def test_numerics_of_another_kind_are_refused():
    message = "flash_attention: numerics must be a FlashNumerics, got 'fa2'; take one of PROFILES"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(Q, Q, Q, numerics="fa2")  # pyright: ignore[reportArgumentType]
    message = "baseline_attention: numerics must be a BaselineNumerics, got FlashNumerics("
    with pytest.raises(ValueError, match=re.escape(message)):
        baseline_attention(Q, Q, Q, numerics=PROFILES["fa2"])  # pyright: ignore[reportArgumentType]


BAD_NUMERICS = {
    "beta below 1": (
        {"repeated_max_beta": 0.5},
        "Softmax: repeated_max_beta must be a finite number of at least 1, got 0.5",
    ),
    "no split": ({"splits": 0}, "Tiling: splits must be an integer from 1 to 256, got 0"),
    "splits with key_outer": (
        {"splits": 2, "loop_order": "key_outer"},
        "Tiling: splits must be 1 with loop_order 'key_outer', got 2",
    ),
    "threshold with key_outer": (
        {"rescale_threshold": 8.0, "loop_order": "key_outer"},
        "FlashNumerics: rescale_threshold must be 0 with loop_order 'key_outer', got 8.0",
    ),
    "threshold with fp8": (
        {"rescale_threshold": 8.0, "probabilities": "e4m3", "scaling": "per_block"},
        "FlashNumerics: rescale_threshold must keep P within probabilities 'e4m3', whose largest "
        "value is 448, got 8.0, where P reaches 65536; use 0",
    ),
    "unknown field": ({"block": 64}, "FlashNumerics.with_: no field 'block'; nearest: block_"),
    "unknown format": ({"scores": "fp17"}, "ForwardNumerics: scores must be a format, got 'fp17'"),
    "unknown rounding": (
        {"rounding": "nearest"},
        "Arithmetic: rounding must be one of nearest_even, nearest_away, toward_zero, away",
    ),
}


@pytest.mark.parametrize("case", BAD_NUMERICS)
def test_numerics_that_contradict_themselves_are_refused_when_they_are_made(case):
    changes, message = BAD_NUMERICS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        FlashNumerics().with_(**changes)


@pytest.mark.parametrize("dot", ["tf32", "tf32x3"])
@pytest.mark.parametrize("case", ["input", "a point"])
def test_tf32_products_are_refused_where_the_work_format_is_fp64(case, dot):
    q = Q.double() if case == "input" else Q
    numerics = FlashNumerics().with_(dot=dot, scores="fp32" if case == "input" else "fp64")
    message = f"FlashNumerics: dot must be 'ieee' where the work format is FP64, got '{dot}'; name"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(q, q, q, numerics=numerics)


def test_a_threshold_that_the_format_of_the_input_cannot_hold_is_refused_in_the_call():
    numerics = FlashNumerics().with_(rescale_threshold=16.0)
    assert flash_attention(Q.bfloat16(), Q.bfloat16(), Q.bfloat16(), numerics=numerics).sum() == 0
    message = "rescale_threshold must keep P within probabilities 'fp16', whose largest value is"
    with pytest.raises(ValueError, match=message):
        flash_attention(Q.half(), Q.half(), Q.half(), numerics=numerics)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_values_that_are_not_finite_are_refused_where_they_are_scaled(which, bad):
    tensors = [Q.clone() for _ in range(3)]
    tensors[which][1, 2, 3, 4] = bad
    name = "qkv"[which]
    with pytest.raises(ValueError, match=f"flash_attention: {name} must be finite when its scal"):
        flash_attention(*tensors, numerics=PROFILES["fa3_fp8"])
    flash_attention(*tensors)


def test_a_gradient_that_is_not_finite_is_refused_where_it_is_scaled():
    q = torch.ones(1, 1, 4, 16, requires_grad=True)
    out = flash_attention(q, q, q, numerics=PROFILES["fa3_fp8"])
    with pytest.raises(ValueError, match="flash_attention: dout must be finite when its scaling"):
        out.backward(torch.full_like(out, torch.nan))


@pytest.mark.parametrize("head_dim", [16, 17, 256])
def test_the_edges_of_head_dim_are_served(head_dim):
    q = torch.ones(1, 1, 3, head_dim)
    for call in CALLS:
        torch.testing.assert_close(call(q, q, q).float(), q)
