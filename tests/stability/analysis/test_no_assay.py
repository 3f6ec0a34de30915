"""NO ASSAY names what ends it: another study, a mended assay, or more seeds where they may help."""

from dataclasses import replace

import pytest

from stability.analysis.no_assay import to_show_harm
from stability.analysis.study_records import read_study
from stability.analysis.unseen_harm import HARDLY
from tests.stability.analysis.test_verdict import (
    HARMED,
    HOLDS,
    NO_SCALE,
    SENSITIVE,
    _evidence,
    _judge,
    _with,
    with_broken,
)

NEXT = "the next look is at 5 seeds"
BREAK = (
    "break flash_all_bf16 by a larger error, in a study of another name unless its runs are "
    "recorded one by one"
)
ASK = "do what the assay of flash_fa2 asks for, so that faults are found"


@pytest.fixture
def study(synthetic, tmp_path):
    """Three seeds; its arm `flash_all_bf16` plays the part that is broken on purpose."""
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2])
    return with_broken(read_study(folder))


@pytest.mark.parametrize(
    ("training", "decides", "assay", "outlook"),
    [
        ("holds", "", SENSITIVE, f"more seeds alone do not end NO ASSAY: {BREAK}"),
        (
            "undecided",
            "20 seeds",
            SENSITIVE,
            f"{NEXT}, which may show the harm of flash_all_bf16",
        ),
        (
            "undecided",
            f"{HARDLY}, since its E is estimated within the limit at step 40",
            SENSITIVE,
            f"more seeds alone do not end NO ASSAY: {BREAK}",
        ),
        ("harmed", "", NO_SCALE, f"more seeds alone do not end NO ASSAY: {ASK}"),
        ("holds", "", NO_SCALE, f"more seeds alone do not end NO ASSAY: {BREAK}, and {ASK}"),
        (
            "undecided",
            "20 seeds",
            NO_SCALE,
            f"more seeds alone do not end NO ASSAY: {ASK}; {NEXT}, which may show the harm of "
            "flash_all_bf16",
        ),
    ],
)
def test_no_assay_says_what_ends_it_and_names_a_look_only_where_that_helps(
    study, training, decides, assay, outlook
):
    found = replace(_evidence("training", training), decides=decides)
    broken = HARMED if training == "harmed" else _with(HARMED, one=found)
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": broken}, assay=assay)
    assert judged.outcome == "NO ASSAY"
    assert judged.outlook == outlook


@pytest.mark.parametrize(
    ("decides", "outlook", "likely"),
    [
        ("more seeds", f"{NEXT}, which may show the harm of flash_all_bf16", 5),
        (
            "8 seeds, at this scatter (--seeds 8)",
            f"{NEXT}, and by the scatter it takes 8, which may show the harm of flash_all_bf16",
            8,
        ),
    ],
)
def test_the_look_that_may_show_a_harm_is_that_of_its_scatter(study, decides, outlook, likely):
    found = replace(_evidence("training", "undecided"), decides=decides)
    broken = _with(HARMED, one=found)
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": broken}, assay=SENSITIVE)
    assert (judged.outcome, judged.outlook, judged.likely_look) == ("NO ASSAY", outlook, likely)


def test_a_broken_arm_that_has_not_ended_is_to_end_and_not_to_be_broken_further(study):
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": HOLDS}, assay=SENSITIVE)
    (broken,) = judged.controls
    for seeds in (0, 1, 2):
        unended = replace(broken, outcome="INCONCLUSIVE", seeds=seeds)
        said = to_show_harm(judged.candidates, [unended], 5)
        assert "flash_all_bf16 has to end in 3 seeds or more" in said
        assert "larger" not in said
        assert "next look" not in said


def test_training_that_was_not_measured_asks_for_what_lets_it_be(study):
    training = replace(_evidence("training", "not measured"), decides="a reference")
    broken = _with(HOLDS, one=training)
    judged = _judge(study, {"flash_fa2": HOLDS, "flash_all_bf16": broken}, assay=SENSITIVE)
    said = to_show_harm(judged.candidates, judged.controls, 5)
    assert "have the training of flash_all_bf16 measured: a reference" in said
    assert "larger" not in said
