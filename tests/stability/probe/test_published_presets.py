"""The rows that fail, and the same rows without one of the things that make them fail."""

import pytest
import torch

from stability.probe.published_presets import tie_bias, tied_inputs

PV_ALONE = (("repeated_max_beta", 1), ("probabilities", "fp32"), ("output", "fp32"))
"""The product P v is rounded to BF16 and nothing else."""


def _probabilities(rows):
    inputs = tied_inputs(8, 1, 0, rows)
    scores = inputs.q @ inputs.k.mT
    return torch.exp(scores - scores.amax(-1, keepdim=True)), inputs


def test_each_variant_takes_away_what_its_name_says_and_no_more():
    tied, whole = _probabilities("tied")
    bare, _ = _probabilities("no_residual")
    untied, _ = _probabilities("untied")
    _, mixed = _probabilities("mixed_residuals")
    assert (bare[..., :2] == 1).all()
    assert bare[..., 2:].max() < 1e-12
    assert ((untied == 1).sum(-1) == 1).all()
    assert ((untied > 0.45) & (untied < 0.97)).sum(-1).eq(1).all()
    assert torch.equal(untied[..., 2:], tied[..., 2:])
    assert torch.equal(mixed.v.abs(), whole.v)
    assert (mixed.v[..., :2, :] > 0).all()
    assert 0.4 < (mixed.v[..., 2:, :] > 0).float().mean() < 0.6


@pytest.mark.parametrize("rows", ["no_residual", "mixed_residuals", "untied"])
def test_none_of_the_variants_has_the_bias(rows):
    found = tie_bias("stabilised", PV_ALONE, "twin", 1, heads=128, rows=rows)
    assert abs(found.bias_ulp) < 5 * found.standard_error < 0.03


@pytest.mark.parametrize("sign", [-1, 1])
def test_delta_has_the_bias_of_out_and_not_when_it_is_summed_from_p(sign):
    failing = tie_bias("stabilised", (("repeated_max_beta", 1),), "twin", sign, heads=64)
    assert failing.delta_ulp == pytest.approx(failing.bias_ulp, abs=0.02)
    assert sign * failing.delta_ulp > 0.2
    assert abs(failing.delta_from_p_ulp) < 1e-3
