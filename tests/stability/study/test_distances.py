"""Distances between arms: right, with parents, measured again where a parent is another one."""

import os
from dataclasses import asdict

import pytest
import torch

from stability.metrics.drift import drift
from stability.metrics.pieces import pieces_of
from stability.recorder.sketching import stored_sketch
from stability.records.distances import read_distances, with_parents, write_distances
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import Protocol
from stability.records.run_files import RunFiles
from stability.records.sealed_json import read_sealed, write_sealed
from stability.records.snapshots import read_snapshot, write_snapshot
from stability.records.weight_sketches import write_weight_sketch
from stability.study.distances import update_distances

ARMS = ("baseline", "rerun", "candidate")


class Notes(list):
    def __call__(self, arm, text):
        self.append((arm, text))


def _state(shift=0.0):
    dice = torch.Generator().manual_seed(3)
    state = {
        "wide.weight": torch.randn(50, 40, generator=dice),
        "bias": torch.randn(11, generator=dice),
        "scale": torch.tensor(1.5),
    }
    return {name: tensor + shift for name, tensor in state.items()}


def _write(paths, step, state, kind="snapshot"):
    """Write a file of a run, as a run does, and list it in the manifest."""
    manifest = read_manifest(paths.manifest) if paths.manifest.is_file() else None
    files = RunFiles(paths, manifest or RunFiles.unnamed(paths.root).manifest)
    path = getattr(paths, kind)(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_snapshot(path, state)
    files.add(path)


@pytest.fixture
def study(tmp_path):
    """Two steps; the rerun is the baseline to the bit, the candidate stops after the first."""
    runs = {arm: RunPaths.for_run(tmp_path, arm, 0) for arm in ARMS}
    for step in (1, 2):
        for arm in ("baseline", "rerun"):
            _write(runs[arm], step, _state(0.1 * step))
    _write(runs["candidate"], 1, _state(0.3))
    return tmp_path, runs


def test_distances_are_those_of_the_weights(study):
    folder, runs = study
    found = update_distances(folder, 0, runs, Notes())
    assert found == read_distances(folder, 0)
    matrix = found.weights[1]
    assert matrix.arms == ARMS
    # 2012 weights, each 0.2 apart but for the rounding of adding 0.1 and 0.3 in FP32
    assert matrix.between("candidate", "baseline") == pytest.approx(0.2 * 2012**0.5, rel=1e-5)
    assert matrix.between("baseline", "rerun") == 0.0
    states = [read_snapshot(runs[arm].snapshot(1)) for arm in ("candidate", "baseline")]
    relative = drift(*states)["all"]["rel_l2"]
    ratio = matrix.between("candidate", "baseline") / matrix.norms["baseline"]
    assert ratio == pytest.approx(relative, rel=1e-12)
    assert found.weights[2].arms == ("baseline", "rerun")
    assert found.weights[2].between("baseline", "candidate") is None


def test_slices_change_nothing(study, monkeypatch):
    folder, runs = study
    whole = update_distances(folder, 0, runs, Notes()).weights[1]
    StudyPaths(folder).distances(0).unlink()
    monkeypatch.setattr("stability.study.distances._SLICE", 70)
    sliced = update_distances(folder, 0, runs, Notes()).weights[1]
    assert sliced.rows[0][2] == pytest.approx(whole.rows[0][2], rel=1e-13)


def test_predictions_are_root_mean_square_apart(study):
    folder, runs = study
    for arm, shift in (("baseline", 0.0), ("candidate", 0.5)):
        kept = {"log_probs": torch.full((3, 4), -2.0 + shift), "tokens": torch.arange(12)}
        _write(runs[arm], 1, kept, kind="predictions")
    matrix = update_distances(folder, 0, runs, Notes()).predictions[1]
    assert matrix.between("baseline", "candidate") == 0.5


def test_what_is_on_record_is_not_measured_again(study, monkeypatch):
    folder, runs = study
    update_distances(folder, 0, runs, Notes())
    written = os.stat(StudyPaths(folder).distances(0)).st_mtime_ns
    monkeypatch.setattr("stability.study.distances._measure", None)
    update_distances(folder, 0, runs, Notes())
    assert os.stat(StudyPaths(folder).distances(0)).st_mtime_ns == written


def test_a_run_trained_anew_is_measured_anew_and_never_read_by_its_old_weights(study):
    folder, runs = study
    before = update_distances(folder, 0, runs, Notes())
    _write(runs["candidate"], 1, _state(0.5))
    manifests = {arm: (paths, read_manifest(paths.manifest)) for arm, paths in runs.items()}
    read = with_parents(read_distances(folder, 0), manifests)
    assert read.weights[1].arms == ("baseline", "rerun")
    after = with_parents(update_distances(folder, 0, runs, Notes()), manifests)
    old, new = (found.weights[1].between("baseline", "candidate") for found in (before, after))
    assert new == pytest.approx(2 * old, rel=1e-4)


def test_an_arm_that_comes_later_is_added(study):
    folder, runs = study
    update_distances(folder, 0, {arm: runs[arm] for arm in ARMS[:2]}, Notes())
    found = update_distances(folder, 0, runs, Notes())
    assert found.weights[1].arms == ARMS


def test_a_damaged_file_is_told_and_left_out(study):
    folder, runs = study
    path = runs["candidate"].snapshot(1)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    notes = Notes()
    found = update_distances(folder, 0, runs, notes)
    assert found.weights[1].arms == ("baseline", "rerun")
    assert [arm for arm, text in notes if "is damaged" in text] == ["candidate"]


def test_an_arm_of_another_shape_is_told_and_left_out(study):
    folder, runs = study
    _write(runs["candidate"], 1, {"wide.weight": torch.zeros(2)})
    notes = Notes()
    found = update_distances(folder, 0, runs, notes)
    assert found.weights[1].arms == ("baseline", "rerun")
    assert "holds other tensors than baseline" in notes[0][1]


def test_weights_that_are_nan_are_nan_away_and_read_back(study):
    folder, runs = study
    _write(runs["candidate"], 1, _state(float("nan")))
    update_distances(folder, 0, runs, Notes())
    matrix = read_distances(folder, 0).weights[1]
    assert matrix.between("candidate", "baseline") != matrix.between("candidate", "baseline")
    assert matrix.between("rerun", "baseline") == 0.0


def test_a_damaged_record_is_refused_and_made_anew(study):
    folder, runs = study
    made = update_distances(folder, 0, runs, Notes())
    path = StudyPaths(folder).distances(0)
    content = read_sealed(path, "")
    content["steps"][0]["weights"]["rows"][0][1] = 7.0
    write_sealed(path, content)
    with pytest.raises(ValueError, match="must hold symmetric matrices"):
        read_distances(folder, 0)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match="torn or damaged"):
        read_distances(folder, 0)
    assert update_distances(folder, 0, runs, Notes()) == made == read_distances(folder, 0)
    content["seed"] = 5
    write_sealed(path, content)
    with pytest.raises(ValueError, match="is of seed 5"):
        read_distances(folder, 0)


