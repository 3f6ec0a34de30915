"""Distances between arms: right, with parents, measured again where a parent is another one."""

import os

import pytest
import torch

from stability.metrics.drift import drift
from stability.records.distances import read_distances, with_parents, write_distances
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.records.run_files import RunFiles
from stability.records.sealed_json import read_sealed, write_sealed
from stability.records.snapshots import read_snapshot, write_snapshot
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
