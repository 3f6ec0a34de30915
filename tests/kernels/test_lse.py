"""The log-sum-exp that golden and baseline give: what it is, and that asking changes nothing."""

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention

ATTENTIONS = {"golden": golden_attention, "baseline": baseline_attention}


def _inputs(dtype=torch.float64, heads=4, kv_heads=2, query_len=33, key_len=47):
    generator = torch.Generator().manual_seed(3)
    sizes = ((heads, query_len), (kv_heads, key_len), (kv_heads, key_len))
    return [torch.randn(2, h, n, 16, generator=generator).to(dtype) for h, n in sizes]


def _naive(q, k, hidden, scale=0.25):
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q.double() @ k.mT) * scale
    return scores.masked_fill(hidden, -torch.inf).logsumexp(dim=-1)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lse_is_that_of_the_scores(name, causal):
    q, k, v = _inputs()
    hidden = torch.zeros(33, 47, dtype=torch.bool)
    if causal:
        hidden = torch.ones(33, 47, dtype=torch.bool).triu(1 + 47 - 33)
    out, lse = ATTENTIONS[name](q, k, v, causal=causal, return_lse=True)
    assert lse.dtype == torch.float64
    torch.testing.assert_close(lse, _naive(q, k, hidden), rtol=1e-13, atol=0)
    assert torch.equal(out, ATTENTIONS[name](q, k, v, causal=causal))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients_are_the_same_bits_and_lse_carries_none(name):
    found = []
    for return_lse in (False, True):
        q, k, v = (x.requires_grad_() for x in _inputs())
        result = ATTENTIONS[name](q, k, v, causal=True, return_lse=return_lse)
        out = result.out if return_lse else result
        assert not (return_lse and result.lse.requires_grad)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_that_attends_nothing_has_minus_infinity(name):
    q, k, v = _inputs()
    padding = torch.ones(2, 47, dtype=torch.bool)
    padding[1] = False
    _, lse = ATTENTIONS[name](q, k, v, key_padding=padding, return_lse=True)
    assert torch.isfinite(lse[0]).all()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_packed_sequences_have_each_its_own_lse(name):
    q, k, v = (x[0].transpose(0, 1) for x in _inputs(query_len=30, key_len=30))
    starts = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    arguments = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    _, lse = ATTENTIONS[name](q, k, v, return_lse=True, **arguments)
    assert lse.shape == (4, 30)
    for start, stop in ((0, 7), (7, 30)):
        alone = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        _, expected = ATTENTIONS[name](*alone, causal=True, return_lse=True)
        torch.testing.assert_close(lse[:, start:stop], expected[0], rtol=1e-13, atol=0)


def test_chunks_of_the_golden_give_the_lse_of_the_whole(monkeypatch):
    q, k, v = _inputs()
    _, whole = golden_attention(q, k, v, causal=True, return_lse=True)
    monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 4 * 47)
    _, chunked = golden_attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=0)


def test_three_implementations_agree_at_the_precision_of_the_scores():
    q, k, v = _inputs(torch.bfloat16)
    _, golden = golden_attention(q, k, v, causal=True, return_lse=True)
    _, flash = flash_attention(
        q, k, v, causal=True, numerics=PROFILES["fa2"], engine="twin", return_lse=True
    )
    _, fp32 = baseline_attention(*(x.float() for x in (q, k, v)), causal=True, return_lse=True)
    for lse in (flash, fp32):
        assert lse.dtype == torch.float32
        assert (lse - golden).abs().max() < 16 * 2**-24 * golden.abs().max()


def test_lse_is_not_given_inside_of_a_compiled_graph():
    @torch.compile(backend="eager", fullgraph=True)
    def call(q, k, v):
        return golden_attention(q, k, v, return_lse=True)

    with pytest.raises(Exception, match=r"return_lse must be False inside of torch.compile"):
        call(*_inputs())
