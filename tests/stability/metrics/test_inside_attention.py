"""Figures from inside attention, against the whole matrix in FP64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics import inside_attention
from stability.metrics.inside_attention import (
    INSIDE_METRICS,
    delta_gap,
    inside_tensor,
    spectral_norms,
)

_GENERATOR = torch.Generator().manual_seed(4)


def _inputs(query_len=19, key_len=19, heads=4, kv_heads=2, dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(query_len + key_len)
    sizes = ((heads, query_len), (kv_heads, key_len))
    return [(size * torch.randn(2, h, n, 16, generator=generator)).to(dtype) for h, n in sizes]


def _bias(query_len, key_len):
    return torch.randn(2, 4, query_len, key_len, generator=_GENERATOR, dtype=torch.float64)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale": {"scale": 0.7},
    "bias": {"attn_mask": _bias(19, 19)},
    "bool": {"attn_mask": _bias(19, 19) > 0},
    "padding": {"key_padding": torch.arange(19) < torch.tensor([[19], [11]])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 1.0])},
}


def _naive(q, k, mask, valid=None):
    """The definitions over the whole matrix, in FP64."""
    (n_q, n_k), group = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    s = q.double() @ k.double().repeat_interleave(group, dim=1).mT * mask.get("scale", 0.25)
    if mask.get("softcap"):
        s = mask["softcap"] * torch.tanh(s / mask["softcap"])
    ahead = torch.arange(n_k) - (torch.arange(n_q).unsqueeze(1) + n_k - n_q)
    if "alibi_slopes" in mask:
        s = s - mask["alibi_slopes"].double()[:, None, None] * ahead.abs()
    extra = mask.get("attn_mask")
    if extra is not None and extra.dtype != torch.bool:
        s = s + extra
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if mask.get("causal"):
        hidden |= ahead > 0
    if "window" in mask:
        hidden |= (ahead < -mask["window"][0]) | (ahead > mask["window"][1])
    if extra is not None and extra.dtype == torch.bool:
        hidden |= ~extra
    if "key_padding" in mask:
        hidden |= ~mask["key_padding"][:, None, None, :]
    rows = ~hidden.all(dim=-1)
    if valid is not None:
        rows &= valid[:, None, :]
    seen = ~hidden & rows.unsqueeze(-1)
    s = s.masked_fill(hidden, -torch.inf)
    p = torch.softmax(s, dim=-1)
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(dim=-1)
    ones = ((s - s.amax(dim=-1, keepdim=True)).exp().to(q.dtype) == 1).sum(dim=-1)
    lse = s.logsumexp(dim=-1)[rows]
    return [
        s[seen].max(),
        s[seen].mean(),
        entropy[rows].mean(),
        (ones[rows] > 1).double().mean(),
        lse.min(),
        lse.max(),
    ]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("padded", [False, True], ids=["all-rows", "some-rows"])
def test_each_figure_is_its_definition(name, padded):
    q, k = _inputs()
    valid = torch.arange(19) >= torch.tensor([[0], [6]]) if padded else None
    found = inside_tensor(q, k, mask=MASKS[name], valid=valid)
    expected = torch.stack(_naive(q, k, MASKS[name], valid))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(
    query_len=st.integers(1, 40),
    key_len=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3)]),
    causal=st.booleans(),
    chunk=st.sampled_from([1, 50, 2**20]),
)
def test_chunks_change_nothing(query_len, key_len, heads, causal, chunk):
    q, k = _inputs(query_len, key_len, *heads)
    mask = {"causal": causal}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside_attention, "CHUNK_VALUES", chunk)
        found = inside_tensor(q, k, mask=mask)
    expected = torch.stack(_naive(q, k, mask))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_scored_in_fp32(dtype):
    q, k = _inputs(dtype=dtype, size=3.0)
    found = inside_tensor(q, k, mask={"causal": True})
    expected = torch.stack(_naive(q, k, {"causal": True}))
    scale = expected.abs().clamp(min=1.0)
    assert ((found - expected).abs() / scale).max() < 64 * 2**-24


def test_a_repeated_maximum_is_seen_and_a_near_one_only_where_the_dtype_is_coarse():
    q = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    q[..., 0] = 4.0
    k = torch.zeros(1, 1, 3, 16, dtype=torch.bfloat16)
    k[0, 0, :, 0] = torch.tensor([1.0, 1.0, -9.0])
    assert inside_tensor(q, k, mask={})[3] == 1.0
    k[0, 0, 1, 0] = 0.5
    assert inside_tensor(q, k, mask={})[3] == 0.0
    # exp(-1e-3) is 1 in BF16 and is not in FP32
    q = torch.full((1, 1, 4, 16), 1.0)
    k = torch.stack([torch.zeros(16), torch.full((16,), -1e-3 / 4)])[None, None]
    assert inside_tensor(q, k, mask={})[3] == 0.0
    assert inside_tensor(q.bfloat16(), k.bfloat16(), mask={})[3] == 1.0


def test_a_uniform_softmax_has_the_entropy_of_its_keys():
    q, k = torch.zeros(1, 2, 5, 16), torch.randn(1, 1, 12, 16)
    found = dict(zip(INSIDE_METRICS, inside_tensor(q, k, mask={}).tolist(), strict=True))
    assert found["entropy"] == pytest.approx(math.log(12), rel=1e-6)
    assert found["lse_min"] == found["lse_max"] == pytest.approx(math.log(12), rel=1e-6)
    assert (found["max_logit"], found["mean_logit"]) == (0.0, 0.0)


def test_with_no_row_left_every_figure_is_nan():
    q, k = _inputs()
    nothing = torch.zeros(2, 19, dtype=torch.bool)
    assert inside_tensor(q, k, mask={}, valid=nothing).isnan().all()
    assert inside_tensor(q, k, mask={"key_padding": nothing}).isnan().all()


def test_spectral_norms_are_the_largest_singular_values_of_each_heads_rows():
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    expected = [torch.linalg.svdvals(part.double())[0] for part in weight.split(16)]
    torch.testing.assert_close(spectral_norms(weight, 3), torch.stack(expected), rtol=1e-8, atol=0)
    assert spectral_norms(torch.zeros(8, 4), 2).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"weight must be .* for 5 heads, got \(48, 40\)"):
        spectral_norms(weight, 5)


def test_delta_gap_is_signed_and_leaves_out_padding():
    dout, high = (torch.randn(2, 3, 7, 16, generator=_GENERATOR) for _ in range(2))
    low = high + 0.01 * dout.sign()
    expected = 0.01 * dout.double().abs().sum()
    assert float(delta_gap(dout, low, high)) == pytest.approx(float(expected), rel=1e-4)
    assert float(delta_gap(dout, high, low)) == pytest.approx(-float(expected), rel=1e-4)
    valid = torch.zeros(2, 1, 7, dtype=torch.bool)
    valid[1, :, 3] = True
    part = 0.01 * dout[1, :, 3].double().abs().sum()
    assert float(delta_gap(dout, low, high, valid=valid)) == pytest.approx(float(part), rel=1e-4)


def test_nothing_waits_for_the_device():
    q, k = (x.to("meta") for x in _inputs(dtype=torch.bfloat16))
    assert inside_tensor(q, k, mask={"causal": True}).shape == (6,)
