"""Lines that are thinned keep what matters: spikes, gaps and both ends."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stability.report.page.chart import POINTS, SEED_POINTS, arm_lines, thinning_remarks
from stability.report.view.drift import mean_over_seeds
from stability.report.view.palette import ArmStyle

STYLE = ArmStyle("#000000", "solid", "circle")


@settings(max_examples=20)
@given(length=st.integers(POINTS + 1, 5 * POINTS), spike=st.floats(2, 1e6), where=st.floats(0, 1))
def test_thinning_keeps_every_spike(length, spike, where):
    values = {step: 1.0 + (step % 7) / 10 for step in range(length)}
    at = round(where * (length - 1))
    values[at] = spike
    (line,) = arm_lines("x", {0: values}, STYLE, bold=False)
    assert len(line["x"]) <= POINTS
    assert line["x"] == sorted(line["x"])
    assert at in line["x"]
    assert max(line["y"]) == float(f"{spike:.7g}")


def test_thinning_keeps_a_gap_and_what_stands_beside_it():
    values = {step: float(step) for step in range(5 * POINTS)}
    values[0] = values[77] = math.nan
    (line,) = arm_lines("x", {0: values}, STYLE, bold=False)
    drawn = dict(zip(line["x"], line["y"], strict=True))
    assert drawn[0] is drawn[77] is None
    assert {1, 5 * POINTS - 1} <= set(drawn)


def test_thin_lines_of_seeds_keep_their_spikes_too():
    seeds = {seed: dict.fromkeys(range(5 * POINTS), 1.0) for seed in (0, 1)}
    seeds[1][1234] = 9.0
    _, thin, _ = arm_lines("x", seeds, STYLE, bold=False)
    assert thin["y"][thin["x"].index(1234)] == 9.0
    assert len(thin["x"]) <= SEED_POINTS


def test_gap_stands_for_a_number_that_is_not_finite():
    (line,) = arm_lines("x", {0: {0: 1.0, 1: float("nan"), 2: float("inf")}}, STYLE, bold=False)
    assert line["y"] == [1.0, None, None]


def test_mean_is_taken_only_where_every_seed_is():
    assert mean_over_seeds({0: {1: 1.0, 2: 2.0}, 1: {1: 3.0}}) == {1: 2.0}


def test_thinning_is_said_where_it_happens():
    assert thinning_remarks(SEED_POINTS, seeds=2) == thinning_remarks(POINTS, seeds=1) == ()
    (both,) = thinning_remarks(2000, seeds=2)
    assert "Thin lines of 2,000 steps" in both
    assert "thick lines of 2,000 steps" in both
    assert "thin" not in thinning_remarks(2000, seeds=1)[0].lower()
