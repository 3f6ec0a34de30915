"""Whether a planted fault counts as found, at its own level, by this study's limits and looks."""

import math
from dataclasses import replace

import pytest

from stability.analysis.assay import found_at, is_settled
from stability.analysis.sequential import look_alpha
from stability.config.study import LEAST_ALPHA, PolicyConfig
from stability.records.assay import STAGES
from tests.stability.analysis.fault_figures import (
    ALPHA,
    OWN,
    POLICY,
    a_fault,
    gradient_of,
    operator_of,
    own_of,
    ratios_around,
)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({}, False),
        ({"gain": 5e-3}, True),
        ({"gain": -5e-3}, True),
        ({"gain": 1.0e-3}, False),
        ({"ratio": 3.0}, True),
        ({"ratio": 1.9}, False),
        ({"bias": 0.1}, True),
        ({"bias": -0.1}, True),
        ({"bias": 0.04}, False),
    ],
    ids=str,
)
def test_a_fault_is_found_at_the_operator_where_one_figure_is_surely_beyond_its_limit(
    figures, found
):
    assert (
        found_at("operator", a_fault(operator=operator_of(**figures)), OWN, ALPHA, POLICY) is found
    )


def test_a_limit_that_is_raised_lets_faults_through():
    fault = a_fault(operator=operator_of(gain=5e-3))
    assert not found_at("operator", fault, OWN, ALPHA, replace(POLICY, max_gain=6e-3))


def test_what_the_candidate_shows_without_the_fault_is_no_sign_of_it():
    own = replace(OWN, operator=operator_of(ratio=2.3))
    assert found_at("operator", a_fault(operator=operator_of(ratio=2.3)), OWN, ALPHA, POLICY)
    assert not found_at("operator", a_fault(operator=operator_of(ratio=2.3)), own, ALPHA, POLICY)
    both = a_fault(operator=operator_of(ratio=2.3, gain=5e-3))
    assert found_at("operator", both, own, ALPHA, POLICY)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        (gradient_of((20.0, 21.0, 19.0), 0.0, 0.1), True),
        (gradient_of((1.0,) * 24, 0.04, 0.005), True),
        (gradient_of((1.0,) * 24, 0.02, 0.01), False),
        (gradient_of((1.0, 3.0, 2.5), 0.5, 0.5), False),
        (gradient_of((1.0, math.nan, 1.0), math.nan, math.nan), True),
        (gradient_of((1.0, math.inf, 1.0), math.nan, math.nan), True),
        (gradient_of((1.0,) * 24, math.inf, 0.1), True),
        (gradient_of((1.0,) * 24, math.inf, math.inf), False),
        (gradient_of((1.0,) * 24, 0.04, 0.0), False),
        ({}, False),
    ],
)
def test_a_fault_is_found_in_the_gradient_by_its_ratio_or_by_what_repeats(figures, found):
    fault = a_fault(levels=("gradient",), **figures)
    assert found_at("gradient", fault, OWN, ALPHA, POLICY) is found


FAR = gradient_of((20.0, 21.0, 19.0), 0.9, 0.01)


@pytest.mark.parametrize(
    ("own", "figures", "found"),
    [
        # each figure, beyond its limit without the fault too, leaves the other one
        (own_of((3.0, 3.1, 2.9)), {}, True),
        (own_of((3.0, 3.1, 2.9)), {"share": 0.0}, False),
        (own_of((2.6, 3.5, 3.0)), {"share": 0.0}, False),
        (own_of((1.0,) * 3, 0.05, 0.01), {}, True),
        (own_of((1.0,) * 3, 0.05, 0.01), {"ratios": (1.0, 1.1, 0.9)}, False),
        (own_of((3.0, 3.1, 2.9), 0.05, 0.01), {}, False),
        # its own doubt is no finding: a share of 0.02 with a standard error of 0.01 may be none
        (own_of((1.0,) * 3, 0.02, 0.01), {"ratios": (1.0, 1.1, 0.9)}, True),
        (own_of((1.0, 9.0, 1.0)), {"share": 0.0}, True),
        # one that is exact is within each limit
        (own_of((0.0,) * 3, 0.0, 0.0), {"share": 0.0}, True),
        (own_of((0.0, 1.0, 0.5)), {"share": 0.0}, True),
        (own_of((1.0, math.nan, 1.0), math.nan, math.nan), {}, False),
        (own_of((1.0, math.inf, 1.0)), {"share": 0.0}, False),
        (own_of((), math.nan, math.nan), {}, False),
    ],
    ids=str,
)
def test_a_figure_of_the_gradient_that_is_beyond_without_the_fault_shows_nothing(
    own, figures, found
):
    fault = a_fault(levels=("gradient",), **FAR | figures | own)
    assert found_at("gradient", fault, OWN, ALPHA, POLICY) is found
    assert is_settled(POLICY, fault) is found


