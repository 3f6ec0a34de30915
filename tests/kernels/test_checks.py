"""Bad arguments are refused before any work, each with the message that says what to do."""

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
    "head_dim of v too small": (
        (Q, Q, zeros(2, 4, 8, 15)),
        "head_dim of v must be from 16 to 256, got 15 (q (2, 4, 8, 32), k (2, 4, 8, 32), v",
    ),
    "head_dim of v too large": (
        (Q, Q, zeros(2, 4, 8, 257)),
        "head_dim of v must be from 16 to 256, got 257",
    ),
    "head_dim too large": (
        (zeros(1, 1, 8, 257),) * 3,
        "head_dim must be from 16 to 256, got 257",
    ),
    "v unlike k": (
        (Q, Q, zeros(2, 4, 9, 32)),
        "v must be shaped as k, but for its head_dim, got q (2, 4, 8, 32), k (2, 4, 8, 32), "
        "v (2, 4, 9, 32); pass one",
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


CALLS = [flash_attention, baseline_attention, golden_attention]
Q = torch.zeros(2, 4, 8, 32)
K = torch.zeros(2, 2, 10, 32)
PACKED = torch.zeros(10, 2, 32)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_MASKS = {
    "causal that is no bool": (
        {"causal": 1},
        "causal must be true or false, got 1; pass a bool",
    ),
    "scale nan": (
        {"scale": float("nan")},
        "scale must be a finite number, got nan; leave it None for 1/sqrt(head_dim)",
    ),
    "scale inf": ({"scale": float("inf")}, "scale must be a finite number, got inf; leave"),
    "scale text": ({"scale": "0.1"}, "scale must be a finite number, got '0.1'; leave it None"),
    "scale bool": ({"scale": True}, "scale must be a finite number, got True; leave it None"),
    "softcap negative": (
        {"softcap": -1.0},
        "softcap must be a finite number of at least 0, got -1.0; leave it 0 for none",
    ),
    "softcap nan": ({"softcap": float("nan")}, "softcap must be a finite number of at least 0, g"),
    "softcap none": ({"softcap": None}, "softcap must be a finite number of at least 0, got None"),
    "dropout without a seed": (
        {"dropout_p": 0.1},
        "dropout_seed must be given where dropout_p is not 0 but 0.1, got None; pass another "
        "integer at each step and layer, or one with dropout_offset",
    ),
    "dropout of all": (
        {"dropout_p": 1.0, "dropout_seed": 1},
        "dropout_p must be a number of at least 0 and below 1 (at most 1 - 2**-32), got 1.0; leave "
        "it 0 for none",
    ),
    "dropout of nearly all": (
        {"dropout_p": 1 - 2.0**-33, "dropout_seed": 1},
        "dropout_p must be a number of at least 0 and below 1 (at most 1 - 2**-32), got 0.999",
    ),
    "dropout negative": (
        {"dropout_p": -0.1, "dropout_seed": 1},
        "dropout_p must be a number of at least 0 and below 1 (at most 1 - 2**-32), got -0.1",
    ),
    "dropout nan": ({"dropout_p": float("nan"), "dropout_seed": 1}, "(at most 1 - 2**-32), got n"),
    "dropout none": ({"dropout_p": None}, "dropout_p must be a number of at least 0 and below 1"),
    "dropout bool": ({"dropout_p": True, "dropout_seed": 1}, "(at most 1 - 2**-32), got True"),
    "dropout seed of a float": (
        {"dropout_p": 0.1, "dropout_seed": 1.0},
        "dropout_seed must be an integer from 0 to 2**63 - 1, got 1.0; pass an int, not a tensor",
    ),
    "dropout seed that is a tensor": (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(1)},
        "dropout_seed must be an integer from 0 to 2**63 - 1, got tensor(1); pass an int, not a",
    ),
    "dropout seed negative": (
        {"dropout_p": 0.0, "dropout_seed": -1},
        "dropout_seed must be an integer from 0 to 2**63 - 1, got -1",
    ),
    "dropout seed too large": (
        {"dropout_p": 0.1, "dropout_seed": 2**63},
        "dropout_seed must be an integer from 0 to 2**63 - 1, got 9223372036854775808",
    ),
    "dropout offset bool": (
        {"dropout_p": 0.1, "dropout_seed": 1, "dropout_offset": True},
        "dropout_offset must be an integer from 0 to 2**63 - 1, got True",
    ),
    "dropout offset none": (
        {"dropout_p": 0.1, "dropout_seed": 1, "dropout_offset": None},
        "dropout_offset must be an integer from 0 to 2**63 - 1, got None",
    ),
    "negative window": (
        {"window": (-1, 0)},
        "window must be (left, right), each an integer of at least 0 or None, got (-1, 0); "
        "None is no bound; flash-attn's -1 is None here",
    ),
    "window of one": ({"window": 4}, "window must be (left, right), each an integer"),
    "window of three": ({"window": (1, 2, 3)}, "window must be (left, right), each an integer"),
    "window of floats": ({"window": (1.0, None)}, "got (1.0, None); None is no bound"),
    "window of bools": ({"window": (True, None)}, "got (True, None); None is no bound"),
    "padding that is no tensor": (
        {"key_padding": [True] * 10},
        "key_padding must be a tensor, got list; pass a torch.Tensor",
    ),
    "padding on another device": (
        {"key_padding": torch.ones(2, 10, dtype=torch.bool, device="meta")},
        "key_padding must be on q's device cpu, got meta; move it there",
    ),
    "padding of integers": (
        {"key_padding": torch.ones(2, 10, dtype=torch.int64)},
        "key_padding must be bool, true where the key may be attended, got torch.int64; convert",
    ),
    "padding of another shape": (
        {"key_padding": torch.ones(2, 8, dtype=torch.bool)},
        "key_padding must be (batch, key_len) = (2, 10), got (2, 8); give one truth value for each",
    ),
    "integer mask": (
        {"attn_mask": torch.ones(8, 10, dtype=torch.uint8)},
        "attn_mask must be bool, float64, float32, bfloat16 or float16, got torch.uint8; convert",
    ),
    "mask that does not broadcast": (
        {"attn_mask": torch.zeros(8, 8)},
        "attn_mask must be broadcastable to (batch, heads, query_len, key_len) = (2, 4, 8, 10), "
        "got (8, 8); add axes of length 1",
    ),
    "mask of five axes": (
        {"attn_mask": torch.zeros(1, 1, 1, 8, 10)},
        "attn_mask must be broadcastable to (batch, heads, query_len, key_len) = (2, 4, 8, 10), g",
    ),
    "slopes that want a gradient": (
        {"alibi_slopes": torch.zeros(4, requires_grad=True)},
        "alibi_slopes must be without gradient, got requires_grad=True; no gradient is computed "
        "for it; detach it, or pass -slope * distance as attn_mask, which gets one",
    ),
    "bias nan": (
        {"attn_mask": torch.full((8, 10), torch.nan)},
        "attn_mask must be finite, or -inf where a key is hidden, got NaN or +inf in it; use a",
    ),
    "bias +inf": (
        {"attn_mask": torch.full((10,), torch.inf)},
        "attn_mask must be finite, or -inf where a key is hidden, got NaN or +inf in it",
    ),
    "slopes of integers": (
        {"alibi_slopes": torch.ones(4, dtype=torch.int32)},
        "alibi_slopes must be float64, float32, bfloat16 or float16, got torch.int32; convert it",
    ),
    "slopes of kv heads": (
        {"alibi_slopes": torch.ones(2)},
        "alibi_slopes must be (heads,) or (batch, heads) = (2, 4), got (2,); give one slope for",
    ),
    "slopes nan": (
        {"alibi_slopes": torch.tensor([1.0, torch.nan, 0.0, 0.0])},
        "alibi_slopes must be finite, got [1.0, nan, 0.0, 0.0]; one finite slope for each head",
    ),
    "offsets with a batch": (
        {"cu_seqlens_q": offsets(0, 8)},
        "cu_seqlens_q and cu_seqlens_k must be given exactly when q, k and v are packed as "
        "(total_tokens, heads, head_dim), got cu_seqlens_q with q (2, 4, 8, 32); pass both",
    ),
}

