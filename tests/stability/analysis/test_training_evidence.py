"""Training evidence: what is judged harmed, held or open, and every reason to say nothing."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from stability.analysis.protocol_check import protocol_changes, protocol_of
from stability.analysis.sequential import look_alpha
from stability.analysis.study_distances import judged_window, window_problems
from stability.analysis.study_records import read_study
from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from stability.records.distances import read_distances, write_distances
from stability.records.paths import StudyPaths
from stability.records.protocol import seal_protocol
from stability.records.sealed_json import read_sealed, write_sealed
from stability.study.window import freeze_window
from tests.stability.analysis.distance_studies import (
    STEPS,
    Part,
    candidate,
    off,
    parts,
    truth,
    write_run,
    write_study,
)
from tests.stability.analysis.evidence_form import check_form

POLICY = PolicyConfig()


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No waiting for the disk: hundreds of small files are written here."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def _of(study, name="candidate", policy=POLICY):
    return training_evidence(study, study.arm(name), policy)


@pytest.mark.parametrize(
    ("error", "state", "cell"),
    [(1.0, "holds", "E 1.00"), (0.5, "holds", "E 0.50"), (1.5, "harmed", "E 1.50")],
)
def test_the_excess_decides(tmp_path, error, state, cell):
    found = _of(write_study(tmp_path, parts(candidate=candidate(error))))
    assert (found.state, found.cell) == (state, cell)
    assert found.figures["excess"] == pytest.approx(error, rel=0.01)
    assert found.figures["excess_low"] < found.figures["excess"] < found.figures["excess_high"]
    sure = found.p_harmed if state == "harmed" else found.p_holds
    assert sure < look_alpha(0.05) < max(found.p_harmed, found.p_holds)
    assert found.decides == ""
    assert re.match(
        rf"At step 20 \(.*\) the weights of candidate are {error:.2f}\d? \[.+, .+\] times as far "
        r"from reference's as the baseline's are \(limit 1\.1\), over 5 seeds, .* times in the "
        r"worst, seed \d\.",
        found.sentence,
    )


def test_the_limit_is_the_policys(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate(1.5)))
    check_form(_of(study))
    assert _of(study, policy=PolicyConfig(max_excess=1.6)).state == "holds"


@pytest.mark.parametrize("warm_up", [0, 20, 21])
def test_a_step_in_the_warm_up_is_said_to_be(tmp_path, warm_up):
    base = {"optimizer": {"warmup_steps": warm_up}}
    found = _of(write_study(tmp_path, parts(candidate=candidate()), base=base))
    assert found.figures["step"] == 20
    assert ("lies in the warm-up of 21 updates" in found.text) == (warm_up == 21)
    assert found.figures.get("warm_up", 0) == (21 if warm_up == 21 else 0)


def test_a_candidate_at_the_limit_is_undecided_and_told_how_many_seeds_would_do(tmp_path):
    found = _of(write_study(tmp_path, parts(candidate=candidate(1.095, chaos=0.4)), seeds=3))
    assert found.state == "undecided"
    assert found.decides == "5 seeds, at this scatter (--seeds 5)"
    check_form(found)


def test_a_single_seed_gives_the_figure_and_no_judgement(tmp_path):
    found = _of(write_study(tmp_path, parts(candidate=candidate(2.0)), seeds=1))
    assert (found.state, found.cell) == ("undecided", "E 2.00")
    assert found.decides == "at least 3 seeds (--seeds 3)"
    assert math.isnan(found.p_harmed)
    assert "over 1 seed. " in found.sentence


def test_a_candidate_that_is_the_baseline_to_the_bit_holds_with_one_exactly(tmp_path):
    found = _of(write_study(tmp_path, parts(candidate=candidate(1.0, chaos=0.0))))
    assert (found.state, found.p_holds) == ("holds", 0.0)
    assert found.figures["excess"] == 1.0
    assert "its weights are the baseline's to the bit" in found.sentence


def test_a_candidate_that_is_the_reference_to_the_bit_holds_with_zero(tmp_path):
    exact = Part("candidate", "attention", truth)
    found = _of(write_study(tmp_path, parts(candidate=exact)))
    assert (found.state, found.cell, found.p_holds) == ("holds", "E 0.00", 0.0)
    assert "its weights are the reference's to the bit" in found.sentence


def test_one_seed_that_is_the_reference_to_the_bit_does_not_win_the_others(tmp_path):
    """A log of minus infinity would pull any mean below any limit."""

    def weights(seed, step):
        return truth(seed, step) if seed == 0 else off("candidate", 2.0, 0.005)(seed, step)

    found = _of(write_study(tmp_path, parts(candidate=Part("candidate", "attention", weights))))
    assert found.state == "harmed"
    assert found.figures["excess"] == pytest.approx(2.0, rel=0.01)


def test_weights_that_are_no_numbers_are_harm_for_certain(tmp_path):
    def weights(seed, step):
        return truth(seed, step) * (math.nan if seed == 3 and step >= 10 else 1.1)

    found = _of(write_study(tmp_path, parts(candidate=Part("candidate", "attention", weights))))
    assert (found.state, found.p_harmed) == ("harmed", 0.0)
    assert "of candidate are not finite in 1 of 5 seeds, first in seed 3, " in found.sentence


def test_a_candidate_that_diverged_before_the_step_is_harmed(tmp_path):
    gone = Part("candidate", "attention", off("candidate"), steps=(1, 10), state="diverged")
    study = write_study(tmp_path, parts(candidate=gone))
    assert _of(study).state == "harmed"


def test_a_candidate_that_has_not_ended_is_not_measured(tmp_path):
    gone = Part("candidate", "attention", off("candidate"), steps=(1, 10), state="interrupted")
    study = write_study(tmp_path, parts(candidate=gone))
    found = _of(study)
    assert found.state == "not measured"
    assert "candidate ends at step 10, before step 20" in found.sentence
    content = read_sealed(StudyPaths(tmp_path).study, "")
    content["arms"][-1]["until"] = STEPS[-1]
    write_sealed(StudyPaths(tmp_path).study, content)
    found = _of(read_study(tmp_path))
    assert found.state == "not measured"
    assert "no weights on record at step 20 with seed 0 (interrupted)" in found.sentence
    assert found.decides == "let the study run to its end"


@pytest.mark.parametrize(
    ("without", "words", "add"),
    [
        (("reference",), "there is no reference", "role: reference"),
        (("nudge", "nudge_b"), "there is no nudge", "nudge: {ulps: 1}"),
    ],
)
def test_a_study_without_controls_is_told_what_to_add(tmp_path, without, words, add):
    arms = parts(candidate=candidate())
    study = write_study(tmp_path, {k: v for k, v in arms.items() if k not in without})
    found = _of(study)
    assert found.state == "not measured"
    assert words in found.sentence
    assert add in found.decides


def test_what_has_no_excess_is_not_applicable(tmp_path):
    other = Part("yardstick", "seed", off("other"))
    study = write_study(tmp_path, parts(candidate=candidate(), init_seed=other))
    found = _of(study, "init_seed")
    assert found.state == "not applicable"
    assert "starts from other weights (seed.init_offset)" in found.sentence
    for name in ("baseline", "reference"):
        assert _of(study, name).state == "not applicable"


def test_a_baseline_in_fp64_has_no_excess(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()), base={"precision": "64-true"})
    found = _of(study)
    assert found.state == "not applicable"
    assert "64-true already" in found.sentence


def test_a_baseline_equal_to_the_reference_has_no_error_to_compare_with(tmp_path):
    arms = parts(candidate=candidate(), baseline=Part("baseline", "none", truth))
    found = _of(write_study(tmp_path, arms))
    assert found.state == "not measured"
    assert "baseline and reference are equal to the bit" in found.sentence
    named = _of(write_study(tmp_path, arms), policy=PolicyConfig(step=10))
    assert named.state == "not measured"
    assert "no error of its own to compare with" in named.sentence
    assert "higher precision" in named.decides


def test_a_nudge_that_moves_nothing_is_no_control(tmp_path):
    still = Part("nudge", "nudge", off("baseline"))
    found = _of(write_study(tmp_path, parts(candidate=candidate(), nudge=still, nudge_b=still)))
    assert found.state == "not measured"
    assert "no control differs from the baseline" in found.sentence


def test_a_rerun_that_differs_is_a_control_like_a_nudge(tmp_path):
    wild = Part("rerun", "none", off("rerun", chaos={1: 0.005, 10: 0.005, 15: 1.0, 20: 1.0}))
    study = write_study(tmp_path, parts(candidate=candidate(), rerun=wild))
    window = judged_window(study, POLICY, study.seeds)
    assert window.step == 10
    assert "at step 15 rerun has |log E|" in window.reason
    said = _of(study).sentence
    assert "The training is not deterministic: rerun, which changes nothing, drifts too" in said
    exact = write_study(tmp_path / "exact", parts(rerun=Part("rerun", "none", off("baseline"))))
    assert judged_window(exact, POLICY, exact.seeds).step == 20


def test_weights_trained_anew_are_not_judged_by_the_old_distances(tmp_path):
    arms = parts(candidate=candidate())
    study = write_study(tmp_path, arms)
    assert _of(study).state == "holds"
    write_run(tmp_path, "candidate", candidate(3.0), seed=2)
    found = _of(read_study(tmp_path))
    assert found.state == "not measured"
    assert "candidate has no weights on record at step 20 with seed 2" in found.sentence


def test_a_candidate_that_lacks_weights_of_the_baseline_has_no_distances(tmp_path):
    write_study(tmp_path, parts(candidate=candidate()))
    write_run(tmp_path, "candidate", candidate(3.0), seed=2)  # so that no distance is on record
    study = read_study(tmp_path)
    change = {"model.qk_norm": [True, False]}
    arms = [replace(arm, diff=change) if arm.name == "candidate" else arm for arm in study.arms]
    found = _of(replace(study, arms=tuple(arms)))
    assert found.state == "not measured"
    assert "candidate lacks weights that the baseline has" in found.sentence
    assert found.decides == "make the model with fewer weights the base"


def test_a_damaged_record_of_distances_is_named(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()))
    path = StudyPaths(tmp_path).distances(1)
    path.write_text(path.read_text()[:-40])
    found = _of(study)
    assert found.state == "not measured"
    assert "seed-1.json" in found.sentence


def test_a_step_named_late_can_harm_but_not_hold(tmp_path):
    """There chaos has caught up: E near 1 says nothing, and twice the distance still does."""
    wild = {1: 0.005, 10: 0.005, 15: 0.5, 20: 0.5}
    arms = parts(nudge=Part("nudge", "nudge", off("nudge", chaos=wild)))
    late = PolicyConfig(step=20)
    good = write_study(tmp_path / "good", {**arms, "candidate": candidate(0.9)})
    assert _of(good).state == "holds"
    found = _of(good, policy=late)
    assert found.state == "undecided"
    other = "an earlier step (policy: {step: N}, in a study of another name), since at step 20 a"
    assert found.decides.startswith(other)
    assert found.decides.endswith("above 0.04, which more seeds do not lower")
    assert not found.seeds_decide, "what is below the limit stays there"
    assert "of 1 there (limit 4.1%)" in found.sentence
    assert "(named in the policy)" in found.sentence
    bad = write_study(tmp_path / "bad", {**arms, "candidate": candidate(2.0)})
    assert _of(bad, policy=late).state == "harmed"
    unsure = _of(bad, policy=PolicyConfig(step=20, max_excess=_of(bad).figures["excess"]))
    assert f", which may show harm alone; to hold, {other}" in unsure.decides
    assert unsure.seeds_decide


def test_predictions_are_told_beside_the_weights(tmp_path):
    found = _of(write_study(tmp_path, parts(candidate=candidate(1.5))))
    assert found.figures["excess_predictions"] == pytest.approx(1.5, rel=0.01)
    told = "it can be told from a nudge (p 0.00098, the least possible here), which is no harm by"
    assert f"By its weights {told}" in found.sentence
    assert "By its predictions it can be told from a nudge" in found.sentence


def test_without_predictions_nothing_is_said_of_them(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()))
    for seed in study.seeds:
        found = read_distances(tmp_path, seed)
        write_distances(tmp_path, type(found)(seed=seed, weights=found.weights))
    said = _of(study)
    assert said.state == "holds"
    assert "predictions" not in said.sentence
    assert math.isnan(said.figures["energy_p_predictions"])


def test_cells_fit_the_table(tmp_path):
    for error in (1e-9, 1.0, 1e5, 1e12):
        study = write_study(tmp_path / str(error), parts(candidate=candidate(error)), seeds=3)
        assert len(_of(study).cell) <= 16


# the window


def test_the_step_before_the_first_restless_nudge_is_judged(tmp_path):
    """Restless in one seed of one nudge alone, and calm again at the last step."""

    def weights(seed, step):
        chaos = 1.0 if (seed, step) == (2, 15) else 0.005
        return off("nudge_b", chaos=chaos)(seed, step)

    arms = parts(candidate=candidate(), nudge_b=Part("nudge", "nudge", weights))
    study = write_study(tmp_path, arms)
    window = judged_window(study, POLICY, study.seeds)
    assert window.step == 10
    assert "at step 15 nudge_b has |log E|" in window.reason
    assert "with seed 2, above 0.04" in window.reason
    assert judged_window(study, PolicyConfig(window_limit=10.0), study.seeds).step == 20


def test_the_rule_sees_no_candidate(tmp_path):
    arms = parts(candidate=candidate(chaos=5.0))
    study = write_study(tmp_path, arms)
    assert judged_window(study, POLICY, study.seeds).step == 20


def test_a_nudge_half_as_far_as_the_baseline_is_still_calm(tmp_path):
    """At step 1, by Adam's signs: a rule on distance would pick no step at all."""

    def weights(seed, step):
        # turned about the truth: its error is as large as the baseline's, and half of it away
        own = off("baseline")(seed, step) - truth(seed, step)
        side = np.roll(own, 7)
        side -= own * (own @ side) / (own @ own)
        side *= np.linalg.norm(own) / np.linalg.norm(side)
        turn = 2 * math.asin(0.25)
        return truth(seed, step) + math.cos(turn) * own + math.sin(turn) * side

    study = write_study(tmp_path, parts(nudge=Part("nudge", "nudge", weights)))
    matrix = read_distances(tmp_path, 0).weights[1]
    assert matrix.between("nudge", "baseline") == pytest.approx(
        0.5 * matrix.between("baseline", "reference")
    )
    assert judged_window(study, POLICY, study.seeds).step == 20


