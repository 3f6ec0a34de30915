"""Operator evidence: right attentions hold, wrong ones are harmed with their place."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from stability.analysis.operator_evidence import judge_operator, operator_evidence
from stability.analysis.place_table import joined, place_tables
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.schema import PolicyConfig
from stability.records.metric_log import Series
from stability.records.metric_names import deviation_name, head_part
from stability.records.paths import RunPaths
from tests.stability.analysis.evidence_form import check_form

POLICY = PolicyConfig()
RESULTS = ("out", "dq", "dk", "dv")


def _log(rng, looks=12, layers=3, heads=4, *, ratio=1.1, gain=0.0, bias=0.0, where=None):
    """Return the metrics of a run: right, but for `gain` and `bias` at (layer, head, result)."""
    metrics = {}

    def add(layer, what, part, metric, values):
        name = deviation_name(f"layer_{layer}", what, metric, part=part)
        metrics[name] = Series([10 * look for look in range(looks)], list(values))

    for layer in range(layers):
        for what in RESULTS:
            for part in ("", *(head_part(head) for head in range(heads))):
                here = where in (None, (layer, part, what))
                add(layer, what, part, "error_ratio", ratio * np.exp(0.1 * rng.normal(size=looks)))
                add(layer, what, part, "gain", gain * here + 2e-4 * rng.normal(size=looks))
                add(layer, what, part, "gain_baseline", 2e-4 * rng.normal(size=looks))
                own = bias * here + 0.01 * rng.normal(size=looks)
                add(layer, what, part, "golden_bias_ulp", own)
                add(layer, what, part, "baseline_over_rounding", np.full(looks, 1.1))
            add(layer, what, "", "golden_nonfinite", [0.0] * looks)
    return metrics


def _judge(*args, **options):
    return judge_operator(place_tables(_log(*args, **options)), POLICY)


def _arm(metrics, axis="attention", diff=None):
    runs = {
        seed: RecordedRun(
            paths=RunPaths(Path("nowhere")), seed=seed, manifest=None, metrics=one, error=""
        )
        for seed, one in enumerate(metrics)
    }
    return RecordedArm(
        name="mine", axis=axis, diff=diff or {}, role="candidate", until=100, runs=runs
    )


STUDY: RecordedStudy = None  # pyright: ignore[reportAssignmentType] # nothing of it is read


def test_a_right_attention_holds_and_says_what_would_have_been_seen():
    found = _judge(np.random.default_rng(0))
    assert found.state == "holds"
    assert found.p_holds < 1e-3
    assert found.p_harmed == 1.0
    assert found.figures["looks"] == 12
    # error ratios of layers and heads, gains of layers, biases of the model
    assert found.figures["figures"] == 3 * 4 * 5 + 3 * 4 + 4
    assert 0 < found.figures["gain_excluded"] < POLICY.max_gain
    assert found.figures["error_ratio"] < found.figures["error_ratio_excluded"] < 2
    assert found.sentence.startswith("At worst, dq in head 3 of layer_0 errs 1.16 [1.08, 1.24] ")
    assert found.sentence.endswith("Over 12 looks all 76 figures are surely within their limits.")
    for limit in ("(limit 2)", "(limit 0.10% from 1)", "(limit 0.05)"):
        assert limit in found.sentence
    assert len(found.cell) <= 16
    assert found.cell.startswith("1.")
    check_form(found)


@pytest.mark.parametrize("part", ["", "head_2"])
def test_a_gain_of_half_a_percent_in_one_place_is_harm_with_its_name(part):
    where = (1, part, "dk")
    found = _judge(np.random.default_rng(1), gain=5e-3, where=where)
    assert found.state == "harmed"
    assert found.p_harmed < 1e-3
    place = "head 2 of layer_1" if part else "layer_1"
    assert re.fullmatch(
        rf"In {place}, dk is 1\.00\d{{3}} \[1\.004\d\d, 1\.005\d\d\] times what it should be "
        r"\(limit 0\.10% from 1\), over 12 looks\.",
        found.sentence,
    )
    assert found.figures["gain"] == pytest.approx(5e-3, abs=3e-4)
    check_form(found)


def test_a_single_layer_is_judged_by_itself():
    found = _judge(np.random.default_rng(13), layers=1)
    assert found.state == "holds"
    assert found.figures["figures"] == 4 * 5 + 4 + 4


def test_a_bias_is_judged_against_fp64():
    found = _judge(np.random.default_rng(2), bias=-0.1, where=(0, "head_1", "out"))
    assert found.state == "harmed"
    assert found.sentence.startswith("In head 1 of layer_0, out errs by -0.09")


def test_better_than_the_baseline_is_no_harm():
    assert _judge(np.random.default_rng(3), ratio=1e-3).state == "holds"
    same = _log(np.random.default_rng(3))
    for name, series in same.items():
        if name.endswith("error_ratio"):
            series.values = [1.0] * len(series.values)
    assert judge_operator(place_tables(same), POLICY).state == "holds"


def test_an_error_far_beyond_everywhere_is_harm_in_the_mean_of_all():
    found = _judge(np.random.default_rng(4), ratio=2e4)
    assert found.state == "harmed"
    assert re.match(r"In the mean of all layers, \w+ has 2\.\d\de\+04 \[", found.sentence)
    assert found.cell.startswith("2.1e+04x ")


def test_too_few_looks_are_undecided_and_say_how_many_would_do():
    found = _judge(np.random.default_rng(5), looks=2)
    assert found.state == "undecided"
    assert "there are 2" in found.decides
    check_form(found)
    assert found.p_holds > POLICY.alpha
    assert " figures are not surely within their limits, least of all the " in found.sentence


def test_what_lies_beyond_its_limit_is_decided_by_the_looks_that_would_show_harm():
    """A place near its limit would take thousands of looks, and none of them would matter."""
    metrics = _log(np.random.default_rng(0), looks=4, layers=1, heads=1)
    for name, series in metrics.items():
        if name == "deviation/layer_0/dq/error_ratio":
            series.values = [5.0, 10.0, 4.0, 7.0]
        elif name == "deviation/layer_0/dk/error_ratio":
            series.values = [1.9, 2.1, 2.0, 1.99]
    found = judge_operator(place_tables(metrics), POLICY)
    assert found.state == "undecided"
    needed = int(re.fullmatch(r"about (\d+) looks \(there are 4\)", found.decides).group(1))
    assert 4 < needed < 20
    for series in metrics.values():
        series.steps = [*range(needed)]
        series.values = (series.values * needed)[:needed]
    assert judge_operator(place_tables(metrics), POLICY).state == "harmed"


def test_the_level_is_judged_at_the_error_rate_of_one_look_of_the_study():
    """Evidence of 0.03 would do for a study that looks once, and none looks only once."""
    between = []
    for seed in range(60):
        found = _judge(np.random.default_rng(seed), looks=5, layers=1, heads=1, ratio=1.65)
        if look_alpha(POLICY.alpha) < found.p_holds <= POLICY.alpha:
            between.append(found)
    assert len(between) >= 5
    assert {found.state for found in between} == {"undecided"}
    # and so is what would have been seen: larger than a bound at 0.05
    assert all(found.figures["error_ratio_excluded"] > POLICY.max_error_ratio for found in between)


def test_a_tiny_gain_keeps_its_digits_in_the_table():
    metrics = _log(np.random.default_rng(0))
    for name, series in metrics.items():
        if name.endswith("/gain"):
            series.values = [-2e-5 + 1e-7 * look for look in range(12)]
    assert judge_operator(place_tables(metrics), POLICY).cell.endswith("x -0.002%")


def test_limits_are_the_policys():
    rng = np.random.default_rng(6)
    metrics = _log(rng, ratio=4.0, gain=3e-3)
    assert judge_operator(place_tables(metrics), POLICY).state == "harmed"
    coarse = PolicyConfig(max_error_ratio=8.0, max_gain=0.02)
    assert judge_operator(place_tables(metrics), coarse).state == "holds"


def test_a_right_attention_is_harmed_in_one_study_of_20_at_most():
    """With the limit at what the attention truly has: the worst case of a right one."""
    rng = np.random.default_rng(7)
    at_limit = PolicyConfig(max_gain=3e-3, max_error_ratio=1e6, max_bias_ulp=1e3)
    harmed = sum(
        judge_operator(place_tables(_log(rng, 5, 2, 2, gain=3e-3)), at_limit).state == "harmed"
        for _ in range(60)
    )
    assert harmed <= 7  # 60 draws at 5 %: more has a chance of 3 %


def test_values_that_are_not_finite_are_harm_whatever_else():
    metrics = _log(np.random.default_rng(8))
    metrics["deviation/layer_1/dq/golden_nonfinite"].values[3] = 7.0
    found = operator_evidence(STUDY, _arm([metrics]), POLICY)
    assert (found.state, found.p_harmed) == ("harmed", 0.0)
    assert found.sentence == "7 values are not finite where FP64's are, over 12 looks (limit 0)."


def test_looks_of_all_seeds_are_taken_together():
    rng = np.random.default_rng(9)
    arm = _arm([_log(rng, 3), _log(rng, 3), _log(rng, 3), {}])
    found = operator_evidence(STUDY, arm, POLICY)
    assert found.figures["looks"] == 9
    assert found.state == "holds"


def test_arms_on_other_axes_have_no_operator_level():
    metrics = _log(np.random.default_rng(10), gain=5e-3)
    found = operator_evidence(STUDY, _arm([metrics], axis="precision"), POLICY)
    assert found.state == "not applicable"
    assert "the arm changes precision" in found.sentence
    both = _arm([metrics], axis="confounded", diff={"attention.profile": ["a", "b"]})
    assert operator_evidence(STUDY, both, POLICY).state == "harmed"


def test_without_a_golden_or_a_probe_nothing_was_measured():
    metrics = _log(np.random.default_rng(11))
    plain = {
        name.replace("error_ratio", "rel_fro"): x for name, x in metrics.items() if "ratio" in name
    }
    for log in ({}, plain):
        found = operator_evidence(STUDY, _arm([log]), POLICY)
        assert found.state == "not measured"
        assert "probe.golden: true" in found.decides
        assert math.isnan(found.p_harmed)


def test_runs_of_other_layers_are_not_mixed_in():
    rng = np.random.default_rng(12)
    tables = joined([place_tables(_log(rng, layers=2)), place_tables(_log(rng, layers=3))])
    assert {table.layers for table in tables} == {("layer_0", "layer_1")}
    assert {len(table.steps) for table in tables} == {12}
