"""What adds looks: each way that is named exists for the study's kind, and really adds some."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stability.analysis.assay import ArmAssay
from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.analysis.more_looks import more_looks
from stability.analysis.study_records import RecordedArm, RecordedRun, read_study
from stability.analysis.verdict import judge_arms
from stability.config.arms import probe_of_seed
from stability.config.convert import to_dict
from stability.config.schema import ProbeConfig
from stability.config.study import PolicyConfig
from stability.records.metric_columns import Series
from stability.records.paths import RunPaths
from stability.report.terminal.verdict import verdict_lines
from tests.stability.analysis.test_advice import of

NEXT = "the next look is at 5 seeds"
ANEW = "in a study of another name"
NONE = "more seeds add none, since only the first is looked at"


def _arm(probes, looked):
    """Return an arm whose seeds were looked at as `probes` say, `looked` of them with a look."""
    runs = {
        seed: RecordedRun(
            paths=RunPaths(Path("nowhere")),
            seed=seed,
            manifest=SimpleNamespace(config={"probe": probe}),
            metrics={"deviation/layer_0/out/gain": Series([0], [0.0])} if seed in looked else {},
            error="",
        )
        for seed, probe in enumerate(probes)
    }
    diff = {"attention.implementation": ["baseline", "flash"]}
    return RecordedArm(
        name="mine", axis="attention", diff=diff, role="candidate", until=40, runs=runs
    )


def _of_ours(probe, tmp_path, level):
    """Return what is said of a study of ours, whose three seeds are looked at as `probe` says."""
    settings = [to_dict(probe_of_seed(probe, is_first=seed == 0)) for seed in range(3)]
    looked = [seed for seed, one in enumerate(settings) if one["every"]]
    return more_looks(of("config", tmp_path), _arm(settings, looked), level)


def test_of_a_probe_of_the_first_seed_other_seeds_are_no_advice(tmp_path):
    probe = ProbeConfig(every=10, gradient_every=2, seeds="first")
    said = f"more steps or a smaller `probe.every` or `probe: {{seeds: all}}`, {ANEW}"
    assert _of_ours(probe, tmp_path, "operator") == f"by {said}; {NONE}"
    said = f"more steps or a smaller `probe.gradient_every`, {ANEW}"
    assert _of_ours(probe, tmp_path, "gradient") == f"by {said}; {NONE}"


def test_a_probe_that_looks_at_each_step_cannot_look_oftener(tmp_path):
    probe = ProbeConfig(every=1, gradient_every=1, seeds="first")
    said = f"by more steps or `probe: {{seeds: all}}`, {ANEW}; {NONE}"
    assert _of_ours(probe, tmp_path, "operator") == said
    assert _of_ours(probe, tmp_path, "gradient") == f"by more steps, {ANEW}; {NONE}"


def test_a_probe_of_all_seeds_gains_from_more_of_them_at_the_operator_alone(tmp_path):
    probe = replace(ProbeConfig(), every=5, gradient_every=5, seeds="all")
    said = f"by more seeds, or by more steps or a smaller `probe.every`, {ANEW}"
    assert _of_ours(probe, tmp_path, "operator") == said
    assert NONE in _of_ours(probe, tmp_path, "gradient")


def test_steps_that_are_named_are_what_is_added_to(tmp_path):
    probe = ProbeConfig(every=10, gradient_every=0, steps=(10, 20), seeds="all")
    said = _of_ours(probe, tmp_path, "operator")
    assert said == f"by more seeds, or by more of `probe.steps`, {ANEW}"
    assert "`probe.gradient_every` above 0" in _of_ours(probe, tmp_path, "gradient")


def test_a_probe_of_all_seeds_is_known_while_one_has_ended(tmp_path):
    settings = to_dict(replace(ProbeConfig(), every=5, seeds="all"))
    said = more_looks(of("config", tmp_path), _arm([settings], [0]), "operator")
    assert said.startswith("by more seeds, or by")
    assert "seeds: all" not in said


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("operator", f"by more seeds, or by more steps or a smaller `--every`, {ANEW}"),
        ("gradient", f"by more steps or a smaller `--gradient-every`, {ANEW}; {NONE}"),
    ],
)
def test_a_study_without_a_file_is_advised_in_flags(level, said, tmp_path):
    probe = {"candidate": "flash:fa2", "every": 10, "gradient_every": 2}
    assert more_looks(of("recorded", tmp_path), _arm([probe, {}, {}], [0]), level) == said


def _evidence(state, p_harmed, p_holds):
    """Return all levels in one state."""
    values = {"state": state, "sentence": f"It is {state}.", "p_harmed": p_harmed}
    return {level: LevelEvidence(level=level, p_holds=p_holds, **values) for level in LEVELS}


WITHOUT_BROKEN = (
    "; besides, as it stands, no arm is broken on purpose, so that training could show that it "
    "sees harm"
)
ADD_BROKEN = (
    "more seeds alone do not end NO ASSAY: add an arm that is broken on purpose, its role "
    "`broken`, in a study of another name unless its runs are recorded one by one"
)
HOLDS, OPEN = _evidence("holds", 0.9, 1e-6), _evidence("undecided", 0.5, 0.5)


@pytest.fixture
def study(synthetic, tmp_path):
    """Three seeds; flash_fa2 is judged."""
    return read_study(synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2]))


def _judge(study, found):
    levels = {level: lambda *_, level=level: found[level] for level in LEVELS}
    policy = PolicyConfig(candidates=("flash_fa2",))
    assay = ArmAssay(state="sensitive", sentence="all 11 planted faults were found", faults=11)
    return judge_arms(study, policy, levels=levels, assay=lambda *_: assay, changes=lambda *_: [])


@pytest.mark.parametrize(
    ("undecided", "reason", "outlook"),
    [
        (
            ["operator"],
            "the operator level is undecided; it is looked at in the first seed alone, so more "
            "seeds decide nothing",
            "more seeds add nothing to what is undecided",
        ),
        (
            ["operator", "gradient", "training"],
            f"the operator, gradient and training levels are undecided; {NEXT}, which add nothing "
            "at the operator and gradient levels",
            NEXT,
        ),
        (
            ["outcome"],
            f"the outcome level is undecided; {NEXT}",
            NEXT,
        ),
    ],
    ids=["operator-alone", "three-levels", "outcome-alone"],
)
def test_more_seeds_are_advised_only_where_they_are_looked_at(study, undecided, reason, outlook):
    """The probe of the study is `seeds: first`, and gradients are of the first seed, always."""
    first = _looked_at_in(study, (0,))
    levels = {**HOLDS, **{level: OPEN[level] for level in undecided}}
    judged = _judge(first, levels)
    assert judged.arm("flash_fa2").sentence == f"{reason}{WITHOUT_BROKEN}"
    assert judged.outlook == outlook
    shown = " ".join(" ".join(verdict_lines(judged, judged.arms)).split())
    assert shown.endswith(f"{outlook}.")


def test_the_look_that_is_likely_to_decide_is_the_last_that_a_level_asks_for(study):
    """What holds, or has no number, asks for none; after the last look there is no other."""
    asks = {
        level: replace(OPEN[level], decides=f"{seeds} seeds, at this scatter (--seeds {seeds})")
        for level, seeds in (("training", 12), ("outcome", 8))
    }
    judged = _judge(study, {**HOLDS, **asks})
    assert judged.likely_look == 12
    assert judged.outlook == f"{NEXT}, and by the scatter it takes 12"
    assert _judge(study, {**OPEN, "outcome": HOLDS["outcome"]}).likely_look == 5
    assert replace(judged, next_look=None).likely_look is None
    failed = replace(judged.arms[0], outcome="FAIL", arm="other")
    assert replace(judged, arms=(failed,)).likely_look == 5, "of what is decided nothing is asked"


@pytest.mark.parametrize(
    ("undecided", "reason", "outlook"),
    [
        (
            ["training"],
            "the controls are not within the limit where the training level is judged, so more "
            "seeds decide nothing",
            "more seeds add nothing to what is undecided",
        ),
        (
            ["operator", "training"],
            "the operator level is looked at in the first seed alone, and the controls are not "
            "within the limit where the training level is judged, so more seeds decide nothing",
            "more seeds add nothing to what is undecided",
        ),
        (
            ["training", "outcome"],
            f"{NEXT}, which add nothing at the training level",
            NEXT,
        ),
    ],
    ids=["training-alone", "none-decides", "outcome-may"],
)
def test_no_seeds_are_advised_for_a_step_that_a_control_has_left(study, undecided, reason, outlook):
    first = _looked_at_in(study, (0,))
    hidden = {**OPEN, "training": replace(OPEN["training"], seeds_decide=False)}
    judged = _judge(first, {**HOLDS, **{level: hidden[level] for level in undecided}})
    assert judged.arm("flash_fa2").sentence.endswith(f"undecided; {reason}{WITHOUT_BROKEN}")
    assert judged.outlook == outlook


@pytest.mark.parametrize(
    ("found", "outlook", "open_outlook"),
    [
        (
            _evidence("harmed", 1e-9, 1.0),
            "decided, which ends the plan: no more seeds are needed",
            NEXT,
        ),
        # held, and yet no answer: there is no arm by which harm is shown to be seen
        (HOLDS, ADD_BROKEN, ADD_BROKEN),
    ],
    ids=["fails", "no assay"],
)
def test_an_answer_that_was_decided_ends_the_plan(study, found, outlook, open_outlook):
    judged = _judge(study, found)
    assert judged.outlook == outlook
    shown = " ".join(" ".join(verdict_lines(judged, judged.arms)).split())
    assert shown.endswith(f"{outlook}.")
    one = replace(judged.arms[0], outcome="INCONCLUSIVE", arm="other")
    both = replace(judged, arms=(*judged.arms, one))
    assert both.outlook == NEXT, "of two one is open"
    changed = replace(judged, exploratory=("the seeds",))
    assert changed.outlook == open_outlook, "what is exploratory decides nothing"


def test_what_is_not_measured_is_said_and_no_look_that_would_not_measure_it(study):
    name_it = "name a function of the held-out loss in the base, `held_out: module:function`"
    lacking = LevelEvidence(
        level="outcome",
        state="not measured",
        sentence="Nothing was measured: no run has a held-out loss.",
        decides=name_it,
    )
    judged = _judge(study, {**HOLDS, "outcome": lacking})
    said = f"no PASS while the outcome level is not measured: {name_it}"
    assert judged.outlook == said
    shown = " ".join(" ".join(verdict_lines(judged, judged.arms)).split())
    assert shown.endswith(f"{said}.")
    assert "outcome not measured: no run has a held-out loss. To decide it: name a" in shown
    assert _judge(study, {**HOLDS, "outcome": replace(lacking, decides="")}).outlook == (
        "no PASS while the outcome level is not measured"
    )
    half_open = replace(judged.arms[0], gains=("training",))
    assert replace(judged, arms=(half_open,)).outlook == f"{said}; {NEXT}"
    open_arm = replace(judged.arms[0], levels=OPEN, arm="other")
    both = replace(judged, arms=(*judged.arms, open_arm))
    assert "not measured" not in both.outlook, "more seeds may decide the other"
    harmed = {**HOLDS, "outcome": lacking, "training": _evidence("harmed", 1e-9, 1.0)["training"]}
    assert _judge(study, harmed).outlook.startswith("decided")


def test_seeds_that_are_planned_and_have_not_ended_move_no_look(study):
    """What a correction for many tests asks for is the look after this one, and no scatter."""
    planned = replace(study, seeds=tuple(range(8)))
    harmed = {**HOLDS, "training": _evidence("harmed", 0.01, 1.0)["training"]}
    judged = _judge(planned, harmed)
    training = judged.arm("flash_fa2").levels["training"]
    assert training.decides.startswith("more seeds (--seeds 5): p, corrected for all arms")
    assert (judged.outlook, judged.likely_look) == (NEXT, 5)


def test_seeds_that_the_probe_looks_at_are_looks_at_the_operator(study):
    levels = {**HOLDS, "operator": OPEN["operator"]}
    all_of_them = _looked_at_in(study, (0, 1, 2))
    judged = _judge(all_of_them, levels)
    said = judged.arm("flash_fa2").sentence
    assert said.endswith(f"; {NEXT}{WITHOUT_BROKEN}")


def _looked_at_in(study, seeds):
    """Return `study` with deviations in the runs of `seeds` alone."""

    def run_of(run):
        metrics = {k: v for k, v in run.metrics.items() if not k.startswith("deviation/")}
        looked = {"deviation/layer_0/out/error_ratio": Series([0], [1.0])}
        return replace(run, metrics=metrics | (looked if run.seed in seeds else {}))

    return replace(
        study,
        arms=tuple(
            replace(arm, runs={seed: run_of(run) for seed, run in arm.runs.items()})
            for arm in study.arms
        ),
    )


def test_the_reference_is_in_no_question(study):
    """That it is no worse than the baseline proves nothing about the baseline."""
    arms = [replace(x, role="reference") if x.name == "flash_fa2" else x for x in study.arms]
    other = replace(study, arms=tuple(arms))
    with pytest.raises(ValueError, match="got the reference, flash_fa2: that it is no worse"):
        judge_arms(other, PolicyConfig(candidates=("flash_fa2",)))
    both = judge_arms(other, PolicyConfig(candidates=("flash_fa2", "flash_all_bf16")))
    assert [arm.arm for arm in both.arms] == ["flash_all_bf16"]
