"""Spikes are a run's own where the other run of its seed has none near, nor nearly one."""

import numpy as np
import pytest
from scipy import stats

from stability.analysis.loss_spikes import (
    DEVIATIONS,
    loss_deviations,
    own_spikes,
    seen_from,
    spike_test,
)
from stability.metrics.instability import LOSS_SPIKE_DEVIATIONS, LossSpikes

# up and down by one standard deviation, so that no loss is half way to a spike by chance
NOISE = np.tile([0.05, -0.05], 100)


def _losses(**jumps):
    losses = dict(enumerate((2.0 + NOISE).tolist()))
    for step, jump in jumps.items():
        losses[int(step[1:])] = 2.0 + jump
    return losses


def test_a_spike_that_only_one_run_has_is_its_own():
    assert own_spikes(_losses(s120=1.0), _losses()) == [120]
    assert own_spikes(_losses(), _losses(s120=1.0)) == []


@pytest.mark.parametrize(("step", "own"), [(120, []), (112, []), (128, []), (111, [120])])
def test_a_spike_within_eight_steps_is_shared(step, own):
    assert own_spikes(_losses(s120=1.0), _losses(**{f"s{step}": 1.0})) == own


def test_a_batch_that_is_hard_for_both_is_no_own_spike_just_above_the_limit():
    # 3.2 standard deviations are 0.16: one loss is above it, one below
    assert own_spikes(_losses(s120=0.25), _losses(s120=0.14)) == []
    assert own_spikes(_losses(s120=0.25), _losses(s120=0.02)) == [120]


def test_a_loss_that_is_no_number_is_a_spike():
    assert own_spikes(_losses(s10=float("nan")), _losses()) == [10]


def test_before_fifty_losses_no_jump_can_be_seen():
    """A jump of 5 nats, which is 100 standard deviations of the noise."""
    jumps = {f"s{step}": 5.0 for step in (20, 30, 49)}
    short = {step: loss for step, loss in _losses(**jumps).items() if step < 50}
    assert own_spikes(short, dict.fromkeys(short, 2.0)) == []
    assert seen_from(short) is None
    assert own_spikes(_losses(s50=5.0), _losses()) == [50]
    assert seen_from(_losses()) == 50


def test_a_loss_that_is_no_number_is_no_history_and_logs_may_skip_steps():
    assert seen_from(_losses(s10=float("nan"), s20=float("inf"))) == 52
    every_third = {step: loss for step, loss in _losses().items() if step % 3 == 0}
    assert seen_from(every_third) == 150
    jump = own_spikes(every_third | {147: 7.0}, every_third)
    assert jump == []
    assert own_spikes(every_third | {150: 7.0}, every_third) == [150]


def test_the_test_says_in_which_runs_it_sees_nothing_and_from_where_on_it_sees():
    short = {step: loss for step, loss in _losses().items() if step < 50}
    late = {step + 7: loss for step, loss in _losses().items()}
    found = spike_test({0: _losses(), 1: short, 2: late}, {0: late, 1: _losses(), 2: late})
    # the candidate of seed 1 is too short, and of seed 0 the baseline starts later
    assert found.blind == (1,)
    assert found.seen_from == 57
    whole = spike_test({0: _losses()}, {0: _losses()})
    assert (whole.blind, whole.seen_from) == ((), 50)


def test_the_test_is_mcnemars_over_seeds():
    many = {f"s{step}": 1.0 for step in (60, 90, 120, 150)}
    candidate = {seed: _losses(**(many if seed < 6 else {})) for seed in range(9)}
    baseline = {seed: _losses(**({"s80": 1.0} if seed == 7 else {})) for seed in range(9)}
    found = spike_test(candidate, baseline)
    # however many spikes a seed has, it counts once
    assert (found.more, found.fewer) == (6, 1)
    assert found.p == pytest.approx(stats.binomtest(6, 7, alternative="greater").pvalue)
    assert found.smallest_p == 0.5**7
    assert list(found.candidate[0]) == [60, 90, 120, 150]


def test_runs_alike_tell_nothing():
    found = spike_test({0: _losses(), 1: _losses()}, {0: _losses(), 2: _losses()})
    assert (found.more, found.fewer, found.p, found.smallest_p) == (0, 0, 1.0, 1.0)
    assert list(found.candidate) == [0]


@pytest.mark.parametrize("heavy", [False, True])
def test_spikes_are_those_that_the_watch_sees_as_they_come(heavy):
    dice = np.random.default_rng(5)
    values = dice.standard_t(2, 600) if heavy else np.repeat(dice.normal(size=60), 10)
    values[[20, 70, 71, 300]] = [np.nan, np.inf, np.nan, -np.inf]
    losses = dict(enumerate(values.tolist()))
    watch = LossSpikes(LOSS_SPIKE_DEVIATIONS)
    expected = [step for step, loss in losses.items() if watch.update(loss)]
    found = [step for step, size in loss_deviations(losses).items() if size > DEVIATIONS]
    assert found == expected
    assert len(found) > 4


def test_a_flat_loss_spikes_at_anything_above_it():
    flat = dict.fromkeys(range(60), 2.0)
    assert set(loss_deviations(flat).values()) == {0.0}
    assert loss_deviations(flat | {55: 2.000001, 56: 1.9})[55] == np.inf
    assert loss_deviations({}) == {}
