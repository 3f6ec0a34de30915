"""An arm that is trained twice, under two names: what the two are apart is its own A/A."""

from dataclasses import replace

import pytest

from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from tests.stability.analysis.distance_studies import Part, candidate, off, parts, write_study
from tests.stability.analysis.evidence_form import check_form


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (candidate(), " Its own A/A, with again, is exactly 0."),
        (
            Part("candidate", "attention", off("again", chaos=1e-4)),
            "with again, is not zero but up to 6.3e-04 of the weights: that is its floor, and the "
            "baseline is nearer than that.",
        ),
        (
            Part("candidate", "attention", off("candidate", chaos=0.0049)),
            "of the weights: that is its floor, and the baseline is further than that.",
        ),
    ],
    ids=["exact", "as far as the baseline", "nearer than the baseline"],
)
def test_an_arm_that_is_trained_twice_has_a_floor_of_its_own(tmp_path, again, said):
    study = write_study(tmp_path, parts(candidate=candidate(), again=again, other=candidate(2.0)))
    study = replace(
        study, arms=tuple(replace(x, diff={}) if x.name == "other" else x for x in study.arms)
    )
    found = training_evidence(study, study.arm("candidate"), PolicyConfig())
    assert said in found.sentence
    assert "own_distance" in found.figures
    check_form(found)
