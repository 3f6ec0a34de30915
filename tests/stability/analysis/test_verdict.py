"""The verdict by intersection: what passes, fails, can not be told, and what is no assay."""

import math
from dataclasses import replace

import pytest

from stability.analysis.answer import answer_of
from stability.analysis.assay import ArmAssay
from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.cli.main import main
from stability.config.study import PolicyConfig
from stability.records.metric_columns import Series
from stability.records.metric_names import EVAL_LOSS, NONFINITE_WEIGHTS, TRAIN_LOSS
from stability.report.view.evidence import evidence_rows, headline

SENSITIVE = ArmAssay(state="sensitive", sentence="all 11 planted faults were found", faults=11)
NO_SCALE = ArmAssay(state="blind", sentence="scale_gain was missed at the operator", faults=11)


def _evidence(level, state, p_harmed=math.nan, p_holds=math.nan):
    return LevelEvidence(
        level=level, state=state, sentence=f"{level} {state}.", p_harmed=p_harmed, p_holds=p_holds
    )


HOLDS = {level: _evidence(level, "holds", 0.9, 1e-6) for level in LEVELS}
HARMED = {level: _evidence(level, "harmed", 1e-9, 1.0) for level in LEVELS}


def _with(found, **changed):
    return {**found, **{evidence.level: evidence for evidence in changed.values()}}


def _judge(study, by_arm, assay=SENSITIVE, **options):
    levels = {
        level: lambda study, arm, policy, level=level: by_arm[arm.name][level] for level in LEVELS
    }
    options = {"changes": lambda study, policy: [], **options}
    return judge_arms(study, PolicyConfig(), levels=levels, assay=lambda *_: assay, **options)


@pytest.fixture
def study(synthetic, tmp_path):
    """Three seeds; its arm `flash_all_bf16` plays the part that is broken on purpose."""
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2])
    return with_broken(read_study(folder))


def with_broken(study):
    return replace(study, arms=tuple(_as_role(arm) for arm in study.arms))


def _as_role(arm):
    return replace(arm, role="broken") if arm.name == "flash_all_bf16" else arm


def _outcome(study, fa2, broken=HARMED, **options):
    judged = _judge(study, {"flash_fa2": fa2, "flash_all_bf16": broken}, **options)
    return judged.arm("flash_fa2")


def test_all_levels_hold_and_harm_would_have_been_seen(study):
    found = _outcome(study, HOLDS)
    assert found.outcome == "PASS"
    assert found.sentence == (
        f"the operator, gradient, training and outcome levels hold; {SENSITIVE.sentence}"
    )
    assert found.seeds == 3


@pytest.mark.parametrize("field", ["error", "breach"])
@pytest.mark.parametrize("arm", ["flash_fa2", "baseline", "flash_all_bf16"])
def test_no_arm_passes_while_a_run_is_refused_in_a_seed_that_no_look_has_reached(
    synthetic, tmp_path, arm, field
):
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2, 3])
    study = with_broken(read_study(folder))
    found = _outcome(study, HOLDS)
    assert (found.outcome, found.seeds) == ("PASS", 3)

    def refuse(one):
        spoiled = replace(one.runs[3], **{field: "no pair: switch a is 1 in one, 2 in the other"})
        return replace(one, runs={**one.runs, 3: spoiled}) if one.name == arm else one

    found = _outcome(replace(study, arms=tuple(map(refuse, study.arms))), HOLDS)
    assert found.outcome == "INCONCLUSIVE"
    assert found.sentence == (
        "the operator, gradient, training and outcome levels hold, but not every pair does: "
        f"{arm}, seed 3: no pair: switch a is 1 in one, 2 in the other"
    )


@pytest.mark.parametrize("arm", ["flash_fa2", "flash_all_bf16"])
def test_a_pass_says_what_of_a_run_it_rests_on_is_not_proven(study, arm):
    def leave_open(one):
        runs = {seed: replace(run, unwitnessed="what a executed") for seed, run in one.runs.items()}
        return replace(one, runs=runs) if one.name == arm else one

    found = _outcome(replace(study, arms=tuple(map(leave_open, study.arms))), HOLDS)
    assert found.outcome == "PASS"
    assert found.sentence.endswith(f"{SENSITIVE.sentence}; unproven: what a executed")