def test_nudges_that_are_restless_at_once_leave_no_step(tmp_path):
    wild = Part("nudge", "nudge", off("nudge", chaos=3.0))
    found = _of(write_study(tmp_path, parts(candidate=candidate(), nudge=wild)))
    assert found.state == "not measured"
    assert "there is no step to judge at: at step 15 nudge has" in found.sentence
    assert found.cell == "no step to judge", "and not as if nobody had measured it"
    assert "add earlier snapshots" in found.decides


def test_a_nudge_that_is_restless_in_the_first_updates_alone_does_not_end_the_window(tmp_path):
    """In a small model the signs of rounding alone scatter E at step 1, and not at step 10."""
    early = Part("nudge", "nudge", off("nudge", chaos={1: 1.0, 10: 0.005, 15: 0.005, 20: 0.005}))
    study = write_study(tmp_path / "early", parts(nudge=early))
    assert judged_window(study, POLICY, study.seeds).step == 20
    later = Part("nudge", "nudge", off("nudge", chaos={1: 1.0, 10: 1.0, 15: 1.0, 20: 0.005}))
    study = write_study(tmp_path / "later", parts(nudge=later))
    assert judged_window(study, POLICY, study.seeds).step == 0


def test_a_first_update_that_moves_nothing_does_not_end_the_window(tmp_path):
    """A schedule may begin with a rate of 0: then all arms are still equal at step 1."""

    def still(weights):
        return lambda seed, step: truth(seed, 0) if step == 1 else weights(seed, step)

    arms = parts(candidate=candidate())
    for part in arms.values():
        part.weights = still(part.weights)
    study = write_study(tmp_path, arms)
    assert judged_window(study, POLICY, study.seeds).step == 20
    assert _of(study).state == "holds"


