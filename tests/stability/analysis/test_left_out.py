"""E where noise moves some values: these are judged apart, and by one rule in all seeds."""

from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.ladder_sentences import notes
from stability.analysis.protocol_check import protocol_of
from stability.analysis.sequential import look_alpha
from stability.analysis.study_distances import judged_window
from stability.analysis.training_evidence import training_evidence
from stability.config.study import PolicyConfig
from stability.records.distances import LeftOut, read_distances, write_distances
from stability.records.paths import StudyPaths
from stability.records.protocol import LEAVES_OUT, seal_protocol
from stability.records.sealed_json import read_sealed, write_sealed
from tests.stability.analysis.distance_studies import candidate, noise, parts, write_study
from tests.stability.analysis.evidence_form import check_form

SIZES = (0.95, 1.04, 1.0, 0.97, 1.05)
"""By seed how far noise has moved an arm, as luck has it."""


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No waiting for the disk: hundreds of small files are written here."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def left_out(study, *, far=1.0, size=30.0, seeds=None):
    """Let noise move 3 values of a bias by `size`, by `far` times as much in the candidate.

    Whatever was measured is then what is kept.
    """
    for seed in study.seeds if seeds is None else seeds:
        found = read_distances(study.folder, seed)
        weights = {step: _with_noise(x, seed, step, far, size) for step, x in found.weights.items()}
        write_distances(study.folder, replace(found, weights=weights))
    return study


def _with_noise(matrix, seed, step, far, size):
    def noise_of(arm):
        sizes = {"candidate": far * SIZES[seed], "reference": 0.0}
        return size * sizes.get(arm, 1.0) * noise("left", arm, seed, step)

    def row(one, whole):
        apart = [float(((noise_of(one) - noise_of(x)) ** 2).sum() ** 0.5) for x in matrix.arms]
        kept = matrix.rows[matrix.arms.index(one)]
        return (
            tuple((a * a + b * b) ** 0.5 for a, b in zip(apart, kept, strict=True))
            if (whole)
            else tuple(apart)
        )

    return replace(
        matrix,
        rows=tuple(row(arm, True) for arm in matrix.arms),
        left_out=LeftOut(
            asked=matrix.left_out.asked,
            values={"qkv.bias": ((64, 67),)},
            kept_rows=matrix.rows,
            left_rows=tuple(row(arm, False) for arm in matrix.arms),
        ),
    )


def of(study, **policy):
    return training_evidence(study, study.arm("candidate"), PolicyConfig(**policy))


@pytest.mark.parametrize(("error", "state"), [(1.0, "holds"), (1.5, "harmed")])
def test_noise_hides_neither_harm_nor_its_absence(tmp_path, error, state):
    """With the noise in it E would be 1 for both, as it would be for the nudges."""
    found = of(left_out(write_study(tmp_path, parts(candidate=candidate(error)))))
    check_form(found)
    assert (found.state, found.figures["excess"]) == (state, pytest.approx(error, rel=0.01))
    assert found.figures["control_log_excess"] < 0.04
    assert found.figures["excess_left_out"] == pytest.approx(1.0, rel=0.1)
    assert " Left out are 3 values that noise moves, in qkv.bias: these are " in found.sentence
    assert "times as far as the baseline's (limit 2)." in found.sentence
    # the energy test is of what is kept too: noise would let nothing be told from a nudge
    assert (found.figures["energy_p_weights"] < 0.01) == (state == "harmed")


def test_harm_to_what_is_left_out_is_harm(tmp_path):
    found = of(left_out(write_study(tmp_path, parts(candidate=candidate())), far=4.0))
    assert found.state == "harmed"
    assert found.p_harmed < look_alpha(0.05) < found.p_holds
    assert found.figures["excess"] == pytest.approx(1.0, rel=0.01)
    assert found.figures["excess_left_out"] > 3


def test_what_is_left_out_must_surely_be_within_its_limit_too(tmp_path):
    found = of(left_out(write_study(tmp_path, parts(candidate=candidate()), seeds=3), far=1.9))
    check_form(found)
    assert found.state == "undecided"
    assert found.decides.startswith("of what is left out ")
    assert found.p_holds > look_alpha(0.05)


def test_harm_by_either_is_found_twice_as_easily_by_chance(tmp_path):
    plain = of(write_study(tmp_path / "a", parts(candidate=candidate(1.5))))
    found = of(left_out(write_study(tmp_path / "b", parts(candidate=candidate(1.5)))))
    assert found.p_harmed / plain.p_harmed == pytest.approx(2, rel=1e-6)


