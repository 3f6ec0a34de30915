"""A worse result is found, a better one is no harm, and what can't be told is left open."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from stability.analysis.held_out_losses import held_out_differences, reference_loss_note
from stability.analysis.outcome_evidence import outcome_evidence
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.arms import INIT_SEED
from stability.config.study import PolicyConfig
from stability.records.manifest import Manifest
from stability.records.metric_columns import Series
from stability.records.metric_names import EVAL_LOSS, NONFINITE_WEIGHTS, TRAIN_LOSS
from stability.records.paths import RunPaths
from tests.stability.analysis.evidence_form import check_form

POLICY = PolicyConfig()
ALPHA = 0.014
STEPS = 200
SNAPSHOTS = (0, 20, 100, STEPS)


def _loss(seed: int, step: int) -> float:
    """A loss that falls, with the noise of a batch, which every arm of a seed shares."""
    return 2.0 + 3.0 * math.exp(-step / 10) + 0.02 * seed + 0.05 * (-1) ** step


def _series(values: dict[int, float]) -> Series:
    return Series(list(values), list(values.values()))


def _run(arm, seed, *, more=0.0, state="finished", message="", until=STEPS, spikes=(), **metrics):
    """One run's records; `more` is added to the held-out loss after step 0."""
    evaluated = {step: 2.0 + 0.02 * seed + (more if step else 0.0) for step in SNAPSHOTS}
    trained = {step: _loss(seed, step) + (2.0 if step in spikes else 0.0) for step in range(until)}
    sound = dict.fromkeys(SNAPSHOTS, 0.0)
    found = {EVAL_LOSS: evaluated, NONFINITE_WEIGHTS: sound, TRAIN_LOSS: trained} | metrics
    manifest = Manifest(
        **dict.fromkeys(("study", "arm", "axis"), ""),
        **{name: {} for name in ("config", "diff", "environment", "resolved", "hashes")},
        seed=seed,
        state=state,
        step=until,
        message=message,
    )
    return RecordedRun(
        paths=RunPaths(Path(arm) / f"seed-{seed}"),
        seed=seed,
        manifest=manifest,
        metrics={
            name: _series({s: x for s, x in values.items() if s <= until})
            for name, values in found.items()
        },
        error="",
    )


def _arm(name, runs, axis="attention", role="candidate", until=STEPS):
    runs = {run.seed: run for run in runs}
    return RecordedArm(name=name, axis=axis, diff={}, role=role, until=until, runs=runs)


def _study(candidate, *, baseline=None, others=()):
    """A study of a baseline and the runs of a candidate."""
    seeds = tuple(run.seed for run in candidate)
    plain = baseline or [_run("baseline", seed) for seed in seeds]
    return RecordedStudy(
        folder=Path("made"),
        name="made",
        question="",
        yardstick="",
        base={"train": {"snapshot_steps": SNAPSHOTS}},
        seeds=seeds,
        steps=STEPS,
        early_step=0,
        policy=POLICY,
        arms=(
            _arm("baseline", plain, "none", "baseline"),
            _arm("candidate", candidate),
            *others,
        ),
    )


def _judge(candidate, policy=POLICY, alpha=None, **study):
    made = _study(candidate, **study)
    return outcome_evidence(made, made.arm("candidate"), policy, alpha)


def _worse_by(*differences, **options):
    return [_run("candidate", seed, more=more, **options) for seed, more in enumerate(differences)]


RIGHT = (1e-4, -2e-4, 5e-5, -1e-4, 3e-4)


def test_of_one_seed_without_fault_the_verb_is_singular():
    runs = [_run("candidate", 0, more=1e-4), *(_run("candidate", s, spikes=(90,)) for s in (1, 2))]
    assert "1 of 3 seeds without fault excludes a rate of" in _judge(runs).sentence


def test_small_differences_of_either_sign_hold():
    found = _judge(_worse_by(*RIGHT))
    assert found.state == "holds"
    assert found.p_holds <= ALPHA < found.p_harmed
    assert found.cell == "+3.0e-5 nats"
    assert found.decides == ""
    assert found.sentence == (
        "At step 200 the held-out loss of candidate differs from the baseline's by +3.0e-5 "
        "[-2.6e-4, +3.2e-4] nats a token (limit +0.005), over 5 seeds, by +3.0e-4 in the worst, "
        "seed 4. "
        "No seed is lost or, from step 50 on, has spikes of its own; 5 seeds without fault exclude "
        "a rate of bad seeds above 57%."
    )


