"""A head_dim of v that is not q's, as in multi-head latent attention: right in all four.

The definition is written anew here, with no line shared; golden is held against it, the others
against golden, and all against finite differences.
"""

import pytest
import torch

from attention_kernels import (
    baseline_attention,
    golden_attention,
)
from attention_kernels.testing import (
    Shape,
    assert_within_budget,
    check_attention,
    make_qkv,
    with_gradients,
)
from attention_kernels.testing.cells import FULL, reference
from tests.kernels.flash import SMALL, flash

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(100) * 2**-53 = 1e-15 each, with room."""


EXACT = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    "twin": flash("twin", **SMALL),
    "twin, key blocks outside, splits": flash("twin", splits=2, **SMALL),
    "triton": flash("triton", **SMALL),
}
SHAPES = [Shape(1, 4, 2, 33, 17, 24, 40), Shape(1, 2, 1, 21, 49, 40, 24)]
MASKS = {
    "full": {},
    "causal, softcap": {"causal": True, "softcap": 2.0},
    "window, alibi": {"window": (7, 3), "alibi_slopes": torch.tensor([0.5, 0.25])},
}


def draw(shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    size = (*q.shape[:3], v.shape[3])
    return q, k, v, torch.randn(size, generator=generator).to(dtype)


def definition(q, k, v, *, causal=False, softcap=0.0, window=(None, None), alibi_slopes=None):
    """exp(scores) v over the sum of exp(scores), with nothing subtracted."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (torch.stack([x] * group, dim=2).flatten(1, 2) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[3] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window
    left, right = (keys + queries if x is None else x for x in (left, right))
    seen = (ahead >= -left) & (ahead <= (0 if causal else right))
    powers = torch.exp(scores) * seen
    return torch.einsum("bhqk,bhke->bhqe", powers, v) / powers.sum(-1, True).clamp(1e-300)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_each_is_the_definition_forward_and_backward(name, shape, mask):
    inputs, options = draw(shape), dict(MASKS[mask])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].repeat(shape.heads // 2)
    expected = with_gradients(definition, *inputs, **options)
    ours = with_gradients(EXACT[name], *inputs, **options)
    for result, right in expected.items():
        assert ours[result].shape == right.shape
        error = (ours[result] - right).abs().max().item()
        assert error <= FP64_RTOL * right.abs().max().item(), result


@pytest.mark.parametrize("name", ["golden", "twin"])
def test_finite_differences_agree(name):
    q, k, v, _ = (x.requires_grad_() for x in draw(Shape(1, 2, 1, 3, 4, 16, 17)))
    assert torch.autograd.gradcheck(lambda *x: EXACT[name](*x, causal=True), (q, k, v))


@pytest.mark.parametrize("name", EXACT)
def test_packed_sequences_are_attended_each_by_itself(name):
    q, k, v, dout = (x[0].transpose(0, 1) for x in draw(Shape(1, 2, 1, 15, 20, 16, 24)))
    # the first has no keys, the second no queries, and three rows belong to none
    queries, keys = torch.tensor([0, 3, 3, 15]), torch.tensor([0, 0, 6, 20])
    packed = {"cu_seqlens_q": queries.int(), "cu_seqlens_k": keys.int(), "causal": True}
    ours = with_gradients(EXACT[name], q, k, v, dout, **packed)
    last = [x.transpose(0, 1).unsqueeze(0) for x in (q[3:], k[6:], v[6:], dout[3:])]
    expected = with_gradients(definition, *last, causal=True)
    starts = {"out": 3, "dq": 3, "dk": 6, "dv": 6}
    for result, right in expected.items():
        first, right = starts[result], right[0].transpose(0, 1)
        torch.testing.assert_close(ours[result][first:], right, rtol=1e-12, atol=1e-13)
        assert not ours[result][:first].any(), result


PROFILES_OF_THE_RULE = {
    "fa2": {},
    "fa1": {},
    "fa4": {"key_order": "reversed"},
    "fa3": {"splits": 2},
}


@pytest.mark.parametrize("engine", ["twin", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("profile", PROFILES_OF_THE_RULE)
@pytest.mark.parametrize("sizes", [(48, 32), (32, 59)], ids=str)
def test_flash_attns_rule_holds(engine, profile, sizes):
    """max|flash - golden| <= 2 max|plain attention in BF16 - golden|, for out and gradients."""
    inputs = draw(Shape(1, 2, 1, 49, 65, *sizes), torch.bfloat16)
    attention = flash(engine, profile, block_q=32, block_k=32, **PROFILES_OF_THE_RULE[profile])
    ours = with_gradients(attention, *inputs, causal=True)
    baseline = with_gradients(baseline_attention, *inputs, causal=True)
    wide = (x.double() for x in inputs)
    golden = with_gradients(golden_attention, *wide, causal=True)
    for result in golden:
        assert_within_budget(ours[result], baseline[result], golden[result], what=result)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"rounding": "stochastic"}, {"profile": "fa3_fp8"}], ids=str)
def test_the_engines_agree_where_operands_are_scaled_rotated_or_rounded_at_random(changes):
    inputs = draw(Shape(1, 2, 1, 17, 35, 24, 40), torch.bfloat16)
    of = {"profile": "all_bf16"} | changes | SMALL
    twin, triton = (with_gradients(flash(engine, **of), *inputs) for engine in ("twin", "triton"))
    for result, x in twin.items():
        # but for sums in another order that fall on the other side of a rounding
        error = (x.double() - triton[result].double()).norm() / x.double().norm()
        assert error < 2e-2, result
        assert (x == triton[result]).double().mean() > 0.7, result


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_compiled_call_gives_the_bits_of_eager(name):
    torch.compiler.reset()
    inputs = draw(Shape(1, 2, 1, 9, 13, 16, 24))
    compiled = torch.compile(EXACT[name], fullgraph=True, backend="aot_eager")
    eager = with_gradients(EXACT[name], *inputs)
    for result, x in with_gradients(compiled, *inputs).items():
        assert torch.equal(x, eager[result]), result


CELLS = [cell for cell in FULL if cell.shape.value_dim is not None]


def test_the_check_takes_a_right_attention_and_finds_a_scale_of_the_wrong_head_dim():
    assert len(CELLS) == 2
    options = {"cells": CELLS, "dtypes": ["bf16"]}
    assert check_attention(flash("twin", "fa2"), gives_lse=False, **options).passed

    def scaled_by_v(q, k, v, *, causal, scale=None):
        return baseline_attention(q, k, v, causal=causal, scale=v.shape[3] ** -0.5)

    assert not check_attention(scaled_by_v, **options).passed

    def shaped_as_q(q, k, v, *, causal, scale=None):
        return baseline_attention(q, k, v, causal=causal, scale=scale)[..., : q.shape[3]]

    report = check_attention(shaped_as_q, cells=CELLS[1:], dtypes=["bf16"])
    assert "out has shape (2, 2, 70, 32) and must have (2, 2, 70, 40)" in report.sentence

    def refuses(q, k, v, *, causal, scale=None):
        raise ValueError("head_dim of v must be that of q")

    assert check_attention(refuses, **options).unsupported


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_formula_of_the_check_is_the_golden(cell):
    where = reference(cell, torch.float32)
    for name, x in where.formula().results().items():
        torch.testing.assert_close(x, where.golden[name], atol=1e-11, rtol=1e-11)
