"""Operator evidence: right attentions hold, wrong ones are harmed with their place."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stability.analysis.number_text import three_figures
from stability.analysis.operator_evidence import judge_operator, operator_evidence
from stability.analysis.place_table import joined, place_tables
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.study import PolicyConfig
from stability.records.events import Event
from stability.records.metric_columns import Series
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


DIFF = {"attention.implementation": ["baseline", "flash"]}


def _arm(metrics, axis="attention", diff=DIFF, events=()):
    runs = {
        seed: RecordedRun(
            paths=RunPaths(Path("nowhere")),
            seed=seed,
            manifest=None,
            metrics=one,
            events=tuple(events),
            error="",
        )
        for seed, one in enumerate(metrics)
    }
    return RecordedArm(name="mine", axis=axis, diff=diff, role="candidate", until=100, runs=runs)


def _study(depth=3):
    return RecordedStudy(
        folder=Path("nowhere"),
        name="study",
        question="",
        yardstick="",
        base={"model": {"depth": depth}, "attention": {"implementation": "baseline"}},
        seeds=(0, 1, 2),
        steps=100,
        early_step=0,
        policy=POLICY,
        arms=(),
    )


STUDY = _study()


def test_a_right_attention_holds_and_says_what_would_have_been_seen():
    found = _judge(np.random.default_rng(0))
    assert found.state == "holds"
    assert found.p_holds < 1e-3
    assert found.p_harmed == 1.0
    assert found.figures["looks"] == 12
    # error ratios and gains of layers and heads, biases of the model
    assert found.figures["figures"] == 2 * 3 * 4 * 5 + 4
    assert 0 < found.figures["gain_excluded"] < POLICY.max_gain
    assert found.figures["error_ratio"] < found.figures["error_ratio_excluded"] < 2
    assert found.sentence.startswith("At worst, dq in head 3 of layer_0 has 1.16 [1.08, 1.24] ")
    assert found.sentence.endswith("Over 12 looks all 124 figures are surely within their limits.")
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
    assert found.figures["figures"] == 2 * 4 * 5 + 4


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


@pytest.mark.parametrize(
    ("name", "precision", "is_told"),
    [
        ("mine:attend", "bf16-mixed", True),
        ("mine:attend", "bf16-true", False),
        ("flash:fa2", "bf16-mixed", False),
    ],
)
def test_where_an_own_attention_is_undecided_autocast_is_looked_at_first(name, precision, is_told):
    arm = _arm([_log(np.random.default_rng(5), looks=2)])
    arm = replace(arm, diff={"attention.implementation": ["baseline", name]})
    study = replace(STUDY, base={**STUDY.base, "precision": precision})
    found = operator_evidence(study, arm, POLICY)
    assert found.state == "undecided"
    said = f"; but first see whether `stability check {name}` says that autocast changes its bits"
    assert (found.decides.endswith(said), "autocast" in found.decides) == (is_told, is_told)


def test_arms_on_other_axes_have_no_operator_level():
    metrics = _log(np.random.default_rng(10), gain=5e-3)
    other = _arm([metrics], axis="precision", diff={"precision": ["a", "b"]})
    found = operator_evidence(STUDY, other, POLICY)
    assert found.state == "not applicable"
    assert "does not change the attention, and no other operator" in found.sentence
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


def _only(metrics, *parts):
    """Return the series whose names hold one of `parts`."""
    return {
        name: one for name, one in metrics.items() if any(f"/{part}/" in name for part in parts)
    }


@pytest.mark.parametrize(
    ("limit", "ratio"),
    # by their geometric means over 20 looks, 1.6 and 1.3 at most, all of these would hold
    [(4.0, 1000.0), (2.0, 30.0), (2.0, 12.0)],
)
def test_one_wild_look_in_20_does_not_hold_and_is_named(limit, ratio):
    metrics = _log(np.random.default_rng(20), looks=20)
    for name, series in metrics.items():
        if name.startswith("deviation/layer_1/") and name.endswith("/error_ratio"):
            series.values[13] = ratio
    policy = PolicyConfig(max_error_ratio=limit)
    found = judge_operator(place_tables(metrics), policy)
    assert found.state == "undecided"
    assert found.p_holds == 1.0
    figure = rf"\w+ in (head \d of )?layer_1 errs {re.escape(three_figures(ratio))}"
    assert re.match(
        rf"Plainly beyond in 1 of 20 looks: {figure} times as far as plain "
        r"attention at step 130, as 19 other figures are in some look\. At worst, ",
        found.sentence,
    )
    assert "if averaged" in found.sentence
    assert found.decides == "what the attention does there, which more looks can't excuse"
    check_form(found)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({}, "`stability check --from RUN` shows it on inputs of the run"),
        ({"program": "python a.py", "setup": ""}, "`stability check` of it alone may show it"),
        ({"program": "python a.py"}, "`stability check` of it alone may show it"),
    ],
)
def test_of_a_wild_look_a_check_is_advised_that_there_is(base, said):
    metrics = _log(np.random.default_rng(21), looks=400, heads=1)
    metrics["deviation/layer_0/dk/gain"].values[7] = -0.02
    found = operator_evidence(replace(STUDY, base={**STUDY.base, **base}), _arm([metrics]), POLICY)
    assert found.decides.startswith("what the attention does there, which more looks can't")
    assert said in found.decides
    check_form(found)


def test_one_wild_gain_does_not_hold_however_many_looks_there_are():
    metrics = _log(np.random.default_rng(21), looks=400, layers=1, heads=1)
    assert judge_operator(place_tables(metrics), POLICY).state == "holds"
    metrics["deviation/layer_0/dk/gain"].values[7] = -0.02
    found = judge_operator(place_tables(metrics), POLICY)
    assert found.state == "undecided"
    said = "Plainly beyond in 1 of 400 looks: dk in layer_0 is 0.9800 times what it should be at "
    assert found.sentence.startswith(f"{said}step 70. At worst, ")
    # where the baseline is as far off in that look, it is the inputs
    metrics["deviation/layer_0/dk/gain_baseline"].values[7] = -0.02
    assert judge_operator(place_tables(metrics), POLICY).state == "holds"


def test_single_looks_within_a_factor_of_the_others_are_no_news():
    metrics = _log(np.random.default_rng(22), looks=20)
    metrics["deviation/layer_1/dq/error_ratio"].values[4] = 4.0
    metrics["deviation/layer_1/dq/gain"].values[4] = 2.7e-3
    assert judge_operator(place_tables(metrics), POLICY).state == "holds"


def test_a_gain_of_one_head_is_judged_where_heads_are_on_record():
    """At an eighth of that in its layer it is within the limit there."""
    metrics = _log(np.random.default_rng(23), heads=8)
    whole = {name: one for name, one in metrics.items() if "head" not in name}
    seen = judge_operator(place_tables(whole), POLICY)
    assert seen.state == "holds"
    assert "head_gain_excluded" not in seen.figures
    series = metrics[deviation_name("layer_1", "dk", "gain", part=head_part(3))]
    series.values = [1.2e-3 + 4e-4 * (look % 5 - 2) for look in range(12)]
    found = judge_operator(place_tables(metrics), POLICY)
    assert found.state == "undecided"
    assert "dk in head 3 of layer_1 is 1.00" in found.sentence
    assert found.figures["gain_excluded"] < POLICY.max_gain < found.figures["head_gain_excluded"]


def _nan_at(metrics, start):
    for name, series in metrics.items():
        if name.startswith(start) and not name.endswith("nonfinite"):
            series.values = [math.nan] * len(series.values)
    return metrics


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda log: _only(log, "out"), "dq, dk and dv in every layer"),
        (lambda log: _only(log, "layer_0", "layer_2"), "out, dq, dk and dv in layer_1"),
        (lambda log: _nan_at(log, "deviation/layer_2/dk/"), "dk in layer_2"),
        (lambda log: _nan_at(log, "deviation/layer_2/dk/gain"), "dk in layer_2"),
    ],
    ids=["forward-alone", "two-layers-alone", "never-finite", "no-finite-gain"],
)
def test_what_no_look_has_seen_is_not_measured_and_is_named(keep, said):
    metrics = keep(_log(np.random.default_rng(24), looks=20))
    found = operator_evidence(STUDY, _arm([metrics, {}]), POLICY)
    assert found.state == "not measured"
    assert found.p_holds == 1.0
    assert found.sentence.startswith(f"Not measured: {said}. Of the rest: At worst, ")
    assert "`probe.backward: true`" in found.decides
    assert len(found.cell) <= 16


def test_harm_in_what_was_seen_is_harm_whatever_was_not():
    metrics = _only(_log(np.random.default_rng(25), gain=5e-3), "out")
    assert operator_evidence(STUDY, _arm([metrics]), POLICY).state == "harmed"


def test_seeds_see_for_one_another():
    rng = np.random.default_rng(26)
    arm = _arm([_only(_log(rng, 20), "out"), _only(_log(rng, 20), "dq", "dk", "dv")])
    assert operator_evidence(STUDY, arm, POLICY).state == "holds"


def test_layers_that_the_arm_leaves_alone_need_not_be_seen():
    metrics = _only(_log(np.random.default_rng(27), looks=20), "layer_1", "layer_2")
    for globs, state in ((["layer_[12]"], "holds"), (["layer_0", "layer_1"], "not measured")):
        arm = _arm([metrics], diff={"attention.layers": [["*"], globs]})
        assert operator_evidence(STUDY, arm, POLICY).state == state
    deeper = _arm([metrics], axis="many", diff={"attention.profile": ["a", "b"]})
    assert "in layer_0 and layer_3" in operator_evidence(_study(4), deeper, POLICY).sentence


def test_of_a_model_without_a_depth_the_layers_on_record_count():
    metrics = _log(np.random.default_rng(28), looks=20)
    foreign = replace(STUDY, base={})
    assert operator_evidence(foreign, _arm([metrics]), POLICY).state == "holds"
    del metrics["deviation/layer_2/dv/gain"]
    said = operator_evidence(foreign, _arm([metrics]), POLICY).sentence
    assert said.startswith("Not measured: dv in layer_2. ")


@pytest.mark.parametrize("who", ["golden", "baseline:plain", "flash:fa2"])
def test_a_comparison_that_raised_leaves_its_layer_unproven(who):
    metrics = _log(np.random.default_rng(29), looks=20)
    event = Event(30, "finding", "layer_1", f"{who}: RuntimeError: no kernel")
    found = operator_evidence(STUDY, _arm([metrics], events=[event]), POLICY)
    assert found.state == "not measured"
    said = f"A comparison failed: in layer_1, {who}: RuntimeError: no kernel. Of the rest: "
    assert found.sentence.startswith(said)
    others = [
        Event(30, "finding", "gradient", f"{who}: RuntimeError: no kernel"),
        Event(30, "finding", "layer_1", "mine: KeyError: a metric of the user's own"),
        Event(30, "alert", "layer_1", f"{who}: RuntimeError: no kernel"),
    ]
    calm = operator_evidence(STUDY, _arm([metrics], events=others), POLICY)
    assert calm.state == "holds"


def test_a_golden_that_always_raised_is_said_where_nothing_was_measured():
    event = Event(0, "finding", "layer_0", "golden: OutOfMemoryError: 3 GiB")
    found = operator_evidence(
        STUDY, _arm([{"train/loss": Series([0], [1.0])}], events=[event]), POLICY
    )
    assert found.state == "not measured"
    assert "golden: OutOfMemoryError: 3 GiB" in found.sentence


def _errs(results, *, ratio, looks=12, spread=1.02):
    """Return what is judged of an attention that errs `ratio` times as far in some results."""
    metrics = _log(np.random.default_rng(7), looks=looks)
    for name, series in metrics.items():
        if name.endswith("/error_ratio") and any(f"/{what}/" in name for what in results):
            series.values = [ratio * spread ** (-1) ** look for look in range(looks)]
    return judge_operator(place_tables(metrics), POLICY)


@pytest.mark.parametrize(
    ("results", "ratio", "is_told"),
    [
        (("dq",), 3.0, True),
        (("dq", "dk"), 3.0, True),
        (("dq",), 5.0, False),
        (("dk",), 3.0, False),
        (("dv",), 3.0, False),
        (("dq", "out"), 3.0, False),
    ],
)
def test_harm_of_dq_alone_that_a_usual_kernel_has_by_design_names_the_policy(
    results, ratio, is_told
):
    found = _errs(results, ratio=ratio)
    assert found.state == "harmed"
    assert ("`policy: {max_error_ratio: 4.0}`" in found.sentence) == is_told


def test_a_gain_beside_it_is_no_design():
    metrics = _log(np.random.default_rng(7), gain=0.01)
    for name, series in metrics.items():
        if name.endswith("dq/error_ratio"):
            series.values = [3.0] * len(series.values)
    assert "by design" not in judge_operator(place_tables(metrics), POLICY).sentence


def test_a_gain_that_the_baseline_has_too_is_no_chance():
    metrics = _log(np.random.default_rng(7))
    for name, series in metrics.items():
        if name.endswith(("/gain", "/gain_baseline")):
            series.values = [2e-3 + 1e-5 * (-1) ** look for look in range(len(series.values))]
    found = judge_operator(place_tables(metrics), POLICY)
    assert found.state == "holds"
    assert "no FAIL yet" not in found.sentence


def test_an_interval_beyond_its_limit_that_is_no_harm_says_why():
    found = _errs(("dq",), ratio=2.6, looks=4, spread=1.08)
    assert found.state == "undecided"
    assert "An interval beyond its limit is no FAIL yet" in found.sentence
    assert f"(p {found.p_harmed:.2g}, a FAIL needs 0.0" in found.sentence
    assert "no FAIL yet" not in _judge(np.random.default_rng(5), looks=2).sentence
