"""Calls of flash_attn_with_kvcache are read right, in pages or not, and changed by nothing.

A stand-in takes the place of flash-attn, which needs a GPU: it goes through each sequence by
itself, and its arithmetic in FP64 is also what the figures are held to.
"""

import sys
from importlib.machinery import ModuleSpec
from itertools import product
from types import ModuleType

import pytest
import torch
from torch import nn

from stability import shadow
from tests.sampling import one_in
from tests.stability.intercept.torch_models import unseen

BATCH, HEADS, GROUPS, WIDTH, LENGTH, PAGE = 3, 4, 2, 16, 24, 4
FLASH = "flash_attn.flash_attn_interface"


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    outs = []
    for b in range(len(q)):
        ends = cache_seqlens
        ends = int(ends[b]) if isinstance(ends, torch.Tensor) else ends
        ends = k_cache.shape[1] if ends is None else ends
        for i in range(0 if k is None else k.shape[1]):
            for cache, new in ((k_cache, k), (v_cache, v)):
                cache[_slot(cache, b, ends + i, cache_batch_idx, block_table)] = new[b, i]
        ends += 0 if k is None else k.shape[1]
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        slots = [_slot(k_cache, b, i, cache_batch_idx, block_table) for i in range(first, ends)]
        keys, values = (torch.stack([x[s] for s in slots]) for x in (k_cache, v_cache))
        bias = torch.zeros(HEADS, q.shape[1], len(slots), dtype=q.dtype)
        for i in range(q.shape[1]):
            for j in range(len(slots)):
                ahead = j - (i + len(slots) - q.shape[1])
                if alibi_slopes is not None:
                    bias[:, i, j] = -alibi_slopes.to(q.dtype) * abs(ahead)
                left, right = window_size[0], 0 if causal else window_size[1]
                if (left >= 0 and ahead < -left) or (right >= 0 and ahead > right):
                    bias[:, i, j] = -torch.inf
        keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (keys, values))
        scale = WIDTH**-0.5 if softmax_scale is None else softmax_scale
        scores = torch.einsum("qhd,khd->hqk", q[b], keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        blind = bias.isinf().all(-1, keepdim=True)
        weights = (scores + bias).masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    out = torch.stack(outs)
    return (out, None) if return_softmax_lse else out


def _slot(cache, b, i, cache_batch_idx, block_table):
    if block_table is not None:
        return int(block_table[b, i // cache.shape[1]]), i % cache.shape[1]
    return b if cache_batch_idx is None else int(cache_batch_idx[b]), i


FUNCTION = flash_attn_with_kvcache


@pytest.fixture
def flash(monkeypatch):
    package, interface = ModuleType("flash_attn"), ModuleType(FLASH)
    package.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setattr(FUNCTION, "__module__", FLASH)
    package.flash_attn_with_kvcache = interface.flash_attn_with_kvcache = FUNCTION
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, FLASH, interface)
    return package


class Model(nn.Module):
    def __init__(self, flash, call):
        super().__init__()
        self.flash = flash
        self.call = call

    def forward(self, q, k_cache, v_cache):
        return self.flash.flash_attn_with_kvcache(q, k_cache, v_cache, **self.call)


def _cache(kind):
    """Return q and a cache that is NaN wherever nothing was written, and how to find things in it.

    The sequences are 9, 5 and 20 long, before new keys.
    """
    torch.manual_seed(0)
    ends = torch.tensor([9, 5, 20], dtype=torch.int32)
    call = {"cache_seqlens": ends}
    if kind == "paged":
        shape, table = (20, PAGE, GROUPS, WIDTH), torch.randperm(20)[:18].reshape(BATCH, 6)
        for b, end in enumerate(ends.tolist()):
            table[b, (end + 2) // PAGE + 1 :] = 10**6  # not of this sequence, nor of any
        call["block_table"] = table.int()
    elif kind == "by index":
        shape = (5, LENGTH, GROUPS, WIDTH)
        call["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    elif kind == "left padding":
        shape = (BATCH, LENGTH, GROUPS, WIDTH)
        call["cache_leftpad"] = torch.tensor([2, 0, 7], dtype=torch.int32)
    else:
        shape = (BATCH, LENGTH, GROUPS, WIDTH)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    for b, end in enumerate(ends.tolist()):
        for i in range(end):
            for cache in caches:
                slot = _slot(cache, b, i, call.get("cache_batch_idx"), call.get("block_table"))
                cache[slot] = torch.randn(GROUPS, WIDTH)
    return [torch.randn(BATCH, 3, HEADS, WIDTH), *caches], call


NEW = {"k": torch.randn(BATCH, 3, GROUPS, WIDTH), "v": torch.randn(BATCH, 3, GROUPS, WIDTH)}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "new keys": {**NEW, "causal": True},
    "window": {**NEW, "causal": True, "window_size": (4, 0)},
    "two-sided window": {"window_size": (2, 1), "softmax_scale": 0.1},
    "alibi": {**NEW, "causal": True, "alibi_slopes": torch.linspace(0.1, 1, HEADS)},
    "softcap": {"softcap": 1.5, "return_softmax_lse": True},
}
KINDS = ("plain", "paged", "by index", "left padding")


def _same(x, y):
    return torch.equal(x.nan_to_num(77.0), y.nan_to_num(77.0))


@pytest.mark.parametrize(("kind", "options"), one_in(3, product(KINDS, OPTIONS)))
def test_every_call_is_read_right_and_changes_nothing(flash, kind, options):
    given, call = _cache(kind)
    call |= OPTIONS[options]
    plain, watched = ([x.clone() for x in given] for _ in range(2))
    wide = {n: x.double() if n in ("k", "v") else x for n, x in call.items()}
    expected = flash.flash_attn_with_kvcache(*plain, **call)
    right = flash.flash_attn_with_kvcache(*(x.double() for x in given), **wide)
    model = Model(flash, call)
    with torch.no_grad(), shadow(model, "flash:golden", evaluation=True) as probe:
        made = model(*watched)
        probe.step()
    assert isinstance(made, tuple) == isinstance(expected, tuple)
    if isinstance(made, tuple):
        made, expected, right = made[0], expected[0], right[0]
    assert torch.equal(made, expected)
    assert all(_same(x, y) for x, y in zip(plain, watched, strict=True))
    assert not probe.findings
    assert [str(one) for one in probe.coverage] == ["seen"]
    figure = probe.metrics["deviation/model/out/golden_baseline_rel_fro"]
    assert figure == pytest.approx(float((made - right).norm() / right.norm()), abs=1e-12)
    assert 1e-9 < figure < 1e-6


@pytest.mark.parametrize("ends", [None, LENGTH - 3])
def test_one_length_or_none_is_that_of_all(flash, ends):
    torch.manual_seed(0)
    given = [torch.randn(BATCH, n, h, WIDTH) for n, h in ((1, HEADS), *((LENGTH, GROUPS),) * 2)]
    model = Model(flash, {"cache_seqlens": ends})
    with torch.no_grad(), shadow(model, "flash:golden", evaluation=True) as probe:
        made = model(*given)
        probe.step()
    right = flash.flash_attn_with_kvcache(*(x.double() for x in given), cache_seqlens=ends)
    figure = probe.metrics["deviation/model/out/golden_baseline_rel_fro"]
    assert figure == pytest.approx(float((made - right).norm() / right.norm()), abs=1e-12)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_candidate_in_its_place_writes_the_new_keys_too(flash, kind, every):
    given, call = _cache(kind)
    call |= OPTIONS["new keys"]
    plain, replaced = ([x.clone() for x in given] for _ in range(2))
    expected = flash.flash_attn_with_kvcache(*plain, **call)
    model = Model(flash, call)
    options = {"evaluation": True, "replace": ["model"], "every": every}
    with torch.no_grad(), shadow(model, "flash:fa2", **options) as probe:
        made = model(*replaced)
        probe.step()
    assert 0 < (made - expected).norm() / expected.norm() < 1e-2
    assert all(_same(x, y) for x, y in zip(plain, replaced, strict=True))


@unseen
@pytest.mark.parametrize("what", ["rotary_cos", "a cache in another dtype"])
def test_what_cant_be_repeated_is_a_finding(flash, what):
    given, call = _cache("plain")
    if what == "rotary_cos":
        call["rotary_cos"], text = torch.ones(LENGTH, 4), "the argument rotary_cos of flash_attn_wi"
    else:
        given[1:], text = (x.double() for x in given[1:]), "a cache in torch.float64 beside q in"
    model = Model(flash, call)
    with torch.no_grad(), shadow(model, evaluation=True) as probe:
        if what == "rotary_cos":
            model(*given)
        else:
            with pytest.raises(RuntimeError):  # of the stand-in, which takes one dtype
                model(*given)
        probe.step()
    (finding,) = probe.findings
    assert finding[2].startswith(f"not looked at: {text}")
    assert probe.coverage[0].state == "seen in part"


def test_a_call_that_trains_is_told_to_have_no_backward(flash):
    given, call = _cache("plain")
    model = Model(flash, call).train()
    with shadow(model, "flash:golden") as probe:
        model(*given)
        probe.step()
    assert [text for _, _, text in probe.findings] == [
        "dq, dk, dv not measured: nothing before it is trained"
    ]
