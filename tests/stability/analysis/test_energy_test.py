"""The energy test: p is uniform for one draw more, small for what is shifted, and says its limits.

The distances are those of normal vectors: as for weights, nearly all of their difference is length.
"""

import math
from itertools import product

import numpy as np
import pytest

from stability.analysis.energy_test import energy_test
from stability.records.distances import DistanceMatrix
from tests.stability.analysis.distance_studies import matrix


def _study(dice, seeds=5, nudges=2, shift=0.0, size=200) -> dict[int, DistanceMatrix]:
    """Draws of one law; the candidate's centre is `shift` of a draw's own length away."""
    found = {}
    for seed in range(seeds):
        names = ["baseline", *(f"nudge_{i}" for i in range(nudges)), "candidate"]
        points = {name: dice.normal(size=size) for name in names}
        points["candidate"] = points["candidate"] + shift
        found[seed] = matrix(points)
    return found


def _test(study, nudges=2):
    return energy_test(study, "candidate", [f"nudge_{i}" for i in range(nudges)])


@pytest.mark.parametrize(("seeds", "nudges"), [(3, 1), (5, 1), (5, 2), (5, 4)])
def test_p_is_uniform_for_a_further_nudge(seeds, nudges):
    """600 studies: a share of 0.2 has a standard deviation of 0.016, and p is at most exact."""
    dice = np.random.default_rng(100 * seeds + nudges)
    p = np.array([_test(_study(dice, seeds, nudges), nudges).p for _ in range(600)])
    for level in (0.05, 0.2, 0.5):
        assert (p <= level).mean() <= level + 3 * math.sqrt(level * (1 - level) / 600)
    assert p.mean() == pytest.approx(0.5, abs=0.05)


def test_a_shifted_candidate_is_told():
    dice = np.random.default_rng(1)
    told = [_test(_study(dice, shift=0.6)).p <= 0.05 for _ in range(60)]
    assert np.mean(told) > 0.9
    wide = [_test(_study(dice, shift=3.0)).p for _ in range(20)]
    assert max(wide) == pytest.approx(1 / 4**5)


def test_a_candidate_closer_than_a_nudge_is_not_told_as_far():
    """One-sided: whoever lies in the middle of the draws is no evidence against itself."""
    dice = np.random.default_rng(2)
    study = {}
    for seed in range(5):
        points = {name: dice.normal(size=200) for name in ("baseline", "nudge_0", "nudge_1")}
        study[seed] = matrix({**points, "candidate": sum(points.values()) / 3})
    assert _test(study).p == 1.0


def test_p_is_the_share_of_all_labellings():
    study = _study(np.random.default_rng(3), seeds=3, nudges=1)

    def statistic(found, label):
        rows = np.array(found.rows)
        others = [i for i in range(3) if i != label]
        among = sum(rows[i][j] for i, j in product(others, others)) / 4
        return (2 * rows[label][others].mean() - among) / (rows.sum() / 6)

    sums = {
        labels: sum(statistic(study[seed], label) for seed, label in enumerate(labels))
        for labels in product(range(3), repeat=3)
    }
    expected = sum(value >= sums[2, 2, 2] - 1e-12 for value in sums.values()) / 27
    found = _test(study, nudges=1)
    assert found.p == pytest.approx(expected)
    assert found.smallest_p == pytest.approx(1 / 27)


def test_drawn_labellings_agree_with_all_of_them(monkeypatch):
    study = _study(np.random.default_rng(8), shift=0.1)
    exact = _test(study).p
    assert 0.05 < exact < 0.95
    monkeypatch.setattr("stability.analysis.energy_test.MOST_ENUMERATED", 0)
    drawn = _test(study)
    # 9,999 draws: a share of 0.5 has a standard deviation of 0.005
    assert drawn.p == pytest.approx(exact, abs=0.02)
    assert drawn.smallest_p == 1e-4
    assert drawn == _test(study)
    far = _test(_study(np.random.default_rng(1), shift=5.0))
    assert 1e-4 <= far.p < 0.002


def test_too_small_a_design_says_that_it_could_not_have_told():
    found = _test(_study(np.random.default_rng(0), seeds=2, nudges=1, shift=9.0), nudges=1)
    assert found.smallest_p == found.p == pytest.approx(1 / 9)
    assert "could not have been: no p below 0.11 is possible with 2 draws" in found.sentence
    assert "in 2 seeds; add nudges or seeds" in found.sentence
    enough = _test(_study(np.random.default_rng(0), seeds=3, nudges=1, shift=9.0), nudges=1)
    assert enough.sentence == "can be told from a nudge (p 0.037, the least possible here)"
    same = _test(_study(np.random.default_rng(0)))
    assert same.sentence.startswith("can't be told from a nudge (p 0.")


def test_a_control_that_is_the_baseline_or_another_control_is_no_draw():
    dice = np.random.default_rng(0)
    points = {name: dice.normal(size=9) for name in ("baseline", "nudge_0", "candidate")}
    alike = {**points, "rerun": points["baseline"], "nudge_1": points["nudge_0"]}
    found = energy_test({0: matrix(alike)}, "candidate", ["nudge_0", "nudge_1", "rerun"])
    assert found.draws == 2
    alone = energy_test({0: matrix(alike)}, "candidate", ["rerun"])
    assert math.isnan(alone.p)
    assert "there is none that has moved" in alone.sentence


def test_nothing_to_test_is_said():
    assert math.isnan(energy_test({}, "candidate", ["nudge_0"]).p)
    points = {name: np.full(3, float(i)) for i, name in enumerate(("baseline", "nudge_0"))}
    lost = matrix({**points, "candidate": np.full(3, math.nan)})
    assert math.isnan(energy_test({0: lost}, "candidate", ["nudge_0"]).p)