def test_a_pass_says_how_many_more_things_are_not_proven(study):
    def leave_open(one):
        runs = {seed: replace(x, unseen=("b", "c")) for seed, x in one.runs.items()}
        runs[1] = replace(runs[1], unwitnessed="a")
        return replace(one, runs=runs) if one.name == "flash_fa2" else one

    found = _outcome(replace(study, arms=tuple(map(leave_open, study.arms))), HOLDS)
    assert found.outcome == "PASS"
    assert found.sentence.endswith("; unproven: b (and 2 more: `stability verify`)")


def test_a_pass_says_which_limits_are_wider_than_usual(study):
    by_arm = {"flash_fa2": HOLDS, "flash_all_bf16": HARMED}
    levels = {
        level: lambda study, arm, policy, level=level: by_arm[arm.name][level] for level in LEVELS
    }
    said = {}
    ratios = {ratio: {"max_error_ratio": ratio} for ratio in (1.5, 2.0, 4.0)}
    for ratio, limits in {**ratios, 0.08: {"window_limit": 0.08}}.items():
        policy = PolicyConfig(**limits, candidates=("flash_fa2",))
        judged = judge_arms(
            study,
            policy,
            levels=levels,
            assay=lambda *_: SENSITIVE,
            changes=lambda *_: [],
        )
        said[ratio] = judged.arm("flash_fa2").sentence
    assert said[1.5] == said[2.0]
    assert said[4.0] == f"{said[2.0]}; at wider limits than usual: an error ratio of 4, not 2"
    assert said[0.08] == (
        f"{said[2.0]}; at wider limits than usual: a control's |log E| of 0.08, not 0.04"
    )


def test_a_pass_says_which_level_was_seen_in_part(study):
    gradient = replace(HOLDS["gradient"], in_part="Seen in part: by one eye.")
    whole, part = (_outcome(study, levels) for levels in (HOLDS, _with(HOLDS, one=gradient)))
    assert part.outcome == "PASS"
    assert part.sentence == f"{whole.sentence}; the gradient level is seen in part"


@pytest.mark.parametrize("level", LEVELS)
def test_one_level_that_does_not_hold_is_enough(study, level):
    for state, outcome in (
        ("harmed", "FAIL"),
        ("undecided", "INCONCLUSIVE"),
        ("not measured", "INCONCLUSIVE"),
    ):
        one = _evidence(level, state, 1e-9 if state == "harmed" else 0.5, 0.5)
        found = _outcome(study, _with(HOLDS, one=one))
        assert found.outcome == outcome, state
        assert level in found.sentence


def test_a_level_that_does_not_apply_is_named_and_the_rest_decides(study):
    silent = _evidence("operator", "not applicable")
    found = _outcome(study, _with(HOLDS, one=silent))
    assert found.outcome == "PASS"
    assert "; the operator level does not apply;" in found.sentence
    none = {level: _evidence(level, "not applicable") for level in LEVELS}
    assert _outcome(study, none).outcome == "INCONCLUSIVE"


def test_a_level_holds_only_at_the_error_rate_of_its_look(study):
    """One look of five has one-sided 0.014; 0.02 would do for a study that looks once."""
    for p_holds, outcome in ((0.013, "PASS"), (0.02, "INCONCLUSIVE")):
        one = _evidence("training", "holds", 0.9, p_holds)
        found = _outcome(study, _with(HOLDS, one=one))
        assert found.outcome == outcome
    assert found.levels["training"].decides.endswith("(--seeds 5): p is 0.02 and has to be 0.014")