def test_a_nudge_that_is_no_number_ends_the_window(tmp_path):
    def weights(seed, step):
        return off("nudge", chaos=0.005)(seed, step) * (math.nan if step >= 15 else 1.0)

    study = write_study(tmp_path, parts(nudge=Part("nudge", "nudge", weights)))
    assert judged_window(study, POLICY, study.seeds).step == 10


def test_controls_that_end_early_bound_the_window(tmp_path):
    short = Part("nudge", "nudge", off("nudge", chaos=0.005), steps=(1, 10, 15))
    study = write_study(tmp_path, parts(candidate=candidate(), nudge=short))
    window = judged_window(study, POLICY, study.seeds)
    assert window.step == 15
    assert "at step 20 nudge has no snapshot" in window.reason
    assert _of(study).figures["step"] == 15


def test_the_window_is_frozen_at_the_first_look_and_kept(tmp_path):
    calm = parts(candidate=candidate())
    write_study(tmp_path, calm, seeds=2)
    assert freeze_window(tmp_path) is None
    study = write_study(tmp_path, calm, seeds=4)
    assert freeze_window(tmp_path).seeds == [0, 1, 2]
    assert freeze_window(tmp_path) is None
    assert window_problems(study, POLICY) == []

    def weights(seed, step):
        return off("nudge", chaos=3.0 if seed == 4 else 0.005)(seed, step)

    more = write_study(tmp_path, {**calm, "nudge": Part("nudge", "nudge", weights)}, seeds=5)
    found = _of(more)
    assert found.figures["step"] == 20
    assert "(frozen at the look at 3 seeds, among which no control leaves" in found.sentence
    assert window_problems(more, POLICY) == []


