"""The key of a call: its stochastic rounding averages out, and is drawn again on any layout."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention_kernels import PROFILES, flash_attention
from attention_kernels.masks import Mask
from attention_kernels.rounding_key import draws_of
from attention_kernels.testing import Shape, make_qkv

EXACT = PROFILES["golden"].with_(block_q=16, block_k=16)
OUTPUT = EXACT.with_(output="bf16", rounding="stochastic", seed=3)
"""Of this numerics the output alone is rounded; all else is FP64."""
EVERY = PROFILES["all_bf16"].with_(block_q=16, block_k=16, rounding="stochastic")
KEY = (1, 2, 3, 4)


def draw(shape, dtype=torch.float64):
    return make_qkv(shape, dtype, torch.Generator().manual_seed(0))


def with_gradients(qkv, dout, **options):
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = flash_attention(*leaves, causal=True, **options)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def errors_in_ulps(keys):
    """The output's error of each call in spacings of BF16, (calls, elements)."""
    qkv = draw(Shape(1, 2, 2, 16, 16, 32))
    exact = flash_attention(*qkv, numerics=EXACT, engine="twin").flatten()
    spacing = torch.exp2(exact.abs().log2().floor() - 7)
    calls = (flash_attention(*qkv, numerics=OUTPUT, engine="twin", rounding_key=k) for k in keys)
    return torch.stack([(out.flatten() - exact) / spacing for out in calls])


def rms(x):
    return float(x.pow(2).mean().sqrt())


SPREAD = (1 / 6) ** 0.5
"""RMS error of one draw, in spacings: f (1 - f) has the mean 1/6 over the fraction f."""


@pytest.mark.parametrize("counted", ["step", "layer", "call", "seed"])
def test_the_mean_error_of_an_element_falls_with_the_square_root_of_the_calls(counted):
    place = ("seed", "step", "layer", "call").index(counted)
    errors = errors_in_ulps([(*KEY[:place], n, *KEY[place + 1 :]) for n in range(100)])
    # 1024 elements: the RMS of their means is known to 2.2 %
    for count in (1, 16, 100):
        assert rms(errors[:count].mean(0)) == pytest.approx(SPREAD / count**0.5, rel=0.12)
    # 0.031 is one standard deviation of a correlation of 1024 pairs
    assert abs(float(torch.corrcoef(errors[:2])[0, 1])) < 0.14


def test_without_a_key_the_error_is_the_same_at_every_call():
    errors = errors_in_ulps([None] * 3)
    assert rms(errors.mean(0)) == pytest.approx(SPREAD, rel=0.12)


def test_the_bits_of_a_key_are_known():
    """Other ones would let no recorded run with stochastic rounding be made again."""
    assert draws_of(7).word == 2803216774
    assert draws_of(7, (*KEY, 0, 0, 0)).word == 3516099993
    words = [draws_of(7, (*KEY[:i], KEY[i] + 2**32, *KEY[i + 1 :], 0, 0, 0)).word for i in range(4)]
    assert len({draws_of(7, (*KEY, 0, 0, 0)).word, *words}) == 5


@pytest.mark.parametrize("engine", ["twin", "triton"])
def test_parts_of_a_batch_and_of_its_heads_draw_what_the_whole_does(engine):
    q, k, v = draw(Shape(2, 4, 2, 16, 16, 16), torch.bfloat16)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = with_gradients((q, k, v), dout, numerics=EVERY, engine=engine, rounding_key=KEY)
    at = {"numerics": EVERY, "engine": engine, "rounding_key": KEY}
    batch, heads, kv_heads = slice(1, 2), slice(2, 4), slice(1, 2)
    part = (q[batch, heads], k[batch, kv_heads], v[batch, kv_heads])
    found = with_gradients(part, dout[batch, heads], rounding_place=(1, 2, 4), **at)
    for name, x, y, h in zip("odkv", whole, found, (heads, heads, kv_heads, kv_heads), strict=True):
        assert torch.equal(x[batch, h], y), name
    elsewhere = with_gradients(part, dout[batch, heads], **at)
    assert not any(torch.equal(x, y) for x, y in zip(found, elsewhere, strict=True))


def test_both_engines_draw_alike_by_a_key():
    q, k, v = draw(Shape(2, 2, 1, 9, 17, 16))
    calls = [
        flash_attention(q, k, v, numerics=OUTPUT, engine=engine, rounding_key=KEY, **options)
        for options in ({}, {"rounding_place": (3, 2, 8)})
        for engine in ("twin", "triton")
    ]
    assert torch.equal(calls[0], calls[1])
    assert torch.equal(calls[2], calls[3])
    assert not torch.equal(calls[0], calls[2])


def test_a_checkpointed_call_draws_the_same_again():
    qkv = draw(Shape(1, 2, 2, 20, 20, 16), torch.float32)
    results = []
    for recompute in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in qkv]

        def attend(q, k, v):
            return flash_attention(q, k, v, numerics=EVERY, engine="twin", rounding_key=KEY).sin()

        out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert all(map(torch.equal, *results))


def test_a_compiled_model_draws_by_its_key():
    q, k, v = draw(Shape(1, 1, 1, 16, 16, 16), torch.float32)

    def attend(q, k, v, step):
        return flash_attention(
            q, k, v, numerics=EVERY, engine="twin", rounding_key=(0, step, 2**40, 0)
        )

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    outs = [compiled(q, k, v, step) for step in range(3)]
    assert all(torch.equal(out, attend(q, k, v, step)) for step, out in enumerate(outs))
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize(
    ("key", "place", "message"),
    [
        ((1, 2, 3), None, r"rounding_key must be \(seed, step, layer, call\), integers from 0"),
        ((1, 2, 3, -1), None, r"got \(1, 2, 3, -1\) with place None"),
        ((1, 2, 3, 2**63), None, "integers from 0 to 2"),
        ((1, 2.0, 3, 4), None, "integers from 0 to 2"),
        (5, None, "got 5 with place None"),
        (KEY, (0, 0, 0, 0), r"rounding_place is \(first_batch, first_head, heads\)"),
        (KEY, (2**31, 0, 0), "integers below 2"),
        (None, (1, 0, 0), "rounding_place must be None without a key"),
    ],
)
def test_what_is_no_key_is_refused(key, place, message):
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ValueError, match=message):
        flash_attention(q, q, q, rounding_key=key, rounding_place=place)


def test_a_mask_knows_of_no_key():
    """Golden and baseline round by none: their arguments stay those of a mask."""
    assert "rounding" not in Mask.__dataclass_fields__