def test_harm_is_corrected_for_arms_and_levels(study):
    """A p-value of 0.01 is harm for one test at 0.014, and not for one of four."""
    one = _evidence("training", "harmed", 0.01, 0.99)
    alone = {level: _evidence(level, "not applicable") for level in LEVELS}
    assert _outcome(study, _with(alone, one=one)).outcome == "FAIL"
    found = _outcome(study, _with(HOLDS, one=one))
    assert found.outcome == "INCONCLUSIVE"
    assert found.levels["training"].state == "undecided"
    assert found.levels["training"].decides == (
        "more seeds (--seeds 5): p, corrected for all arms and levels, is 0.04 and has to be 0.014"
    )
    looked_at = _outcome(study, _with(HOLDS, one=_evidence("gradient", "harmed", 0.01, 0.99)))
    assert looked_at.levels["gradient"].decides == (
        "more looks, by more steps or a smaller `probe.gradient_every`, in a study of another "
        "name; more seeds add none, since only the first is looked at: p, corrected for all "
        "arms and levels, is 0.04 and has to be 0.014"
    )
    two = _evidence("operator", "harmed", 0.003, 0.99)
    assert _outcome(study, _with(HOLDS, one=one, two=two)).levels["operator"].state == "harmed"


@pytest.mark.parametrize("broken", [HOLDS, _with(HARMED, one=_evidence("training", "undecided"))])
def test_what_is_broken_on_purpose_has_to_be_seen(study, broken):
    found = _outcome(study, HOLDS, broken=broken)
    assert found.outcome == "NO ASSAY"
    assert "flash_all_bf16, which is broken on purpose" in found.sentence
    harmed = _outcome(study, HARMED, broken=broken)
    assert harmed.outcome == "FAIL", "no assay saves what is harmed"


def test_all_that_stands_in_the_way_of_a_pass_is_told_at_once(study):
    open_ = _with(
        HOLDS, one=_evidence("outcome", "not measured"), two=_evidence("gradient", "undecided")
    )
    unseen = replace(_evidence("training", "undecided"), decides="20 seeds")
    found = _outcome(study, open_, broken=_with(HARMED, one=unseen))
    assert found.outcome == "INCONCLUSIVE"
    assert found.sentence == (
        "the outcome level is not measured, and the gradient level is undecided; besides, as "
        "it stands, training does not see flash_all_bf16, which is broken on purpose; to have it "
        "seen: 20 seeds"
    )


@pytest.mark.parametrize(
    ("broken", "answer", "tone"),
    [(HARMED, "FAIL, as it must", "good"), (HOLDS, "NO ASSAY, but it must FAIL", "bad")],
)
def test_what_is_broken_on_purpose_says_whether_it_fails_as_it_must(study, broken, answer, tone):
    by_arm = {"flash_fa2": HOLDS, "flash_all_bf16": broken}
    judged = _judge(study, by_arm)
    (control,) = judged.controls
    # an outcome of its own: the control needs no assay
    assert control.answer == answer.replace("NO ASSAY", control.outcome)
    assert headline(judged).endswith(f"; flash_all_bf16 {control.answer}")
    assert evidence_rows(judged)[-1].tone == tone
    assert judged.outcome == ("PASS" if broken is HARMED else "NO ASSAY")


@pytest.mark.parametrize("end", ["holds", "harmed", "not measured"])
def test_of_what_is_broken_it_is_said_that_its_loss_shows_nothing(study, end):
    broken = _with(HARMED, one=_evidence("outcome", end, 1e-9, 0.0))
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": broken})
    said = "; its outcome holds, so it does not show that a worse loss is seen"
    assert judged.controls[0].sentence.endswith(said) == (end == "holds")
    assert said not in judged.candidates[0].sentence


def test_a_control_without_seeds_enough_raises_no_alarm(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "two", seeds=[0, 1])
    judged = _judge(with_broken(read_study(folder)), {"flash_fa2": HOLDS, "flash_all_bf16": HOLDS})
    assert judged.controls[0].answer == "INCONCLUSIVE"
    assert evidence_rows(judged)[-1].tone == "open"