def test_a_window_that_was_deleted_is_picked_again_as_it_was(tmp_path):
    """With five seeds by then, of which the last has a nudge that is restless at once."""

    def weights(seed, step):
        return off("nudge", chaos=3.0 if seed == 4 else 0.005)(seed, step)

    arms = parts(candidate=candidate(), nudge=Part("nudge", "nudge", weights))
    study = write_study(tmp_path, arms, seeds=3)
    first = freeze_window(tmp_path)
    study = write_study(tmp_path, arms, seeds=5)
    path = StudyPaths(tmp_path).window
    frozen = path.read_bytes()
    path.unlink()
    assert _of(study).figures["step"] == first.step == 20
    assert freeze_window(tmp_path) == first
    assert path.read_bytes() == frozen


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_nudges_do_at_the_judged_step_is_told_of_all_seeds(tmp_path, is_frozen):
    def weights(seed, step):
        return off("nudge", chaos=0.5 if seed == 4 else 0.005)(seed, step)

    arms = parts(candidate=candidate(), nudge=Part("nudge", "nudge", weights))
    study = write_study(tmp_path, arms)
    if is_frozen:
        freeze_window(tmp_path)
    window = judged_window(study, POLICY, study.seeds)
    calm = judged_window(study, POLICY, study.seeds[:3])
    assert window.step == calm.step == 20
    assert window.seeds == (0, 1, 2)
    assert calm.largest_at(20) < 0.04 < window.largest_at(20)