BOTH = {"cu_seqlens_q": offsets(0, 4, 10), "cu_seqlens_k": offsets(0, 7, 10)}
BAD_PACKS = {
    "no offsets": ({}, "given exactly when q, k and v are packed as (total_tokens, heads, head_di"),
    "offsets of k alone": (
        {"cu_seqlens_k": offsets(0, 10)},
        "(total_tokens, heads, head_dim), got cu_seqlens_k with q (10, 2, 32); pass both with",
    ),
    "wide offsets": (
        BOTH | {"cu_seqlens_k": offsets(0, 7, 10).long()},
        "cu_seqlens_k must be int32, got torch.int64; convert it first",
    ),
    "one sequence more": (
        BOTH | {"cu_seqlens_k": offsets(0, 7, 8, 10)},
        "cu_seqlens_q and cu_seqlens_k must be of shape (sequences + 1,), alike for q and k, got "
        "(3,) and (4,); start with 0 and end with the number of tokens",
    ),
    "no sequence": (
        {"cu_seqlens_q": offsets(0), "cu_seqlens_k": offsets(0)},
        "must be of shape (sequences + 1,), alike for q and k, got (1,) and (1,)",
    ),
    "offsets without axis": (
        {"cu_seqlens_q": offsets(0)[0], "cu_seqlens_k": offsets(0)[0], "alibi_slopes": Q[0, :2, 0]},
        "must be of shape (sequences + 1,), alike for q and k, got () and ()",
    ),
    "offsets that fall": (
        BOTH | {"cu_seqlens_q": offsets(0, 12, 10)},
        "cu_seqlens_q must be offsets that rise from 0 to the 10 tokens, got [0, 12, 10]; take",
    ),
    "offsets that end early": (
        BOTH | {"cu_seqlens_k": offsets(0, 7, 9)},
        "cu_seqlens_k must be offsets that rise from 0 to the 10 tokens, got [0, 7, 9]; take the",
    ),
    "offsets that start late": (
        BOTH | {"cu_seqlens_k": offsets(1, 7, 10)},
        "cu_seqlens_k must be offsets that rise from 0 to the 10 tokens, got [1, 7, 10]",
    ),
    "many offsets": (
        {"cu_seqlens_q": offsets(*range(1, 11)), "cu_seqlens_k": offsets(*range(1, 11))},
        "tokens, got [1, 2, 3, 4] ... [7, 8, 9, 10]; take the cumulative sum of the lengths",
    ),
    "padding": (
        BOTH | {"key_padding": torch.ones(1, 10, dtype=torch.bool)},
        "key_padding must be None with packed sequences, got a tensor; leave the padding out",
    ),
    "mask": (
        BOTH | {"attn_mask": torch.zeros(10, 10)},
        "attn_mask must be None with packed sequences, got a tensor; leave the padding out",
    ),
    "slopes of another batch": (
        BOTH | {"alibi_slopes": torch.ones(3, 2)},
        "alibi_slopes must be (heads,) or (batch, heads) = (2, 2), got (3, 2)",
    ),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("case", BAD_MASKS)
def test_a_mask_that_does_not_fit_is_refused(call, case):
    options, message = BAD_MASKS[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(Q, K, K, **options)
    assert str(error.value).startswith(f"{call.__name__}: ")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("case", BAD_PACKS)
def test_packed_sequences_that_do_not_fit_are_refused(call, case):
    options, message = BAD_PACKS[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(PACKED, PACKED, PACKED, **options)
    assert str(error.value).startswith(f"{call.__name__}: ")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_unknown_argument_is_answered_with_the_nearest(call):
    message = f"{call.__name__}: no argument 'attention_mask'; nearest: attn_mask"
    with pytest.raises(TypeError, match=re.escape(message)):
        call(Q, K, K, attention_mask=None)
    with pytest.raises(TypeError, match="no argument 'xyz'; nearest: causal, scale, window"):
        call(Q, K, K, xyz=None)


def test_packed_sequences_cannot_be_scaled():
    message = (
        "flash_attention: scaling must be 'none' with packed sequences, whose blocks would cross "
        "their ends, got 'per_block'; attend each sequence by itself"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(PACKED, PACKED, PACKED, numerics=PROFILES["fa3_fp8"], **BOTH)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_fits_is_served(call):
    v = torch.randn(K.shape, generator=torch.Generator().manual_seed(0))
    mean = v.mean(2, keepdim=True).repeat_interleave(2, dim=1).expand_as(Q)
    for options in (
        {"causal": False, "scale": 1, "softcap": 3, "dropout_p": 0},
        {"dropout_p": 0, "dropout_seed": None},
        {"dropout_p": 0.0, "dropout_seed": 2**63 - 1, "dropout_offset": 2**63 - 1},
        {"window": [None, 20]},
        {"window": None, "scale": None, "key_padding": None, "attn_mask": None},
        {"key_padding": torch.ones(2, 10, dtype=torch.bool)},
        {"attn_mask": torch.zeros((), dtype=torch.float64)},
        {"attn_mask": torch.ones(4, 1, 1, dtype=torch.bool)},
        {"alibi_slopes": torch.zeros(2, 4, dtype=torch.bfloat16)},
    ):
        torch.testing.assert_close(call(Q, K, v, **options).float(), mean)