def test_a_fault_of_which_nothing_can_be_seen_is_not_looked_at_for_ever():
    hidden = own_of((3.0, 3.1, 2.9), 0.05, 0.01)
    for looks, settled in ((12, False), (24, True), (48, True)):
        fault = a_fault(
            levels=("gradient",), **gradient_of((3.0, 3.1) * (looks // 2), 0.05) | hidden
        )
        assert is_settled(POLICY, fault) is settled
        half = replace(fault, own_share=0.0, share=0.015, share_se=0.01)
        assert not is_settled(POLICY, half), "the share may still show it"


@pytest.mark.parametrize("layers", [3, 12])
def test_at_the_least_error_rate_that_a_study_may_have_a_gain_and_a_bias_are_found(layers):
    """P-values are simulated: with fewer draws, or a smaller rate, none could be."""
    policy = PolicyConfig(alpha=LEAST_ALPHA)
    for figures in ({"gain": 5e-3}, {"bias": 0.1}):
        fault = a_fault(operator=operator_of(count=3 * layers, **figures))
        assert found_at("operator", fault, OWN, look_alpha(LEAST_ALPHA), policy), figures


def test_where_the_candidates_own_of_are_lacking_nothing_is_found():
    fault, none = a_fault(operator=operator_of(gain=5e-3)), replace(OWN, operator={})
    assert found_at("operator", fault, OWN, ALPHA, POLICY)
    assert not found_at("operator", fault, none, ALPHA, POLICY)


def test_each_stage_at_which_a_fault_is_tried_has_its_part_of_the_error_rate():
    """Of a share that is surely beyond at a twelfth of one look's error rate, and just not."""
    from scipy.stats import t

    tries = 2 * len(STAGES)
    assert tries == 12
    for part, is_found in ((1.02, True), (0.98, False)):
        for looks in (3, 24, 96):
            far = t.isf(ALPHA / tries / part, looks - 1)
            share = POLICY.max_share + 1e-3 * far
            figures = gradient_of((1.0,) * looks, share, 1e-3)
            fault = a_fault(levels=("gradient",), **figures)
            assert found_at("gradient", fault, OWN, ALPHA, POLICY) is is_found


@pytest.mark.parametrize(
    ("figures", "settled"),
    [
        (gradient_of(ratios_around(2.2, 0.3, 24), 0.026, 0.0155), False),
        (gradient_of(ratios_around(2.2, 0.3, 24), 0.09, 0.0155), True),
        (gradient_of(ratios_around(1.1, 0.2, 24), 0.026, 0.0155), False),
        (gradient_of(ratios_around(1.1, 0.2, 24), 0.0, 0.001), True),
        # a share that is surely small settles nothing while the ratio may be beyond
        (gradient_of(ratios_around(1.9, 0.3, 24), 0.0, 0.001), False),
        # at the error rate of one look, 0.014, this would be surely within
        (gradient_of(ratios_around(1.1, 0.2, 24), 0.0, 0.0040), False),
        (gradient_of((1.0, 1.1)), False),
        ({}, False),
    ],
    ids=str,
)
def test_more_looks_are_taken_while_a_fault_is_neither_found_nor_surely_missed(figures, settled):
    assert is_settled(POLICY, a_fault(levels=("gradient",), **figures)) is settled