def test_the_step_is_picked_by_what_is_kept(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()))
    before = judged_window(study, PolicyConfig(), study.seeds)
    after = judged_window(left_out(study), PolicyConfig(), study.seeds)
    assert (after.step, after.log_excess) == (before.step, before.log_excess)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_seeds_are_judged_by_one_rule(tmp_path, is_sealed):
    study = write_study(tmp_path, parts(candidate=candidate()))
    if is_sealed:
        seal_in(study)
    left_out(study, seeds=(0, 1, 2))
    assert of(study).state == "holds", "nothing is moved by noise in the others, and that is known"
    found = read_distances(tmp_path, 4)
    unknown = {step: replace(x, left_out=None) for step, x in found.weights.items()}
    write_distances(tmp_path, replace(found, weights=unknown))
    found = of(study)
    if is_sealed:
        assert found.state == "not measured"
        assert "what noise moves is not known at step 20 with seed 4" in found.sentence
    else:
        # recorded run by run, by two versions: of all weights, as the older one
        assert found.state == "undecided"
        assert "Left out" not in found.sentence
        assert abs(found.figures["excess"] - 1) > 0.01, "the noise is in it"


def test_what_is_left_out_of_few_seeds_is_not_left_out(tmp_path):
    """Of two values no interval says what an arm did to them, and nothing is to be unseen."""
    study = left_out(write_study(tmp_path, parts(candidate=candidate())), seeds=(1, 3))
    found = of(study)
    assert "Left out" not in found.sentence
    assert "excess_left_out" not in found.figures
    plain = of(write_study(tmp_path / "plain", parts(candidate=candidate())))
    assert found.p_harmed != 2 * plain.p_harmed
    assert found.figures["excess_seed_1"] != pytest.approx(1.0, abs=0.01)
    assert found.figures["excess_seed_0"] == pytest.approx(1.0, abs=0.01)


def test_the_policys_limit_is_that_of_what_is_left_out_where_it_is_wider(tmp_path):
    study = left_out(write_study(tmp_path, parts(candidate=candidate())), far=4.0)
    assert of(study).state == "harmed"
    found = of(study, max_excess=6.0)
    assert found.state == "holds"
    assert "times as far as the baseline's (limit 6)." in found.sentence


def test_a_study_that_was_sealed_before_leaves_nothing_out(tmp_path):
    study = write_study(tmp_path, parts(candidate=candidate()))
    seal_in(study, knows=False)
    found = of(study)
    assert found.state == "not measured"
    assert "which the protocol does not know" in found.sentence
    for seed in study.seeds:
        found = read_distances(tmp_path, seed)
        unasked = {step: replace(x, left_out=None) for step, x in found.weights.items()}
        write_distances(tmp_path, replace(found, weights=unasked))
    assert of(study).state == "holds"


def seal_in(study, *, knows=True):
    for run in study.folder.glob("*/seed-*"):
        run.rename(run.with_name(f"_{run.name}"))
    seal_protocol(study.folder, protocol_of(study, study.policy))
    for run in study.folder.glob("*/_seed-*"):
        run.rename(run.with_name(run.name[1:]))
    path = StudyPaths(study.folder).protocol
    content = read_sealed(path, "")
    if not knows:
        del content["window"][LEAVES_OUT]
    write_sealed(path, content)


def test_a_distance_that_nobody_knows_is_no_distance(tmp_path):
    study = left_out(write_study(tmp_path, parts(candidate=candidate())))
    found = read_distances(tmp_path, 2)
    matrix = found.weights[20]
    at = matrix.arms.index("candidate")
    rows = [list(row) for row in matrix.left_out.kept_rows]
    for i in range(len(rows)):
        rows[i][at] = rows[at][i] = 0.0 if i == at else float("nan")
    told = replace(matrix.left_out, kept_rows=tuple(map(tuple, rows)))
    weights = {**found.weights, 20: replace(matrix, left_out=told)}
    write_distances(tmp_path, replace(found, weights=weights))
    found = of(study)
    assert found.state == "not measured"
    assert "known by its sketch alone at step 20 with seed 2" in found.sentence


def test_the_ladder_says_that_its_drifts_hold_what_e_leaves_out(tmp_path):
    def told(study):
        return [note for note in notes(ladder_of(study)) if "E leaves out" in note]

    study = write_study(tmp_path, parts(candidate=candidate()))
    assert told(study) == []
    assert told(left_out(study, seeds=(0,))) == [], "E is of all weights where one seed has any"
    (said,) = told(left_out(study))
    assert said.startswith("Drift is over all weights. E leaves out values that noise alone moves")
    assert ", 3 at step " in said
    judged = replace(study, policy=PolicyConfig(step=10), early_step=15)
    assert ladder_of(judged).early_step == 15
    (said,) = told(judged)
    assert ", 3 at step 10:" in said, "E is judged there, whatever step the ladder shows"