def test_the_answer_in_sentences_has_candidates_first(study, monkeypatch):
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": HARMED})
    monkeypatch.setattr("stability.analysis.answer.judge_arms", lambda *_: judged)
    first, last = answer_of(study).sentences
    assert first.startswith("flash_fa2 PASS: the operator, ")
    assert last == "flash_all_bf16 FAIL, as it must."


def test_the_answer_in_sentences_opens_with_what_makes_it_exploratory(study, monkeypatch):
    changes = {"changes": lambda *_: ["policy.max_excess is 2.0, was 1.1", "the nudge is gone"]}
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": HARMED}, **changes)
    monkeypatch.setattr("stability.analysis.answer.judge_arms", lambda *_: judged)
    first, second, last = answer_of(study).sentences
    assert first == (
        "EXPLORATORY, so nothing is proven: policy.max_excess is 2.0, was 1.1; the nudge is gone."
    )
    assert second.startswith("flash_fa2 PASS: ")
    assert last == "flash_all_bf16 FAIL, as it must."


def test_a_candidate_that_fails_is_told_though_another_has_not_reached_a_look(study, monkeypatch):
    two = replace(study, arms=tuple(_as_candidate(arm) for arm in study.arms))
    two = with_state(with_state(two, "fp32", 1, "running"), "flash_fa2", 2, "diverged")
    by_arm = {arm.name: HOLDS for arm in two.arms} | {"flash_all_bf16": HARMED}
    judged = _judge(two, by_arm)
    assert judged.look == 0
    monkeypatch.setattr("stability.analysis.answer.judge_arms", lambda *_: judged)
    answer = answer_of(two)
    assert answer.outcome == "FAIL"
    assert answer.sentences[0].startswith("flash_fa2 FAIL: it is lost where the baseline is sound,")
    assert answer.sentences[1].startswith("fp32 INCONCLUSIVE: it has, with its controls, 1 of")


def test_one_candidate_at_its_look_is_answered_though_another_is_not(study, monkeypatch):
    two = replace(study, arms=tuple(_as_candidate(arm) for arm in study.arms))
    two = with_state(two, "fp32", 0, "running")
    judged = _judge(two, {arm.name: HOLDS for arm in two.arms} | {"flash_all_bf16": HARMED})
    monkeypatch.setattr("stability.analysis.answer.judge_arms", lambda *_: judged)
    assert answer_of(two).sentences[0].startswith("flash_fa2 PASS: ")


def test_without_a_sensitive_assay_nothing_passes(study):
    assert _outcome(study, HOLDS, assay=NO_SCALE).outcome == "NO ASSAY"
    assert "scale_gain was missed" in _outcome(study, HOLDS, assay=NO_SCALE).sentence
    unplanted = ArmAssay(state="not measured", sentence="no faults were planted")
    unproven = _outcome(study, HOLDS, assay=unplanted)
    assert unproven.outcome == "NO ASSAY"
    assert unproven.sentence == (
        "the operator, gradient, training and outcome levels hold, but no faults were planted"
    )
    unbroken = replace(study, arms=tuple(a for a in study.arms if a.role != "broken"))
    assert _outcome(unbroken, HOLDS).outcome == "NO ASSAY"


def test_divergence_fails_in_whichever_seed_and_whatever_the_levels_say(synthetic, tmp_path):
    """Also in the fourth seed, which no look has reached."""
    folder = synthetic.write_synthetic(tmp_path / "late", seeds=[0, 1, 2, 3])
    whole = with_broken(read_study(folder))
    assert _outcome(whole, HOLDS).outcome == "PASS"
    lost = with_state(whole, "flash_fa2", 3, "diverged")
    assert _outcome(lost, HOLDS).outcome == "FAIL"
    assert _outcome(lost, HOLDS).sentence == (
        "it is lost where the baseline is sound, seed 3: the loss is NaN"
    )
    both = with_state(lost, "baseline", 3, "diverged")
    assert _outcome(both, HOLDS).outcome == "PASS", "the baseline's own divergence is no harm"


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        (NONFINITE_WEIGHTS, 7.0, "7 weights are NaN or infinite at step 200"),
        (EVAL_LOSS, math.nan, "the held-out loss is nan at step 200"),
        (TRAIN_LOSS, math.nan, "the training loss is nan at step 197"),
    ],
)
def test_what_is_no_number_fails_in_whichever_seed_though_the_run_has_finished(
    synthetic, tmp_path, metric, value, said
):
    """In the fourth seed, which no look has reached: four bad losses at the end stop no run."""
    folder = synthetic.write_synthetic(tmp_path / "late", seeds=[0, 1, 2, 3])
    whole = with_broken(read_study(folder))
    steps = [197, 198, 199] if metric == TRAIN_LOSS else [200]
    sound = with_metric(whole, 3, metric, steps, 0.0)
    assert _outcome(sound, HOLDS).outcome == "PASS"
    found = _outcome(with_metric(whole, 3, metric, steps, value), HOLDS)
    assert found.outcome == "FAIL"
    assert found.sentence == f"it is lost where the baseline is sound, seed 3: {said}"