def test_a_seed_without_a_file_has_no_distances(tmp_path):
    found = read_distances(tmp_path, 4)
    assert (found.seed, found.weights, found.predictions) == (4, {}, {})
    write_distances(tmp_path, found)
    assert read_distances(tmp_path, 4) == found


def test_a_study_measures_every_seed(trained):
    """Of real runs: the rerun is 0 away, and each arm as far as its log of drifts says."""
    for seed in (0, 1):
        recorded = read_distances(trained, seed)
        assert sorted(recorded.weights) == [0, 1, 2, 4, 6]
        matrix = recorded.weights[6]
        assert len(matrix.arms) == 7
        assert matrix.between("rerun", "baseline") == 0.0
        for arm in matrix.arms[1:]:
            log = read_metrics(RunPaths.for_run(trained, arm, seed).metrics)
            logged = dict(zip(*_series(log[drift_name("all", "rel_l2")]), strict=True))[6]
            found = matrix.between(arm, "baseline") / matrix.norms["baseline"]
            assert found == pytest.approx(logged, rel=1e-12)


def _series(series):
    return series.steps, series.values


def test_an_arm_whose_change_adds_weights_is_as_far_as_the_others_are(study):
    folder, runs = study
    before = update_distances(folder, 0, runs, Notes()).weights[1]
    _write(runs["candidate"], 1, {"added": torch.ones(9), **_state(0.3)})
    notes = Notes()
    assert update_distances(folder, 0, runs, notes).weights[1].arms == ("baseline", "rerun")
    assert "holds other tensors than baseline" in notes[0][1], "such a change was not declared"
    files = RunFiles(runs["candidate"], read_manifest(runs["candidate"].manifest))
    files.update(diff={"model.qk_norm": [False, True]})
    found = update_distances(folder, 0, dict(reversed(runs.items())), Notes()).weights[1]
    assert set(found.arms) == set(ARMS)
    for pair in (("candidate", "baseline"), ("candidate", "rerun"), ("baseline", "rerun")):
        assert found.between(*pair) == before.between(*pair)
    _write(runs["candidate"], 1, {"wide.weight": torch.zeros(50, 40)})
    assert update_distances(folder, 0, runs, Notes()).weights[1].arms == ("baseline", "rerun")