def test_a_loss_worse_than_the_margin_in_every_seed_is_harm():
    found = _judge(_worse_by(0.010, 0.011, 0.009, 0.0105, 0.0095))
    assert found.state == "harmed"
    assert found.p_harmed <= ALPHA < found.p_holds
    assert found.cell == "+0.01 nats"
    check_form(found)


def test_a_tiny_difference_keeps_its_sign_and_digits():
    found = _judge(_worse_by(-1.7e-5, -1.6e-5, -1.8e-5))
    assert found.cell == "-1.7e-5 nats"
    assert "by -1.7e-5 [-2.0e-5, -1.4e-5] nats a token" in found.sentence
    assert _judge(_worse_by(0.0, 0.0, 0.0)).cell == "0 nats"


@pytest.mark.parametrize("gain", [0.004, 0.05, 3.0])
def test_better_than_the_baseline_is_never_harm(gain):
    found = _judge(_worse_by(*(-gain * (1 + 0.01 * seed) for seed in range(5))))
    assert found.state == "holds"
    assert found.p_harmed > 0.5
    # not equivalent, and that is no failure
    assert (found.figures["p_not_better"] > ALPHA) == (gain > 0.005)
    # 3 nats better is no rounding: the reader is told to look for a leak
    assert ("more than rounding does: see that no target" in found.sentence) == (gain > 0.005)


def test_a_difference_that_may_lie_on_either_side_of_the_margin_is_undecided():
    found = _judge(_worse_by(0.001, 0.006, -0.002, 0.004, 0.0))
    assert found.state == "undecided"
    assert found.decides == "8 seeds, at this scatter (--seeds 8)"
    check_form(found)
    wide = _judge(_worse_by(0.001, 0.012, -0.004, 0.008, 0.0))
    assert wide.decides == "more than 20 seeds, at this scatter"


@pytest.mark.parametrize("count", [3, 5, 7])
def test_p_values_are_those_of_two_one_sided_t_tests(count):
    differences = [0.001, 0.0052, 0.0031, 0.0044, 0.0012, 0.006, 0.0035][:count]
    found = _judge(_worse_by(*differences))
    judged = differences[:5] if count >= 5 else differences  # 7 seeds are judged on 5
    # the differences are those of two sums, each rounded by 2e-16
    upper = stats.ttest_1samp(judged, POLICY.margin_nats, alternative="less").pvalue
    lower = stats.ttest_1samp(judged, -POLICY.margin_nats, alternative="greater").pvalue
    assert found.p_holds == pytest.approx(upper, rel=1e-6)
    assert found.p_harmed == pytest.approx(1 - upper, rel=1e-6)
    assert found.figures["p_not_better"] == pytest.approx(lower, rel=1e-6)


def test_the_bits_of_the_baseline_hold():
    found = _judge(_worse_by(0.0, 0.0, 0.0))
    assert (found.state, found.p_holds, found.p_harmed) == ("holds", 0.0, 1.0)
    on_the_margin = _judge(_worse_by(0.0, 0.0, 0.0), PolicyConfig(margin_nats=1e-300))
    assert on_the_margin.state == "holds"


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_seeds_than_the_first_look_are_undecided(count):
    found = _judge(_worse_by(*RIGHT[:count]))
    assert found.state == "undecided"
    assert found.decides == "at least 3 seeds (--seeds 3)"


def test_a_candidate_that_diverges_late_in_every_seed_is_harmed():
    # at step 20, where weights are compared, it is as good as the baseline
    lost = _worse_by(*RIGHT, state="diverged", message="the loss is not finite", until=150)
    found = _judge(lost)
    assert (found.state, found.p_harmed, found.p_holds) == ("harmed", 0.0, 1.0)
    assert found.cell == "lost in 5/5"
    assert found.sentence == (
        "In 5 of 5 seeds candidate is lost where the baseline is sound (limit 0), first in seed 0: "
        "the loss is not finite."
    )


