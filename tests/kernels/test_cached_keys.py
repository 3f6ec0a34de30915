"""Keys in a cache, whole or in pages, give the bits of keys that lie side by side.

All that no sequence has written is NaN here: a single read of it would show in the result.
"""

from itertools import product
from typing import Any

import pytest
import torch

from attention_kernels import attention_with_kvcache, baseline_attention, golden_attention
from tests.kernels.flash import SMALL, flash
from tests.sampling import one_in

HEADS, GROUPS, WIDTH, PAGE, PAGES = 4, 2, 16, 8, 24
LENGTHS = [1, 8, 9, 37, 0]
ENGINES = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    "twin": flash("twin", **SMALL),
    "twin, fa2": flash("twin", "fa2", **SMALL),
    "twin, splits": flash("twin", splits=2, **SMALL),
    "triton": flash("triton", **SMALL),
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (5, None), "scale": 0.3},
    "softcap": {"softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 1, HEADS)},
    "alibi by sequence": {
        "alibi_slopes": torch.linspace(0.05, 1, len(LENGTHS) * HEADS).view(-1, HEADS)
    },
    "sinks": {"causal": True, "sinks": torch.linspace(-2, 2, HEADS)},
}


def _cache(paged, dtype=torch.float32, lengths=LENGTHS, value_dim=24):
    """Return k and v of each sequence, the caches that hold them, and what finds them there."""
    generator = torch.Generator().manual_seed(0)
    parts, caches = [], []
    free = torch.randperm(PAGES, generator=generator).tolist()
    used = [[free.pop() for _ in range(0, n, PAGE)] for n in lengths]
    table = torch.tensor([row + [10**6] * (6 - len(row)) for row in used])
    for width in (WIDTH, value_dim):
        whole = [torch.randn(1, GROUPS, n, width, generator=generator) for n in lengths]
        parts.append([x.to(dtype) for x in whole])
        shape = (PAGES, GROUPS, PAGE, width) if paged else (len(lengths), GROUPS, 40, width)
        cache = torch.full(shape, torch.nan, dtype=dtype)
        for index, x in enumerate(parts[-1]):
            for at in range(lengths[index]):
                slot = (int(table[index, at // PAGE]), at % PAGE) if paged else (index, at)
                cache[slot[0], :, slot[1]] = x[0, :, at]
        caches.append(cache)
    found = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    return parts, caches, found | ({"block_table": table.int()} if paged else {})


def _alone(mask, index):
    slopes = mask.get("alibi_slopes")
    if slopes is None or slopes.dim() == 1:
        return mask
    return {**mask, "alibi_slopes": slopes[index : index + 1]}


@pytest.mark.parametrize(
    ("engine", "mask", "paged", "query_len"),
    one_in(13, product(ENGINES, MASKS, (True, False), (1, 3)), slow=4),
)
def test_the_bits_are_those_of_keys_side_by_side(engine, mask, paged, query_len):
    dtype = torch.bfloat16 if engine == "twin, fa2" else torch.float32
    (keys, values), caches, found = _cache(paged, dtype)
    q = torch.randn(len(LENGTHS), HEADS, query_len, WIDTH, dtype=dtype)
    attend, options = ENGINES[engine], MASKS[mask]
    out, lse = attention_with_kvcache(attend, q, *caches, **found, return_lse=True, **options)
    assert out.shape == (len(LENGTHS), HEADS, query_len, 24)
    assert lse.shape == (len(LENGTHS), HEADS, query_len)
    assert torch.equal(out, attention_with_kvcache(attend, q, *caches, **found, **options))
    for index, length in enumerate(LENGTHS):
        if not length:
            assert not out[index].any()
            continue
        given = (q[index : index + 1], keys[index], values[index])
        right = attend(*given, return_lse=True, **_alone(options, index))
        assert torch.equal(out[index : index + 1], right.out), length
        assert torch.equal(lse[index : index + 1], right.lse), length


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("engine", ["golden", "baseline", "twin", "triton"])
def test_a_decoded_token_is_the_textbooks(engine, paged):
    (keys, values), caches, found = _cache(paged, torch.float64)
    q = torch.randn(len(LENGTHS), HEADS, 2, WIDTH, dtype=torch.float64)
    out = attention_with_kvcache(ENGINES[engine], q, *caches, **found, causal=True)
    for index, length in enumerate(LENGTHS[1:4], 1):
        for head in range(HEADS):
            k, v = (x[index][0, head // 2] for x in (keys, values))
            for row, seen in enumerate((length - 1, length)):
                weights = torch.softmax(q[index, head, row] @ k[:seen].T / WIDTH**0.5, -1)
                # two FP64 evaluations in other orders, some sqrt(40) * 2**-53 = 1e-15 apart
                assert torch.allclose(out[index, head, row], weights @ v[:seen], 1e-13, 1e-14)


def test_sequences_may_share_pages():
    _, caches, found = _cache(True)
    table = found["block_table"]
    table[1] = table[3]
    q = torch.randn(1, HEADS, 1, WIDTH).expand(len(LENGTHS), -1, -1, -1)
    found["cache_seqlens"][1] = LENGTHS[3]
    out = attention_with_kvcache(golden_attention, q, *caches, **found)
    assert torch.equal(out[1], out[3])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_no_gradient_is_given(name):
    _, caches, found = _cache(True)
    given = dict(zip(("q", "k_cache", "v_cache"), (torch.randn(5, 4, 1, 16), *caches), strict=True))
    given[name] = given[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name} must be without a gradient.*torch.no_grad\(\)"):
        attention_with_kvcache(golden_attention, **given, **found)
    with torch.no_grad():
        attention_with_kvcache(golden_attention, **given, **found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cache_seqlens": torch.tensor([1, 8, 9, 49, 0])},
            "cache_seqlens must be from 0 to the",
        ),
        (
            {"cache_seqlens": torch.tensor([1, 8, 9, -1, 0])},
            "cache_seqlens must be from 0 to the",
        ),
        ({"cache_seqlens": torch.zeros(5).int()}, "not all 0"),
        ({"cache_seqlens": torch.ones(5)}, "cache_seqlens must be integers of rank 1, a row for"),
        ({"cache_seqlens": torch.ones(4).int()}, "a row for each of the 5 sequences"),
        ({"block_table": torch.ones(5).int()}, "block_table must be integers of rank 2"),
        ({"block_table": torch.full((5, 6), 24)}, "block_table must be pages from 0 to 23"),
        ({"block_table": torch.full((5, 6), -1)}, "block_table must be pages from 0 to 23"),
        ({"block_table": None}, "k_cache must be one row for each of the 5 .* give a block_table"),
        ({"v_cache": torch.zeros(24, 2, 7, 16)}, "v_cache must be shaped as k_cache"),
        ({"q": torch.zeros(5, 4, 16)}, "q must be of rank 4"),
        ({"attn_mask": torch.ones(1).bool()}, "attn_mask must be None with packed sequences"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    _, caches, found = _cache(True)
    q = torch.zeros(5, 4, 1, 16)
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], **found, **change}
    with pytest.raises(ValueError, match=message):
        attention_with_kvcache(golden_attention, **given)