def test_a_named_step_needs_no_frozen_one(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()), policy={"step": 10})
    assert freeze_window(tmp_path) is None
    assert _of(study, policy=study.policy).figures["step"] == 10
    assert window_problems(study, study.policy) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 10}, "step is 10, the rule picks 20"),
        ({"limit": 0.1}, "limit is 0.1, the policy's 0.04"),
        ({"reference": "fp32"}, "reference is fp32"),
        ({"controls": ["nudge"]}, "controls are nudge, the study's nudge, nudge_b"),
    ],
)
def test_a_window_written_by_hand_is_exploratory(tmp_path, change, words):
    study = write_study(tmp_path, parts(candidate=candidate()))
    freeze_window(tmp_path)
    path = StudyPaths(tmp_path).window
    write_sealed(path, {**read_sealed(path, ""), **change})
    assert any(words in problem for problem in window_problems(study, POLICY))


def test_a_control_trained_anew_after_the_first_look_is_exploratory(tmp_path):
    arms = parts(candidate=candidate())
    write_study(tmp_path, arms)
    freeze_window(tmp_path)
    other = Part("nudge", "nudge", off("other", chaos=0.001))
    study = write_study(tmp_path, {**arms, "nudge": other})
    problems = window_problems(study, POLICY)
    assert problems == [
        "window.json: rests on other weights of nudge with seed 0 at step 1 than are there"
    ]


def test_a_damaged_window_is_named_and_not_judged_by(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()))
    freeze_window(tmp_path)
    path = StudyPaths(tmp_path).window
    content = read_sealed(path, "")
    content["log_excess"][0].pop("seed")
    write_sealed(path, content)
    assert "window.json" in _of(study).sentence
    assert _of(study).state == "not measured"
    assert "log_excess.0 must have the key seed" in window_problems(study, POLICY)[0]


def test_a_window_written_by_hand_is_told_among_the_changes_of_the_protocol(tmp_path):
    arms = parts(candidate=candidate())
    planned = protocol_of(write_study(tmp_path / "planned", arms), POLICY)
    folder = tmp_path / "run"
    folder.mkdir()
    seal_protocol(folder, planned)
    study = write_study(folder, arms)
    freeze_window(folder)
    assert not any("window.json" in change for change in protocol_changes(study, POLICY))
    path = StudyPaths(folder).window
    write_sealed(path, {**read_sealed(path, ""), "step": 10})
    assert "window.json: step is 10, the rule picks 20" in protocol_changes(study, POLICY)