@pytest.mark.parametrize(
    ("metric", "steps", "said"),
    [
        (NONFINITE_WEIGHTS, [200], "7 weights are NaN or infinite at step 200"),
        (EVAL_LOSS, [200], "the held-out loss is nan at step 200"),
        (TRAIN_LOSS, [197, 198, 199], "the training loss is nan at step 199"),
    ],
)
def test_a_baseline_that_ends_in_no_numbers_is_lost_though_it_has_finished(
    study, metric, steps, said
):
    whole = with_broken(study)
    assert _outcome(with_metric(whole, 1, metric, steps, 0.0), HOLDS).outcome == "PASS"
    value = 7.0 if metric == NONFINITE_WEIGHTS else math.nan
    found = _outcome(with_metric(whole, 1, metric, steps, value, sound=()), HOLDS)
    assert found.outcome == "INCONCLUSIVE"
    assert found.sentence == f"the baseline is lost, seed 1: {said}; nothing can be compared"


def test_a_baseline_that_got_over_a_bad_loss_is_not_lost(study):
    whole = with_broken(study)
    healed = with_metric(whole, 1, TRAIN_LOSS, [197], math.nan, sound=(), then={199: 2.0})
    assert _outcome(healed, HOLDS).outcome == "PASS"


def with_metric(study, seed, metric, steps, value, *, sound=("baseline",), then=None):
    """Add records to the baseline and flash_fa2 in a seed: `value`, but 0 to those in `sound`."""
    then = then or {}
    arms = []
    for arm in study.arms:
        if arm.name in ("baseline", "flash_fa2"):
            values = [0.0 if arm.name in sound else value] * len(steps)
            logged = Series([*steps, *then], [*values, *then.values()])
            run = replace(arm.runs[seed], metrics={**arm.runs[seed].metrics, metric: logged})
            arm = replace(arm, runs={**arm.runs, seed: run})
        arms.append(arm)
    return replace(study, arms=tuple(arms))


def with_state(study, name, seed, state):
    arm = study.arm(name)
    run = arm.runs[seed]
    lost = replace(run, manifest=replace(run.manifest, state=state, message="the loss is NaN"))
    changed = replace(arm, runs={**arm.runs, seed: lost})
    return replace(study, arms=tuple(changed if a.name == name else a for a in study.arms))


def test_the_first_seeds_are_judged_as_many_as_a_look_has(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "seven", seeds=list(range(7)))
    seen = []

    def levels(study, arm, policy):
        seen.append((study.seeds, tuple(arm.runs)))
        return HOLDS["operator"]

    whole = with_broken(read_study(folder))
    options = {"assay": lambda *_: SENSITIVE, "changes": lambda *_: []}
    judged = judge_arms(whole, PolicyConfig(), levels=dict.fromkeys(LEVELS, levels), **options)
    assert (judged.look, judged.next_look) == (5, 8)
    assert set(seen) == {((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))}
    unfinished = with_state(whole, "flash_fa2", 3, "running")
    judged = judge_arms(unfinished, PolicyConfig(), levels=dict.fromkeys(LEVELS, levels), **options)
    assert judged.arm("flash_fa2").seeds == 3