def test_one_seed_that_diverges_is_enough_even_before_the_first_look():
    runs = _worse_by(*RIGHT[:2])
    runs[1] = _run("candidate", 1, state="diverged", until=30)
    assert _judge(runs).state == "harmed"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({NONFINITE_WEIGHTS: {0: 0.0, 100: 7.0, 200: 9.0}}, "7 weights are NaN or infinite at"),
        ({EVAL_LOSS: {0: 2.0, 100: 2.0, 200: math.nan}}, "the held-out loss is nan at step 200"),
        ({EVAL_LOSS: {0: 2.0, 100: math.inf, 200: 2.0}}, "the held-out loss is inf at step 100"),
        ({TRAIN_LOSS: {0: 2.0, 60: math.nan, 61: 2.0}}, "the training loss is nan at step 60"),
    ],
)
def test_what_is_no_number_at_any_step_is_harm(metrics, said):
    runs = _worse_by(*RIGHT)
    runs[3] = _run("candidate", 3, **metrics)
    found = _judge(runs)
    assert (found.state, found.p_harmed) == ("harmed", 0.0)
    assert said in found.sentence


def test_a_candidate_lost_before_its_baseline_is_harmed_and_one_lost_with_it_is_not_judged():
    baseline = [_run("baseline", seed) for seed in range(5)]
    baseline[2] = _run("baseline", 2, **{NONFINITE_WEIGHTS: {0: 0.0, 100: 3.0, 200: 3.0}})
    for first, state in ((20, "harmed"), (100, "undecided"), (200, "undecided")):
        runs = _worse_by(*RIGHT)
        lost = {step: 5.0 if step >= first else 0.0 for step in SNAPSHOTS}
        runs[2] = _run("candidate", 2, **{NONFINITE_WEIGHTS: lost})
        assert _judge(runs, baseline=baseline).state == state, first


def test_a_step_that_the_baseline_has_not_reached_tells_nothing_yet():
    runs = _worse_by(*RIGHT)
    runs[4] = _run("candidate", 4, **{TRAIN_LOSS: {0: 2.0, 150: math.nan}})
    for until, state in ((100, "undecided"), (160, "harmed")):
        baseline = [_run("baseline", seed) for seed in range(5)]
        baseline[4] = _run("baseline", 4, state="running", until=until)
        assert _judge(runs, baseline=baseline).state == state, until


def test_one_loss_that_is_no_number_in_both_runs_is_no_harm():
    bad = {TRAIN_LOSS: {step: math.inf if step == 60 else _loss(3, step) for step in range(STEPS)}}
    baseline = [_run("baseline", seed) for seed in range(5)]
    baseline[3] = _run("baseline", 3, **bad)
    runs = _worse_by(*RIGHT)
    runs[3] = _run("candidate", 3, **bad)
    assert _judge(runs, baseline=baseline).state == "holds"
    assert _judge(runs).state == "harmed"


def test_a_seed_whose_baseline_is_lost_is_not_judged():
    baseline = [_run("baseline", seed) for seed in range(5)]
    baseline[2] = _run("baseline", 2, state="diverged", message="not finite from 9 on", until=9)
    runs = _worse_by(*RIGHT)
    runs[2] = _run("candidate", 2, state="diverged", until=9)
    found = _judge(runs, baseline=baseline)
    assert found.state == "undecided"
    assert found.decides == "a baseline that trains: with seed 2 not finite from 9 on"
    assert "Seed 2 is not judged, since the baseline is lost there (not finite" in found.sentence
    assert found.figures["seeds"] == 4
    runs[4] = _run("candidate", 4, state="diverged", until=9)
    assert _judge(runs, baseline=baseline).state == "harmed"


def test_a_seed_without_an_end_leaves_the_answer_open():
    runs = _worse_by(*RIGHT)
    runs[4] = _run("candidate", 4, state="failed", message="OSError", until=150)
    found = _judge(runs)
    assert found.state == "undecided"
    assert found.decides == (
        "let the study run to its end: candidate has no held-out loss at step 200 with seed 4 "
        "(failed: OSError)"
    )


def test_a_study_that_holds_out_nothing_is_not_measured_but_divergence_counts():
    runs = _worse_by(*RIGHT, **{EVAL_LOSS: {}})
    found = _judge(runs)
    assert found.state == "not measured"
    assert found.decides == "run the study with held_out.share above 0"
    runs[0] = _run("candidate", 0, state="diverged", until=60, **{EVAL_LOSS: {}})
    assert _judge(runs).state == "harmed"