NOISY = (0, 16)
"""Which values of the bias walk by signs, otherwise in each run."""


def _walked(seed, step, shift=0.0):
    """Return weights after `step` updates: runs go one way, but for a walk in part of a bias."""
    dice = torch.Generator().manual_seed(seed)
    state = {"wide.weight": torch.linspace(-1, 1, 2000).view(50, 40), "bias": torch.zeros(37)}
    state = {name: x + 0.01 * step + shift for name, x in state.items()}
    noise = 0.02 * torch.randn(step, 16, generator=dice).sign().sum(0)
    state["bias"][slice(*NOISY)] = noise if step else 0.0
    return state


STATES = {"baseline": (1, 0.0), "reference": (2, 1e-4), "nudge": (3, 1e-5), "candidate": (4, 2e-4)}


def _seed_of(folder, *arms):
    """Write runs of some arms, with the states of steps 0 and 9."""
    runs = {}
    for arm in arms:
        runs[arm] = RunPaths.for_run(folder, arm, 0)
        for step in (0, 9):
            number, shift = STATES[arm]
            _write(runs[arm], step, _walked(number, step, shift if step else 0.0))
        role = arm if arm in ("reference", "nudge", "baseline") else "candidate"
        RunFiles(runs[arm], read_manifest(runs[arm].manifest)).update(role=role)
    return runs


def test_what_noise_moves_is_left_out_of_a_second_distance(tmp_path):
    runs = _seed_of(tmp_path, *STATES)
    matrix = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert matrix == read_distances(tmp_path, 0).weights[9]
    assert (matrix.left_out, matrix.left_out_values) == ({"bias": (NOISY,)}, 16)
    for one, other in (("candidate", "reference"), ("baseline", "nudge")):
        a, b = (_walked(STATES[arm][0], 9, STATES[arm][1]) for arm in (one, other))
        wide, bias = (a[name].double() - b[name].double() for name in ("wide.weight", "bias"))
        kept, of_all = torch.cat([wide.flatten(), bias[16:]]), torch.cat([wide.flatten(), bias])
        assert matrix.kept_between(one, other) == pytest.approx(kept.norm().item(), rel=1e-12)
        assert matrix.between(one, other) == pytest.approx(of_all.norm().item(), rel=1e-12)
        # the walk is most of it: what this is for
        assert matrix.between(one, other) > 10 * matrix.kept_between(one, other)
    assert matrix.kept_between("candidate", "nobody") is None
    at_start = read_distances(tmp_path, 0).weights[0]
    assert (at_start.left_out, at_start.kept_rows) == ({}, ())
    assert at_start.kept_between("candidate", "baseline") == 0.0


def test_no_candidate_changes_what_is_left_out(tmp_path):
    """Not one that moves all of a bias, nor one that comes first."""
    controls = _seed_of(tmp_path, "baseline", "reference", "nudge")
    alone = update_distances(tmp_path, 0, controls, Notes()).weights[9]
    assert alone.left_out == {"bias": (NOISY,)}
    runs = _seed_of(tmp_path, *STATES)
    _write(runs["candidate"], 9, {**_walked(4, 9), "bias": torch.full((37,), 5.0)})
    later = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert later.left_out == alone.left_out
    assert later.kept_between("candidate", "baseline") > 20, "what it did to the rest of the bias"
    StudyPaths(tmp_path).distances(0).unlink()
    first = {arm: runs[arm] for arm in ("candidate", "baseline")}
    assert update_distances(tmp_path, 0, first, Notes()).weights[9].left_out == {}
    assert update_distances(tmp_path, 0, runs, Notes()).weights[9] == later


def test_distances_are_symmetric_to_the_bit_however_many_arms(tmp_path):
    """A vector loop and what it leaves over may round otherwise."""
    runs = _seed_of(tmp_path, "baseline", "nudge")
    for i in range(9):
        runs[f"arm_{i}"] = RunPaths.for_run(tmp_path, f"arm_{i}", 0)
        _write(runs[f"arm_{i}"], 9, _walked(10 + i, 9, 1e-4 * (1 + i / 7)))
    matrix = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert read_distances(tmp_path, 0).weights[9] == matrix
    assert all(a == b for a, b in zip(matrix.rows, zip(*matrix.rows, strict=True), strict=True))


