"""A FAIL at the operator or the gradient alone says what was seen of training."""

from dataclasses import replace

import pytest

from stability.analysis.assay import ArmAssay
from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.study import PolicyConfig

_P = {"harmed": (1e-9, 1.0), "holds": (0.9, 1e-6)}
SENSITIVE = ArmAssay(state="sensitive", sentence="all planted faults were found", faults=11)


def _evidence(level, state):
    p_harmed, p_holds = _P.get(state, (0.5, 0.5))
    return LevelEvidence(
        level=level, state=state, sentence=f"{level} {state}.", p_harmed=p_harmed, p_holds=p_holds
    )


def _levels(**states):
    """Evidence that holds at each level, but for those that are named."""
    return {level: _evidence(level, states.get(level, "holds")) for level in LEVELS}


HARMED = _levels(**dict.fromkeys(LEVELS, "harmed"))


@pytest.fixture
def study(synthetic, tmp_path):
    """Three seeds; its arm `flash_all_bf16` plays the part that is broken on purpose."""
    found = read_study(synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2]))
    arms = (replace(x, role="broken") if x.name == "flash_all_bf16" else x for x in found.arms)
    return replace(found, arms=tuple(arms))


def _judge(study, candidate, broken=HARMED):
    by_arm = {"flash_fa2": candidate, "flash_all_bf16": broken}
    levels = {
        level: lambda study, arm, policy, level=level: by_arm[arm.name][level] for level in LEVELS
    }
    return judge_arms(
        study,
        PolicyConfig(),
        levels=levels,
        assay=lambda *_: SENSITIVE,
        changes=lambda study, policy: [],
    )


@pytest.mark.parametrize("level", ["operator", "gradient"])
@pytest.mark.parametrize(
    ("training", "outcome", "said"),
    [
        ("holds", "holds", "no harm to training was seen: the training and outcome levels hold"),
        (
            "not applicable",
            "holds",
            "no harm to training was seen: the training level is not applicable, and the outcome "
            "level holds",
        ),
        (
            "undecided",
            "holds",
            "harm to training is not shown: the training level is undecided, and the outcome level "
            "holds",
        ),
        (
            "undecided",
            "undecided",
            "harm to training is not shown: the training and outcome levels are undecided",
        ),
        ("not measured", "not measured", "whether training comes to harm was not measured"),
        ("not applicable", "not measured", "whether training comes to harm was not measured"),
        ("harmed", "holds", ""),
        ("undecided", "harmed", ""),
    ],
)
def test_a_fail_by_the_attention_alone_says_what_training_showed(
    study, level, training, outcome, said
):
    states = {level: "harmed", "training": training, "outcome": outcome}
    found = _judge(study, _levels(**states)).arm("flash_fa2")
    assert found.outcome == "FAIL"
    harmed, _, after = found.sentence.partition("; ")
    assert level in harmed
    assert after == said


def test_a_fail_by_the_attention_alone_says_that_training_may_not_have_shown_harm(study):
    unseen = _levels(operator="harmed", gradient="harmed", outcome="harmed", training="undecided")
    judged = _judge(study, _levels(operator="harmed"), unseen)
    assert judged.arm("flash_fa2").sentence == (
        "it is surely harmed at the operator level; no harm to training was seen, and whether one "
        "would have been is not shown: the training and outcome levels hold"
    )


def test_of_what_is_broken_on_purpose_the_levels_alone_are_told(study):
    (control,) = _judge(study, _levels(), _levels(operator="harmed")).controls
    assert control.sentence.startswith("it is surely harmed at the operator level; its outcome")