def test_spikes_of_the_candidate_alone_keep_it_open_and_then_fail_it():
    five = _judge(_worse_by(*RIGHT, spikes=(100, 130)))
    assert five.state == "undecided"
    assert five.decides == "more seeds, which tell whether its spikes are chance"
    assert five.figures["spike_p"] == 1 / 32
    assert "spikes alone in 5 seeds, the baseline's alone in 0 (p 0.031; first at step 100" in (
        five.sentence
    )
    eight = _judge(_worse_by(*RIGHT, 0.0, 1e-4, -1e-4, spikes=(100,)))
    assert eight.state == "harmed"
    assert eight.p_harmed == 2 / 2**8
    # of 8 seeds one is told apart by nothing: 7 against 0 are not enough for two tests
    seven = _worse_by(*RIGHT, 0.0, 1e-4, -1e-4, spikes=(100,))
    seven[7] = _run("candidate", 7, more=-1e-4)
    found = _judge(seven)
    assert (found.state, found.p_harmed) == ("undecided", 2 / 2**7)


def test_spikes_that_the_baseline_shares_are_no_harm():
    baseline = [_run("baseline", seed, spikes=(100,)) for seed in range(8)]
    found = _judge(_worse_by(*RIGHT, 0.0, 1e-4, -1e-4, spikes=(105,)), baseline=baseline)
    assert found.state == "holds"
    assert found.figures["clean_seeds"] == 8
    # one seed alone may be chance, and is told
    one = _worse_by(*RIGHT)
    one[3] = _run("candidate", 3, spikes=(90,))
    found = _judge(one)
    assert found.state == "holds"
    assert "4 of 5 seeds without fault exclude a rate of bad seeds above 66%" in found.sentence


@pytest.mark.parametrize(
    ("blind", "said"),
    [((0, 1, 2, 3, 4), "5 of 5 seeds have no more"), ((3,), "1 of 5 seeds has no more")],
)
def test_runs_too_short_for_the_spike_rule_do_not_claim_that_there_are_none(blind, said):
    """Jumps of 5 nats at steps 20, 30 and 35 of 40: the rule has no history to see them by."""
    short = {step: _loss(0, step) + 5.0 * (step in (20, 30, 35)) for step in range(40)}
    runs = _worse_by(*RIGHT)
    for seed in blind:
        runs[seed] = _run("candidate", seed, **{TRAIN_LOSS: short})
    found = _judge(runs)
    assert found.state == "holds"
    assert found.sentence.endswith(
        "No seed is lost; spikes can't be seen before 50 losses, and "
        f"{said}; 5 seeds that are not lost exclude a rate of lost seeds above 57%."
    )
    assert found.figures["clean_seeds"] == 5 - len(blind)
    assert found.figures["lost_seed_rate_excluded"] == pytest.approx(1 - ALPHA ** (1 / 5))
    assert found.figures["spike_blind_seeds"] == len(blind)
    assert _judge(_worse_by(*RIGHT)).figures["spike_blind_seeds"] == 0


def test_one_seed_is_told_as_one():
    """Of a study before its first look, which `stability verdict` shows all the same."""
    short = {TRAIN_LOSS: dict.fromkeys(range(40), 2.0)}
    baseline, one = [_run("baseline", 0)], [_run("candidate", 0, **short)]
    said = _judge(one, baseline=baseline).sentence
    assert "1 of 1 seed has no more; 1 seed that is not lost excludes a rate" in said


def test_a_seed_with_spikes_is_told_beside_those_too_short_to_show_any():
    runs = _worse_by(*RIGHT)
    runs[1] = _run("candidate", 1, spikes=(100,))
    runs[3] = _run("candidate", 3, **{TRAIN_LOSS: dict.fromkeys(range(40), 2.0)})
    assert _judge(runs).sentence.endswith(
        "Its training loss spikes alone in 1 seed, the baseline's alone in 0 (p 0.5; first at "
        "step 100 of seed 1); spikes can't be seen before 50 losses, and 1 of 5 seeds has no "
        "more; 5 seeds that are not lost exclude a rate of lost seeds above 57%."
    )


def test_the_margin_stands_beside_the_scatter_of_other_initial_weights():
    seeds = _arm("init_seed", [_run("init_seed", s, more=0.1 * s) for s in range(5)], INIT_SEED)
    found = _judge(_worse_by(*RIGHT), others=(seeds,))
    assert found.figures["init_seed_sd"] == pytest.approx(np.std(0.12 * np.arange(5), ddof=1))
    assert "Other initial weights scatter it by 0.19" in found.sentence
    assert found.figures["margin"] == 0.005