def test_a_nudge_that_comes_later_is_asked_too(tmp_path):
    runs = _seed_of(tmp_path, *STATES)
    update_distances(tmp_path, 0, runs, Notes())
    runs["nudge_b"] = RunPaths.for_run(tmp_path, "nudge_b", 0)
    for step in (0, 9):
        # elsewhere in all of the bias
        turned = {**_walked(7, step), "bias": -0.01 * step * torch.ones(37)}
        _write(runs["nudge_b"], step, turned)
    RunFiles(runs["nudge_b"], read_manifest(runs["nudge_b"].manifest)).update(role="nudge")
    assert update_distances(tmp_path, 0, runs, Notes()).weights[9].left_out == {"bias": ((0, 37),)}


@pytest.mark.parametrize("lacking", ["start", "sealed"])
def test_nothing_is_left_out_where_it_was_not_asked(tmp_path, lacking):
    """The start is not on record; or the study was sealed before values were left out."""
    runs = _seed_of(tmp_path, *STATES)
    if lacking == "start":
        runs["nudge"].snapshot(0).unlink()
    else:
        sealed = {"step": 0, "limit": 0.04, "settling": 10, "steps": [9]}
        protocol = Protocol(
            study="s", policy={}, arms={}, window=sealed, looks=[3], seeds=[0], base={}
        )
        write_sealed(StudyPaths(tmp_path).protocol, asdict(protocol))
    matrix = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert (matrix.left_out, matrix.kept_rows) == (None, ())
    for pair in (("candidate", "reference"), ("nudge", "baseline")):
        assert matrix.kept_between(*pair) == matrix.between(*pair) > 0.1


def test_a_record_of_before_stays_as_it_is_and_arms_are_added_to_it_alike(tmp_path):
    """Or the seeds of one study would be judged by two rules."""
    runs = _seed_of(tmp_path, *STATES)
    controls = {arm: runs[arm] for arm in ("baseline", "reference", "nudge")}
    update_distances(tmp_path, 0, controls, Notes())
    path = StudyPaths(tmp_path).distances(0)
    content = read_sealed(path, "")
    for step in content["steps"]:
        step["weights"].pop("left_out")
        step["weights"].pop("kept_rows", None)
    write_sealed(path, content)
    assert update_distances(tmp_path, 0, controls, Notes()).weights[9].left_out is None
    assert update_distances(tmp_path, 0, runs, Notes()).weights[9].left_out is None


def test_once_the_nudges_are_dropped_what_is_on_record_stays_left_out(tmp_path):
    """An arm that comes later is exact where snapshots are kept, and known by sketch elsewhere."""
    runs = _seed_of(tmp_path, *STATES)
    before = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    for arm in ("nudge", "candidate"):
        number, shift = STATES[arm]
        _sketch(runs[arm], _walked(number, 9, shift))
        RunFiles(runs[arm], read_manifest(runs[arm].manifest)).drop([runs[arm].snapshot(9)])
    for arm in ("baseline", "reference"):
        _sketch(runs[arm], _walked(STATES[arm][0], 9, STATES[arm][1]))
    runs["late"] = RunPaths.for_run(tmp_path, "late", 0)
    for step in (0, 9):
        _write(runs["late"], step, _walked(8, step, 3e-4))
    _sketch(runs["late"], _walked(8, 9, 3e-4))
    notes = Notes()
    after = update_distances(tmp_path, 0, runs, notes).weights[9]
    assert (notes, after.left_out) == ([], before.left_out)
    assert read_distances(tmp_path, 0).weights[9].sketched == after.sketched
    for pair in (("candidate", "reference"), ("baseline", "reference"), ("nudge", "baseline")):
        assert after.kept_between(*pair) == before.kept_between(*pair)
    a, b = _walked(8, 9, 3e-4), _walked(STATES["reference"][0], 9, STATES["reference"][1])
    wide, bias = (a[name].double() - b[name].double() for name in ("wide.weight", "bias"))
    expected = torch.cat([wide.flatten(), bias[16:]]).norm().item()
    assert after.kept_between("late", "reference") == pytest.approx(expected, rel=1e-12)
    assert {*after.sketched} == {("nudge", "late"), ("candidate", "late")}
    assert after.kept_between("late", "nudge") is None
    assert after.between("late", "nudge") > 0.1


def _sketch(paths, state):
    path = paths.sketch(9)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_weight_sketch(path, stored_sketch(pieces_of(state)))
    RunFiles(paths, read_manifest(paths.manifest)).add(path)
