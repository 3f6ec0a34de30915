"""Where the reference is no farther from the baseline than a nudge no step can be judged."""

import re

import pytest

from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from tests.stability.analysis.distance_studies import (
    Part,
    candidate,
    off,
    parts,
    truth,
    write_study,
)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def _no_step(folder, nudge, reference=1.0, lacks=False):
    """The evidence of a study whose baseline is `reference` off the truth, its nudges wild."""
    arms = parts(candidate=candidate())
    arms["baseline"] = Part("baseline", "none", off("baseline", error=reference))
    for name in ("nudge", "nudge_b"):
        arms[name] = Part("nudge", "nudge", off(name, error=reference, chaos=nudge))
    if lacks:
        arms["reference"] = Part("reference", "precision", truth, steps=(1, 10))
    study = write_study(folder, arms)
    found = training_evidence(study, study.arm("candidate"), PolicyConfig())
    assert found.state == "not measured"
    return found


def test_a_reference_no_farther_than_a_nudge_is_told_and_which_side_to_turn(tmp_path):
    """A baseline in FP32: its error is no larger than its last place, where nudges are."""
    found = _no_step(tmp_path, nudge=1.0, reference=0.3)
    assert "there is no step to judge at: at step 15 nudge" in found.sentence
    said = re.search(
        r"; reference is no farther from the baseline than a nudge is, (0\.\d+) times as far at "
        r"step 1, so that chaos hides the baseline's own error\.",
        found.sentence,
    )
    assert said
    assert 0.2 < float(said[1]) < 0.4  # of two nudges the furthest
    assert found.decides.startswith("make the low precision the baseline and the higher one the")


@pytest.mark.parametrize(
    ("nudge", "lacks"),
    [
        ({1: 0.5, 10: 3.0, 15: 3.0, 20: 3.0}, False),  # chaos, at snapshots that come too late
        ({1: 3.0, 10: 3.0, 15: 3.0, 20: 3.0}, True),  # there might be a step, but for the reference
    ],
)
def test_other_reasons_for_no_step_are_not_taken_for_a_near_reference(tmp_path, nudge, lacks):
    found = _no_step(tmp_path, nudge, lacks=lacks)
    assert "no farther" not in found.sentence
    assert found.decides.startswith("let controls and reference run to their ends")