def test_the_rate_of_bad_seeds_that_sound_ones_exclude():
    for count in (5, 8):
        rate = _judge(_worse_by(*RIGHT, 0.0, 0.0, 0.0)[:count]).figures["bad_seed_rate_excluded"]
        # the chance that so many seeds are sound at this rate
        assert (1 - rate) ** count == pytest.approx(ALPHA)


def test_differences_are_paired_at_every_step():
    study = _study(_worse_by(0.25, -0.5))
    found = held_out_differences(study, study.arm("candidate"))
    assert list(found) == list(SNAPSHOTS)
    assert found[0].is_zero
    assert found[20].per_seed == pytest.approx({0: 0.25, 1: -0.5})
    figures = _judge(_worse_by(0.25, -0.5)).figures
    assert (figures["worst_difference"], figures["worst_step"]) == (0.0, 0)
    assert figures["difference_step_20"] == pytest.approx(-0.125)


def _unasked(*differences, policy=POLICY, role="rerun", **options):
    """What is noted of a study whose reference is worse by so much in each seed."""
    runs = [_run("fp32", seed, more=more, **options) for seed, more in enumerate(differences)]
    plain = [_run("rerun", seed) for seed in range(len(differences))]
    study = _study(plain, others=(_arm("fp32", runs, "precision", "reference"),))
    baseline, arm, reference = study.arms
    arms = (baseline, replace(arm, role=role), reference)
    return reference_loss_note(replace(study, arms=arms, policy=policy))


def test_where_nothing_is_in_question_the_references_loss_is_told():
    # 0.01, 0.02, 0.03 seed by seed: 0.02 -+ 2.92 * 0.01 / sqrt(3)
    assert _unasked(0.01, 0.02, 0.03) == (
        f"No arm is in question, so nothing is judged. At step {STEPS} the held-out loss of fp32 "
        "is +0.02 [+0.0031, +0.037] nats a token from the baseline's (mean of 3 seeds, 90 % "
        "interval)."
    )
    assert _unasked(-0.01).endswith("is -0.01 nats a token from the baseline's (mean of 1 seed).")
    lost = {EVAL_LOSS: dict.fromkeys(SNAPSHOTS, math.nan)}
    assert _unasked(0.0, 0.0, **lost).endswith("of fp32 is no number in seed 0, 1.")
    assert _unasked(0.0, **{EVAL_LOSS: {}}).endswith("can't be compared with the baseline's.")


def test_where_an_arm_is_in_question_the_verdict_says_more():
    assert _unasked(0.01, 0.02, 0.03, role="candidate") == ""
    asked = replace(POLICY, candidates=("rerun",))
    assert _unasked(0.01, 0.02, 0.03, policy=asked) == ""


def test_a_control_that_ends_early_is_judged_at_its_own_end():
    made = _study(_worse_by(*RIGHT))
    nudge = _arm("nudge", [_run("nudge", s, until=20) for s in range(5)], "nudge", "nudge", 20)
    found = outcome_evidence(made, nudge, POLICY)
    assert (found.state, found.figures["step"]) == ("holds", 20)


def test_the_baseline_is_not_judged_against_itself():
    made = _study(_worse_by(*RIGHT))
    assert outcome_evidence(made, made.arm("baseline"), POLICY).state == "not applicable"


def test_another_share_of_alpha_can_be_asked_for():
    runs = _worse_by(0.0, 0.004, 0.001, 0.003, 0.0045)
    at = {alpha: _judge(runs, alpha=alpha) for alpha in (0.014, 0.05)}
    assert at[0.014].p_holds == at[0.05].p_holds
    assert [found.state for found in at.values()] == ["undecided", "holds"]


def test_on_the_margin_errors_on_either_side_are_as_rare_as_asked():
    dice = np.random.default_rng(8)
    draws = POLICY.margin_nats + 0.002 * dice.standard_normal((300, 5))
    states = [_quick(differences) for differences in draws]
    # 4.2 of 300 are expected at 1.4 %; 11 or more come by chance once in 250
    assert all(0 < states.count(state) <= 10 for state in ("holds", "harmed"))


def _quick(differences):
    """The state of a study that has logged nothing but the held-out loss at the end."""

    def run(arm, seed, loss):
        return _run(arm, seed, **{EVAL_LOSS: {STEPS: float(loss)}, TRAIN_LOSS: {}})

    baseline = [run("baseline", seed, 0.0) for seed in range(5)]
    runs = [run("candidate", seed, loss) for seed, loss in enumerate(differences)]
    return _judge(runs, baseline=baseline).state
