"""A folded exponent is one fused multiply-add of the unscaled score, and means what e**x means."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attention_kernels import PROFILES, flash_attention, golden_attention
from attention_kernels.masks import Mask
from attention_kernels.score_units import ScoreUnits, score_units
from attention_kernels.testing import Shape, make_qkv
from attention_kernels.twin.arithmetic import exponents

FOLDED = PROFILES["fa2"].resolve(torch.bfloat16)
FLOATS = st.floats(-300, 300, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


def test_a_plain_mask_keeps_scores_as_the_product_leaves_them():
    units = score_units(FOLDED, Mask(causal=True, window=(3, None)), 0.125)
    assert units.before == 1.0
    assert units.natural == 0.125
    assert units.log2 == np.float32(0.125 * math.log2(math.e)), "the factor is an FP32 number"


@pytest.mark.parametrize(
    ("changes", "mask", "scale"),
    [
        ({}, Mask(softcap=3.0), 0.125),
        ({}, Mask(sinks=torch.zeros(2)), 0.125),
        ({}, Mask(bias=torch.zeros(1, 1, 4, 4)), 0.125),
        ({}, Mask(alibi_slopes=torch.ones(1, 2)), 0.125),
        ({"scores": "bf16"}, Mask(), 0.125),
        ({"repeated_max_beta": 7.0}, Mask(), 0.125),
        ({}, Mask(), -0.125),
        ({}, Mask(), 0.0),
    ],
    ids=str,
)
def test_what_would_come_out_otherwise_is_scaled_first(changes, mask, scale):
    units = score_units(FOLDED.with_(**changes), mask, scale)
    assert units == ScoreUnits(scale, 1.0, float(np.float32(math.log2(math.e))))


def test_without_folding_nothing_is_fused():
    for exp in ("exact", "exp2", "exp2_polynomial"):
        units = score_units(FOLDED.with_(exp=exp), Mask(), 0.125)
        assert units == ScoreUnits(0.125, 1.0, None)


@given(FLOATS, FLOATS, FLOATS)
def test_an_exponent_is_rounded_once(score, factor, subtracted):
    exact = Fraction(score) * Fraction(factor) - Fraction(subtracted)
    assume(exact == 0 or abs(exact) > 2**-126)
    # two roundings may differ from one where the product lies 5 binades below
    assume(abs(Fraction(score) * Fraction(factor)) * 32 >= abs(Fraction(subtracted)))
    units = ScoreUnits(1.0, 1.0, factor)
    found = exponents(torch.tensor([score]), torch.tensor([subtracted]), units).item()
    # the nearest FP32 number to the exact one, ties to even
    near = np.float32(float(exact))
    beside = (np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))
    distance = min(abs(Fraction(float(x)) - exact) for x in (near, *beside))
    assert abs(Fraction(found) - exact) == distance


def test_one_rounding_is_not_two():
    """A product that rounds away what the sum would have kept: fused is not multiply, then add."""
    score, factor = 1 + 2**-12, 1 + 2**-12
    rounded = float(np.float32(score * factor))
    found = exponents(torch.tensor([score]), torch.tensor([rounded]), ScoreUnits(1.0, 1.0, factor))
    assert found.item() == 2**-24


@pytest.mark.parametrize("engine", ["twin", "triton"])
@pytest.mark.parametrize("exp", ["exp2_folded", "exp2_polynomial_folded"])
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"softcap": 4.0}, {"scale": -0.3}, {"scale": 0.0}, {"scale": 1.0}],
    ids=str,
)
def test_folded_attention_is_attention(mask, exp, engine):
    q, k, v = make_qkv(Shape(1, 4, 2, 40, 56, 32), torch.float32, torch.Generator().manual_seed(3))
    numerics = PROFILES["fa2"].with_(exp=exp, block_q=16, block_k=32)
    found = flash_attention(q, k, v, numerics=numerics, engine=engine, return_lse=True, **mask)
    exact = golden_attention(q.double(), k.double(), v.double(), return_lse=True, **mask)
    limit = 1e-6 if exp == "exp2_folded" else 1e-4
    for name, x, y in zip(("out", "lse"), found, exact, strict=True):
        assert (x - y).norm() <= limit * y.norm(), name


def test_the_largest_weight_of_a_row_need_not_be_exactly_1():
    """Of scores of some size; to BF16 it is rounded to 1."""
    scores = 40 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    units = score_units(FOLDED, Mask(), 64**-0.5)
    largest = exponents(scores.clone(), scores * units.log2, units).exp2()
    assert (largest != 1).float().mean() > 0.2
    assert (largest - 1).abs().max() <= 2**-20
    assert (largest.bfloat16() == 1).all()
