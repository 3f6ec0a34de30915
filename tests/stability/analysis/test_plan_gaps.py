"""What a study lacks for a PASS is said before its first run, and only that."""

import pytest

from stability.analysis.plan_gaps import NO_QUESTION, plan_gaps
from stability.analysis.study_records import read_study
from stability.config.commands import GRADIENT_NEEDS
from stability.records.paths import StudyPaths
from stability.records.sealed_json import write_sealed

LOOKED = {"candidate": "flash:fa2", "every": 2, "gradient_every": 1}
ARMS = {
    "baseline": ("baseline", {}),
    "reference": ("reference", {"flags.bf16": [True, None]}),
    "nudge": ("nudge", {"nudge.ulps": [0, 1]}),
    "broken": (
        "broken",
        {
            "attention.implementation": ["", "flash:fa2"],
            "attention.fault": ["", "out_gain_1pct"],
        },
    ),
    "fa2": ("candidate", {"attention.implementation": ["", "flash:fa2"]}),
}


def gaps(folder, arms=ARMS, *, seeds=3, probe=LOOKED, steps=30, policy=None, held_out=""):
    base = {"program": "python train.py", "setup": "", "train": {"steps": steps}}
    config = {"name": "s", "question": "?", "base": base, "seeds": [*range(seeds)]}
    entries = [
        {"name": arm, "axis": axis_of(diff), "diff": diff, "role": role, "until": steps}
        for arm, (role, diff) in arms.items()
    ]
    config["policy"] = policy or {}
    write_sealed(StudyPaths(folder).study, {"config": config, "arms": entries})
    of_all = {**base, **({"held_out": held_out} if held_out else {})}
    configs = {arm: {**of_all, **({"probe": probe} if probe else {})} for arm in arms}
    return plan_gaps(read_study(folder), configs)


def axis_of(diff):
    path = next(iter(diff), "none")
    return path.partition(".")[0] if path.startswith(("nudge", "seed", "attention")) else path


def without(name):
    return {arm: each for arm, each in ARMS.items() if arm != name}


def test_a_study_that_can_pass_lacks_nothing(tmp_path):
    assert gaps(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": without("reference")}, "there is no reference, the baseline one precision high"),
        ({"arms": without("nudge")}, "there is no nudge to show what chaos alone does: add an arm"),
        ({"arms": without("broken")}, "no arm is broken on purpose"),
        (
            {"arms": {**ARMS, "broken": ("broken", {"flags.lr": [0.1, 1.0]})}},
            "broken is broken by something else than out_gain_1pct alone on an attention",
        ),
        (
            {"probe": {**LOOKED, "every": 0}},
            "fa2: nothing looks at its attention there: `probe: {candidate: flash:fa2, every: 1",
        ),
        ({"seeds": 2}, "it has 2 of the 3 seeds of the first look"),
        ({"probe": None}, "fa2: nothing looks at its attention there"),
        (
            {"probe": {**LOOKED, "gradient_every": 0}},
            "fa2: nothing looks at the whole model's gradient there: `probe: {candidate: "
            "flash:fa2, every: 1, gradient_every: 1}` in the arm, or in the base for all; for the "
            f"gradient {GRADIENT_NEEDS}",
        ),
        (
            {"held_out": "none"},
            "no outcome is measured, as held_out is off: name a function of the held-out loss in",
        ),
        (
            {"held_out": {"share": 0, "batches": 8}},
            "no outcome is measured, as held_out is off: ",
        ),
        (
            {"probe": {**LOOKED, "gradient_every": 2}},
            "fa2: the gradient is judged from 20 looks on, and train.steps 30 with "
            "gradient_every 2 has 15: gradient_every 1, or more updates",
        ),
    ],
)
def test_each_thing_that_is_lacking_is_said_alone(tmp_path, change, said):
    (found,) = gaps(tmp_path, **change)
    assert found.startswith(said)


def test_all_of_it_is_said_at_once(tmp_path):
    arms = {arm: ARMS[arm] for arm in ("baseline", "fa2")}
    assert len(gaps(tmp_path, arms, seeds=1, probe=None)) == 4


def test_a_flag_needs_no_probe_and_a_change_of_start_no_reference(tmp_path):
    flag = {**ARMS, "fa2": ("candidate", {"flags.lr": [0.1, 0.2]})}
    assert gaps(tmp_path, flag, probe=None) == []
    start = {**without("reference"), "fa2": ("candidate", {"seed.init_offset": [0, 1]})}
    assert gaps(tmp_path, start, probe=None) == []


def test_where_no_arm_is_in_question_that_alone_is_said(tmp_path):
    assert gaps(tmp_path, without("fa2"), seeds=1, probe=None) == [NO_QUESTION]
    assert "`candidate: {flags: " in NO_QUESTION


def test_what_the_reference_changes_is_in_no_question(tmp_path):
    arms = {**ARMS, "fp32": ("candidate", {"flags.bf16": [True, None]})}
    (said,) = gaps(tmp_path, arms)
    assert said.startswith("fp32 changes what reference, the reference, changes, and would be")
    told = {**ARMS, "told": ("candidate", {"flags.bf16": [True, 1]})}
    told["reference"] = ("reference", {"flags.bf16": [True, True]})
    assert gaps(tmp_path, told) == [], "--bf16 and --bf16 1 are two calls"
    assert gaps(tmp_path, policy={"candidates": ["reference"]}) == [NO_QUESTION]


def test_an_arm_that_is_judged_shows_no_harm_to_others(tmp_path):
    (said,) = gaps(tmp_path, policy={"candidates": ["fa2", "broken"]})
    assert said.startswith("no arm is broken on purpose")


def test_who_is_judged_is_what_the_policy_names(tmp_path):
    assert gaps(tmp_path, policy={"candidates": ["nudge"]}, probe=None) == []
