"""What is told of an arm that is broken on purpose and not found in the weights."""

import pytest

from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from tests.stability.analysis.distance_studies import Part, off, parts, write_study


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No waiting for the disk: hundreds of small files are written here."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def _of(study):
    return training_evidence(study, study.arm("broken"), PolicyConfig())


def _broken(errors):
    """Return an arm that errs by `errors` of a step, more in some seeds than in others."""

    def weights(seed, step):
        return off("broken", errors.get(step, 1.0) * (1.15, 0.9, 1.05, 0.9, 1.05)[seed])(seed, step)

    return Part("broken", "attention", weights)


def test_of_a_broken_arm_within_the_limit_more_seeds_are_no_advice_but_another_step(tmp_path):
    study = write_study(tmp_path, parts(broken=_broken({10: 1.3, 20: 1.05})))
    found = _of(study)
    assert (found.state, found.figures["step"]) == ("undecided", 20)
    assert found.decides == (
        "more seeds would hardly show it, since its E is estimated within the limit at step 20; at "
        "step 10 it is 1.31: policy.step, in a study of another name and with other seeds"
    )
    # beyond the limit, though not surely, more seeds are what shows it
    beyond = _of(write_study(tmp_path / "b", parts(broken=_broken({20: 1.2}))))
    assert (beyond.state, "seeds, at this scatter" in beyond.decides) == ("undecided", True)


def test_where_no_step_shows_a_broken_arm_it_is_said(tmp_path):
    found = _of(write_study(tmp_path, parts(broken=_broken({15: 1.06, 20: 1.04}))))
    assert found.state == "undecided"
    assert "as at any before it at which controls stay near 1 (1.0" in found.decides
    assert "at most, at step 15); noise may hide it" in found.decides


def test_a_step_after_the_judged_one_is_no_advice(tmp_path):
    """There controls have left the limit before, and may be back within it by luck."""
    chaos = {1: 0.0, 10: 0.005, 15: 0.5, 20: 0.005}
    restless = Part("nudge", "nudge", off("nudge_b", chaos=chaos))
    study = write_study(tmp_path, parts(nudge_b=restless, broken=_broken({10: 1.04, 20: 1.5})))
    found = _of(study)
    assert (found.state, found.figures["step"]) == ("undecided", 10)
    assert "at step 20" not in found.decides
    assert "noise may hide it" in found.decides


def test_a_step_at_which_no_control_moves_is_said_to_tell_nothing(tmp_path):
    """A named step at which the nudge is the baseline to the bit has no |log E| at all."""
    arms = parts(candidate=Part("candidate", "attention", off("candidate", 0.9)))
    arms |= dict.fromkeys(("nudge", "nudge_b"), Part("nudge", "nudge", arms["baseline"].weights))
    study = write_study(tmp_path, arms)
    found = training_evidence(study, study.arm("candidate"), PolicyConfig(step=20))
    assert found.state == "undecided"
    assert found.decides == (
        "another step (policy: {step: N}, in a study of another name), since at step 20 no control "
        "tells how far chaos has come"
    )