def test_before_the_first_look_only_facts_count(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "two", seeds=[0, 1])
    study = with_broken(read_study(folder))
    assert _outcome(study, HOLDS).outcome == "INCONCLUSIVE"
    assert "with its controls, 2 of the 3 seeds of" in _outcome(study, HOLDS).sentence
    assert _outcome(study, HARMED).outcome == "INCONCLUSIVE"
    fact = _evidence("outcome", "harmed", 0.0, 1.0)
    assert _outcome(study, _with(HOLDS, one=fact)).outcome == "FAIL"


def test_evidence_that_can_not_be_formed_is_not_measured(study):
    def unreadable(study, arm, policy):
        raise ValueError("gradient: seed 0 has no looks")

    levels = {level: lambda *_, level=level: HOLDS[level] for level in LEVELS}
    judged = judge_arms(
        study,
        PolicyConfig(),
        levels=levels | {"gradient": unreadable},
        assay=lambda *_: SENSITIVE,
    )
    found = judged.arm("flash_fa2")
    assert found.outcome == "INCONCLUSIVE"
    assert "seed 0 has no looks" in found.levels["gradient"].sentence


def test_a_study_answers_as_its_worst_candidate(study):
    two = replace(study, arms=tuple(_as_candidate(arm) for arm in study.arms))
    by_arm = {arm.name: HOLDS for arm in two.arms} | {"flash_all_bf16": HARMED, "fp32": HARMED}
    judged = _judge(two, by_arm)
    assert judged.outcome == "FAIL"
    assert judged.sentence == "flash_fa2 PASS; fp32 FAIL"
    assert [arm.arm for arm in judged.candidates] == ["flash_fa2", "fp32"]


def _as_candidate(arm):
    return replace(arm, role="candidate") if arm.name == "fp32" else arm


def test_the_command_prints_the_answer_first_at_80_columns(study, capsys):
    folder = study.arms[0].runs[0].paths.root.parents[1]
    code = main(["verdict", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "flash_all_bf16 INCONCLUSIVE, flash_fa2 INCONCLUSIVE."
    assert lines[2].startswith("flash_all_bf16 INCONCLUSIVE. The operator, gradient, ")
    assert max(map(len, lines)) <= 80
    assert code == 3
    assert main(["verdict", str(folder), "--arm", "flash_fa2", "--json"]) == 3
    assert '"outcome": "INCONCLUSIVE"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-excess", "0.9"], "max_excess must be above 1"),
        (["--margin-nats", "0"], "margin_nats must be > 0 and finite, got 0"),
        (["--alpha", "0.7"], "stability: verdict: alpha must be in"),
    ],
)
def test_a_limit_that_is_none_is_refused(study, capsys, arguments, message):
    folder = study.arms[0].runs[0].paths.root.parents[1]
    with pytest.raises(SystemExit) as caught:
        main(["verdict", str(folder), *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_arm_that_is_not_judged_is_one_line(study, capsys):
    folder = study.arms[0].runs[0].paths.root.parents[1]
    with pytest.raises(SystemExit) as caught:
        main(["verdict", str(folder), "--arm", "nudge"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "arm must be one that is judged, got 'nudge'; nearest: " in said
    assert said.count("\n") == 1


def test_what_was_changed_afterwards_is_exploratory(study):
    judged = _judge(
        study,
        {"flash_fa2": HOLDS, "flash_all_bf16": HARMED},
        changes=lambda *_: ["policy.max_excess is 2.0, was 1.1"],
    )
    assert judged.exploratory == ("policy.max_excess is 2.0, was 1.1",)


def test_a_study_without_seeds_enough_has_no_answer_yet(synthetic, tmp_path):
    study = read_study(synthetic.write_synthetic(tmp_path / "two", seeds=[0, 1]))
    answer = answer_of(study)
    assert answer.outcome == "OPEN"
    assert answer.sentences[-1] == "No verdict yet: the first look is at 3 seeds."
