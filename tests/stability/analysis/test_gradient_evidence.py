"""What the gradient level says of an arm, from looks with known figures."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from stability.analysis.gradient_evidence import gradient_evidence
from stability.analysis.number_text import three_figures
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.study import PolicyConfig
from stability.records.events import GRADIENT_IN_PART, Event
from stability.records.metric_columns import Series
from stability.records.metric_names import gradient_name
from stability.records.paths import RunPaths
from tests.stability.analysis.evidence_form import check_form

POLICY = PolicyConfig()
ATTENTION = {"attention.implementation": ["baseline", "flash"]}


def _run(ratios, *, share=0.001, share_se=0.002, seed=0, events=()):
    steps = list(range(len(ratios)))
    looks = sum(not math.isnan(ratio) for ratio in ratios)
    last = {"share": share, "share_se": share_se, "coherence": 1 + share * (looks - 1)}
    metrics = {gradient_name("all", "ratio"): Series(steps, list(ratios))}
    metrics |= {gradient_name("all", name): Series([steps[-1]], [x]) for name, x in last.items()}
    metrics[gradient_name("all", "looks")] = Series([steps[-1]], [float(looks)])
    as_trained = gradient_name("all", "ratio", as_trained=True)
    metrics[as_trained] = Series(steps, [1.1] * len(steps))
    return RecordedRun(
        paths=RunPaths(Path("nowhere")),
        seed=seed,
        manifest=None,
        metrics=metrics,
        events=tuple(events),
        error="",
    )


def _judge(*runs, diff=None, policy=POLICY, precision="bf16-mixed"):
    arm = RecordedArm(
        name="candidate",
        axis="attention",
        diff=ATTENTION if diff is None else diff,
        role="candidate",
        until=60,
        runs={run.seed: run for run in runs},
    )
    study = RecordedStudy(
        folder=Path("nowhere"),
        name="study",
        question="",
        yardstick="",
        base={"precision": precision},
        seeds=(3, 0, 1),
        steps=60,
        early_step=0,
        policy=policy,
        arms=(arm,),
    )
    return gradient_evidence(study, arm, policy)


def _ratios(mean, n=20, spread=0.05):
    logs = spread * np.random.default_rng(0).standard_normal(n)
    return list(mean * np.exp(logs - logs.mean()))


def test_small_errors_that_average_out_hold():
    found = _judge(_run(_ratios(0.93)))
    assert found.state == "holds"
    assert found.cell == "0.93x f 0.001"
    assert len(found.cell) <= 16
    assert found.sentence == (
        "The error of the whole model's gradient is 0.930 [0.909, 0.952] times the baseline's "
        "(limit 2), and a share of 0.001 [-0.004, 0.006] of it is the same at all 20 looks (limit "
        "0.01). As trained, with the rounding of all other layers, the error is 1.10 times the "
        "baseline's, which decides nothing."
    )
    assert found.decides == ""
    assert found.p_holds < 0.05 < found.p_harmed
    assert found.figures["ratio"] == pytest.approx(0.93)
    assert found.figures["share_high"] == pytest.approx(0.001 + 2.378 * 0.002, abs=1e-5)


@pytest.mark.parametrize(("p", "state"), [(0.01, "holds"), (0.03, "undecided")])
def test_the_share_is_judged_at_the_error_rate_of_one_look_of_the_study(p, state):
    se = 0.002 / float(t.isf(p, 19))
    found = _judge(_run(_ratios(0.93), share=0.008, share_se=se))
    # a hundredth of the level is kept for candidates whose error is too small for any share
    assert found.p_holds == pytest.approx(p / 0.99)
    assert found.state == state


def test_the_parameters_that_err_most_are_named():
    run = _run(_ratios(0.93))
    steps = list(range(20))
    for group, ratio in (("query", 0.8), ("mlp", 1.7)):
        run.metrics[f"gradient/{group}/ratio"] = Series(steps, [ratio] * 20)
    said = "(limit 2), 1.70 times in the worst group of parameters, mlp, and a share"
    assert said in _judge(run).sentence
    run.metrics["gradient/other/ratio"] = Series(steps, [1.9] * 20)
    assert "other (those in no named group), and a share" in _judge(run).sentence


def test_a_large_error_is_harm_even_where_it_averages_out():
    found = _judge(_run(_ratios(22)))
    assert found.state == "harmed"
    assert found.cell == "22x f 0.001"
    check_form(found)
    assert found.p_harmed < 1e-6


def test_a_bias_is_harm_even_where_it_is_small():
    found = _judge(_run(_ratios(1.2), share=0.039, share_se=0.006))
    assert found.state == "harmed"
    assert found.cell == "1.20x f 0.039"
    assert found.p_harmed < 0.001


def test_a_share_at_its_limit_is_undecided_and_more_looks_would_tell():
    found = _judge(_run(_ratios(1.0), share=0.008, share_se=0.002))
    assert found.state == "undecided"
    assert found.decides == (
        "about 94 more looks, by more steps or a smaller `probe.gradient_every`, in a study of "
        "another name; more seeds add none, since only the first is looked at"
    )
    check_form(found)
    assert min(found.p_harmed, found.p_holds) > 0.05


def test_a_ratio_about_its_limit_is_undecided():
    found = _judge(_run(_ratios(2.0, spread=0.4)))
    assert found.state == "undecided"
    assert "more looks" in found.decides


def test_with_few_looks_the_ratio_alone_is_judged():
    few = _judge(_run(_ratios(0.93, n=12)))
    assert few.state == "undecided"
    assert few.decides.startswith("8 more looks, by more steps")
    assert "12 looks are too few to tell whether it adds up" in few.sentence
    assert math.isnan(few.p_holds)
    assert _judge(_run(_ratios(9, n=12))).state == "harmed"
    # a share that would be judged harmed, were there enough looks
    assert _judge(_run(_ratios(1, n=12), share=0.5, share_se=0.01)).state == "undecided"


def test_what_looks_leave_out_is_said_once_whatever_they_show():
    events = [Event(step, "finding", "gradient", GRADIENT_IN_PART) for step in (1, 2)]
    events.append(Event(1, "finding", "layer_0", "seen in part: that is another's"))
    for ratios in (_ratios(1.0), _ratios(9.0), [0.0] * 20, [1.0, math.nan]):
        whole, part = _judge(_run(ratios)), _judge(_run(ratios, events=events))
        assert not whole.in_part
        assert part.state == whole.state
        assert part.in_part == f"S{GRADIENT_IN_PART[1:]}."
        assert part.sentence == f"{whole.sentence} {part.in_part}"
        marked = f"{whole.cell.partition(' f ')[0]}, in part"
        assert part.cell == (whole.cell if whole.cell == "no gradient" else marked)


def test_looks_that_could_not_be_made_are_told_and_more_of_them_are_not_the_advice():
    event = Event(3, "finding", "gradient", "golden: ValueError: a part of the loss is hidden")
    found = _judge(_run(_ratios(1.0, n=2), events=[event]))
    assert found.state == "undecided"
    assert "Not every look could be made: a part of the loss is hidden." in found.sentence
    assert found.decides.startswith("mend that first; 18 more looks")


def test_one_look_says_nothing():
    found = _judge(_run([1.0]))
    assert found.state == "undecided"
    assert math.isnan(found.p_harmed)


def test_a_candidate_that_gives_no_number_is_harmed_for_sure():
    text = "candidate: RuntimeError: no kernel for this shape"
    event = Event(4, "finding", "gradient", text)
    ratios = [1.0] * 4 + [math.nan] * 2
    found = _judge(_run(ratios, events=[event]))
    assert (found.state, found.p_harmed) == ("harmed", 0.0)
    assert found.sentence == (
        "The candidate gave no gradient at 2 of 6 looks, first at step 4: RuntimeError: no kernel "
        "for this shape."
    )
    assert found.cell == "no gradient"
    assert "its gradient is not finite" in _judge(_run(ratios)).sentence


def test_an_exact_candidate_holds():
    found = _judge(_run([0.0] * 20, share=0.0, share_se=0.0))
    assert (found.state, found.p_holds, found.cell) == ("holds", 0.0, "exact")


def test_to_be_far_more_exact_is_no_harm_whatever_is_common():
    found = _judge(_run(_ratios(0.02), share=0.5, share_se=0.01))
    assert found.state == "holds"
    assert found.p_harmed > 0.5
    assert _judge(_run(_ratios(0.5), share=0.5, share_se=0.01)).state == "harmed"


@pytest.mark.parametrize("share_p", [0.0139, 0.3])
def test_the_two_ways_to_hold_share_the_level_of_one_look(share_p):
    """Either at its own level would be one: together they would err twice as often."""
    share_se = 0.002 / float(t.isf(share_p, 19))
    logs = np.linspace(-0.05, 0.05, 20)
    error = logs.std(ddof=1) / math.sqrt(20)
    ratios = list(0.1 * np.exp(logs - error * float(t.isf(0.0139, 19))))
    assert _judge(_run(ratios, share=0.008, share_se=share_se)).state == "undecided"


def test_a_share_is_no_harm_where_the_error_may_be_too_small_for_it():
    ratios = [0.1 * math.exp((-1) ** look * 0.3) for look in range(20)]
    found = _judge(_run(ratios, share=0.5, share_se=0.01))
    assert found.state == "undecided"
    assert found.p_harmed > 0.05


@pytest.mark.parametrize("ratio", [1000.0, 30.0, 12.0])
def test_one_wild_look_in_20_does_not_hold_and_is_named(ratio):
    ratios = _ratios(0.93)
    ratios[13] = ratio
    found = _judge(_run(ratios))
    assert found.state == "undecided"
    assert found.p_holds == 1.0
    assert found.sentence.startswith(
        f"Plainly beyond in 1 of 20 looks: the gradient errs {three_figures(ratio)} times as far "
        "as the baseline's at step 13. The error of the whole model's gradient is "
    )
    assert "more looks can't excuse" in found.decides
    # a look that stands out and is within the limit is none
    ratios[13] = 1.9
    assert _judge(_run(ratios)).state == "holds"


@pytest.mark.parametrize(
    "said",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 8 bytes",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        "MemoryError: ",
    ],
)
def test_want_of_memory_is_no_harm_and_no_hold(said):
    event = Event(4, "finding", "gradient", f"candidate: {said}")
    ratios = [*_ratios(0.93), math.nan]
    found = _judge(_run(ratios, events=[event]))
    assert found.state == "not measured"
    assert found.p_holds == 1.0
    assert found.p_harmed > 0.5
    assert found.sentence.startswith(
        f"No gradient was computed at 1 of 21 looks, first at step 20: {said.rstrip(': ')}. "
    )
    assert len(found.cell) <= 16
    assert _judge(_run([math.nan], events=[event])).state == "not measured"
    # what the other looks show counts, and so does a fault of its own beside
    wrong = [*_ratios(9.0), math.nan]
    assert _judge(_run(wrong, events=[event])).state == "harmed"
    own = Event(6, "finding", "gradient", "candidate: its gradient is not finite")
    found = _judge(_run(ratios, events=[event, own]))
    assert (found.state, found.p_harmed) == ("harmed", 0.0)
    assert "not finite" in found.sentence


def test_a_kernel_that_asks_for_too_much_shared_memory_is_at_fault_itself():
    text = "candidate: OutOfResources: out of resource: shared memory, Required: 300000"
    event = Event(4, "finding", "gradient", text)
    assert _judge(_run([1.0, math.nan], events=[event])).state == "harmed"


def test_an_exact_baseline_is_no_yardstick():
    found = _judge(_run([math.inf] * 20))
    assert found.state == "undecided"
    assert found.decides == "a baseline with rounding of its own"


def test_where_it_does_not_apply_the_level_says_so():
    found = _judge(diff={"optimizer.eps": [1e-8, 1e-6]})
    assert found.state == "not applicable"
    assert found.sentence == ("The level does not apply: candidate does not change the attention.")
    assert _judge(_run([1.0]), precision="64-true").state == "not applicable"


def test_without_a_look_it_is_not_measured():
    found = _judge(replace(_run([1.0]), metrics={}))
    assert found.state == "not measured"
    assert "probe.gradient_every" in found.decides


def test_the_first_seed_that_was_looked_at_is_judged():
    found = _judge(_run(_ratios(5), seed=1), _run(_ratios(0.9), seed=3))
    assert found.figures["ratio"] == pytest.approx(0.9)


def test_limits_are_the_policys():
    run = _run(_ratios(3), share=0.03)
    assert _judge(run).state == "harmed"
    wide = PolicyConfig(max_gradient_ratio=4.0, max_share=0.05)
    assert _judge(run, policy=wide).state == "holds"


def test_cells_are_short_for_any_figure():
    for mean, share in ((1e7, 0.99), (123.4, -0.004), (0.001, 0.5)):
        assert len(_judge(_run(_ratios(mean), share=share)).cell) <= 16


def test_a_share_that_rounds_to_zero_has_no_sign():
    assert _judge(_run(_ratios(0.93), share=-0.0001)).cell.endswith(" f 0.000")
