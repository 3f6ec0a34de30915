"""What an arm has to be, so that a candidate's distance to it says anything of an error."""

from dataclasses import replace

import pytest

from stability.analysis.study_records import find_arm
from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from tests.stability.analysis.distance_studies import Part, candidate, parts, truth, write_study


def _of(study):
    return training_evidence(study, find_arm(study, "candidate"), PolicyConfig())


@pytest.mark.parametrize(
    ("second", "extra", "words"),
    [
        ("reference", {}, "reference and second are both"),
        ("yardstick", {"changes.init": [False, True]}, "reference starts from other weights"),
    ],
)
def test_a_reference_that_may_not_be_one_measures_nothing(tmp_path, second, extra, words):
    arms = parts(candidate=candidate(), second=Part(second, "precision", truth))
    arms["reference"] = replace(arms["reference"], extra=extra)
    found = _of(write_study(tmp_path, arms))
    assert (found.state, words in found.sentence) == ("not measured", True)


def test_what_the_reference_changes_is_not_measured_from_itself(tmp_path):
    """It would be at 0 whatever the change does, and pass."""
    same = parts(candidate=Part("candidate", "precision", truth))
    found = _of(write_study(tmp_path / "same", same))
    assert found.state == "not measured"
    assert "candidate changes what reference, the reference, changes" in found.sentence
    other = parts(candidate=Part("candidate", "flags.bf16", truth))
    assert _of(write_study(tmp_path / "other", other)).state == "holds"


def test_a_reference_of_a_flag_is_said_to_be_declared(tmp_path):
    arms = parts(candidate=candidate())
    assert "declared" not in _of(write_study(tmp_path / "known", arms)).sentence
    arms["reference"] = replace(arms["reference"], axis="flags.bf16")
    said = "reference changes flags.bf16: that this is more exact is declared, not checked."
    assert said in _of(write_study(tmp_path / "flag", arms)).sentence
