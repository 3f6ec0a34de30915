"""Each message about a mask names call, argument, rule, value and way out."""

import re

import pytest
import torch

from attention_kernels import (
    PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)

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
    "dropout": (
        {"dropout_p": 0.1},
        "dropout_p must be 0, got 0.1; its random numbers would hide what numerics do; apply",
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
    "bias that wants a gradient": (
        {"attn_mask": torch.zeros(8, 10, requires_grad=True)},
        "attn_mask must be without gradient, got requires_grad=True; no gradient is computed",
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
        {"window": [None, 20]},
        {"window": None, "scale": None, "key_padding": None, "attn_mask": None},
        {"key_padding": torch.ones(2, 10, dtype=torch.bool)},
        {"attn_mask": torch.zeros((), dtype=torch.float64)},
        {"attn_mask": torch.ones(4, 1, 1, dtype=torch.bool)},
        {"alibi_slopes": torch.zeros(2, 4, dtype=torch.bfloat16)},
    ):
        torch.testing.assert_close(call(Q, K, v, **options).float(), mean)
