"""What stays of a study on disk: less by policy, with the same answers, and proven by sketch."""

import json
import shutil
from dataclasses import replace
from itertools import combinations

import pytest

from stability.analysis.distance_check import other_distances
from stability.analysis.study_check import check_drifts_of, check_pairs
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.load import load_study
from stability.records import run_files
from stability.records.distances import write_distances
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, checkpoint_steps, sketch_steps, snapshot_steps
from stability.records.run_files import damage
from stability.records.run_lock import hold
from stability.study import storage
from stability.study.run_one import run_one
from stability.study.run_study import (
    changed_protocol,
    check_study,
    finish_study,
    plan_study,
    run_study,
)
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, write_tiny

pytestmark = pytest.mark.slow

ARMS = {
    "baseline": {},
    "flash": {"attention": {"implementation": "flash", "profile": "fa2"}},
    "rerun": {},
    "nudge": {"nudge": {"ulps": 1}},
    "reference": {"role": "reference", "precision": "32-true"},
}


def edited(keep, arms=ARMS):
    def edit(content):
        content.update(arms=arms, seeds=[0], yardstick="", keep=keep)
        content["base"]["train"]["snapshot_steps"] = [2, 4]
        content["base"]["probe"] = {"every": 0}

    return edit


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file):
    """The study with all that it has made, for tests that copy it."""
    from tests.conftest import run_quietly

    folder = tmp_path_factory.mktemp("whole")
    run_quietly(load_study(write_tiny(folder, text_file, edited("all"))), folder / "runs")
    return folder / "runs"


@pytest.fixture
def settle(whole, tmp_path, text_file, run_tiny):
    """Return a function that copies the study and goes on with it under another `keep`."""
    shutil.copytree(whole, tmp_path / "runs")

    def go_on(keep, arms=ARMS):
        study = load_study(write_tiny(tmp_path, text_file, edited(keep, arms)))
        observer = run_tiny(study, tmp_path / "runs")
        return tmp_path / "runs" / "tiny", observer

    return go_on


def runs_of(folder):
    return {arm: RunPaths.for_run(folder, arm, 0) for arm in ARMS}


def size(folder):
    seen = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.*")}
    return sum(seen.values())


STEPS = [0, 2, 4, 6]
KEPT = {
    "all": dict.fromkeys(ARMS, STEPS),
    "reference": {arm: STEPS if arm in ("baseline", "reference") else [0] for arm in ARMS},
    "last": {arm: [0, 6] for arm in ARMS},
    "none": {arm: [0] for arm in ARMS},
}


@pytest.mark.parametrize("keep", KEPT)
def test_the_policy_says_what_stays_and_every_answer_is_the_same(keep, settle, whole, text_file):
    folder, _ = settle(keep)
    before, after = (read_study(path) for path in (whole / "tiny", folder))
    for arm, paths in runs_of(folder).items():
        assert snapshot_steps(paths) == KEPT[keep][arm], arm
        assert sketch_steps(paths) == STEPS
        assert bool(checkpoint_steps(paths)) == (keep == "all")
        assert damage(paths) == []
    assert study_distances(after, [0]) == study_distances(before, [0])
    verdicts = [judge_arms(study, study.policy).to_dict() for study in (before, after)]
    assert json.dumps(verdicts[0], default=str) == json.dumps(verdicts[1], default=str)
    # no drift is stale, and every pair holds: by snapshot or by sketch
    checks = check_pairs(after, every_drift=True)
    assert {check.state for check in checks} == {"holds"}, checks
    for check in checks:
        assert sorted([*check.recomputed, *check.sketched]) == STEPS
    assert other_distances(after, every=True) == []
    said = check_drifts_of(runs_of(folder)["baseline"], runs_of(folder)["flash"]).said
    assert ("checked by sketch" in said) == (keep != "all")
    # what stays is no part of what a verdict rests on
    study = load_study(write_tiny(folder.parent, text_file, edited(keep)))
    assert changed_protocol(study, folder.parent) == []
    assert (size(folder) < 0.8 * size(whole / "tiny")) == (keep != "all") or keep == "reference"


MORE = {
    "flash_all_bf16": {"attention": {"implementation": "flash", "profile": "all_bf16"}},
    "lr": {"optimizer": {"lr": 1e-4}},
    "init_seed": {"seed": {"init_offset": 1000}},
}


class _Looking(SilentObserver):
    """Notes which snapshots of a seed are there whenever one of its runs begins."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, []

    def run_started(self, index, total, arm, seed, steps):
        its = {name: RunPaths.for_run(self.folder, name, seed) for name in ARMS | MORE}
        held = {name: snapshot_steps(paths) for name, paths in its.items()}
        self.seen.append((arm, {name for name, found in held.items() if found not in ([], [0])}))


CONTROLS = {"baseline", "rerun", "nudge", "reference"}


@pytest.mark.parametrize(("isolated", "jobs"), [(True, 1), (False, 1), (True, 2)])
def test_an_arm_is_dropped_once_it_is_measured_from_the_controls(
    tmp_path, text_file, isolated, jobs
):
    """So that a seed holds the snapshots of its controls, and of the arms in training."""
    found = {}
    for keep in ("none", "all"):
        study = load_study(write_tiny(tmp_path, text_file, edited(keep, ARMS | MORE)))
        observer = _Looking(tmp_path / keep / "tiny")
        run_study(
            study,
            tmp_path / keep,
            options=TrainOptions(wandb_mode="disabled"),
            observer=observer,
            isolated=isolated,
            jobs=jobs,
        )
        found[keep] = read_study(tmp_path / keep / "tiny")
        beside = {arm: there - CONTROLS for arm, there in observer.seen if arm not in CONTROLS}
        assert beside.keys() == {"flash", *MORE}
        if keep == "none":
            assert max(map(len, beside.values())) < jobs
        else:
            assert len(beside["init_seed"]) >= 4 - jobs
    online, whole = (study_distances(study, [0])[0] for study in found.values())
    for step in (2, 4, 6):
        one, other = online.weights[step], whole.weights[step]
        sketched = {frozenset(pair) for pair in one.sketched}
        others = {frozenset(x) for x in combinations(("flash", *MORE), 2)}
        # of two that end at once each is measured from the other
        assert sketched == others if jobs == 1 else sketched <= others
        for a, b in combinations(ARMS | MORE, 2):
            values = [
                m.rows[list(m.parents).index(a)][list(m.parents).index(b)] for m in (one, other)
            ]
            is_exact = frozenset((a, b)) not in sketched
            assert values[0] == pytest.approx(values[1], rel=0 if is_exact else 0.01), (a, b)
    verdicts = [judge_arms(study, study.policy).to_dict() for study in found.values()]
    assert json.dumps(verdicts[0], default=str) == json.dumps(verdicts[1], default=str)
    assert {check.state for check in check_pairs(found["none"], every_drift=True)} == {"holds"}


def test_a_run_that_a_scheduler_starts_is_dropped_as_it_ends(tmp_path, text_file):
    """Each by a process of its own: no job that waits for all of them holds all of their files."""
    study = load_study(write_tiny(tmp_path, text_file, edited("none", ARMS | MORE)))
    folder = tmp_path / "runs" / "tiny"

    def train(arm):
        options = TrainOptions(wandb_mode="disabled")
        run_one(study, folder.parent, arm, 0, options=options, observer=SilentObserver())

    def there():
        paths = {arm: RunPaths.for_run(folder, arm, 0) for arm in ARMS | MORE}
        return {arm for arm in paths if len(snapshot_steps(paths[arm])) > 1}

    # a candidate may end before the last of the controls has
    for arm in ("baseline", "reference", "flash", "rerun"):
        train(arm)
    assert there() == {"baseline", "reference", "flash", "rerun"}
    train("nudge")
    assert there() == CONTROLS
    # while another process measures nothing waits, and the next one finds what is left
    with hold(RunPaths(folder)):
        train("flash_all_bf16")
    assert there() == {*CONTROLS, "flash_all_bf16"}
    train("lr")
    assert there() == CONTROLS
    train("init_seed")
    # the first seed is whole, and no fault is to be planted: its controls wait for the study's end
    assert there() >= CONTROLS
    finish_study(study, plan_study(study, folder.parent), SilentObserver())
    assert there() == set()
    checks = check_pairs(read_study(folder), every_drift=True)
    assert {check.state for check in checks} == {"holds"}


def test_equal_files_are_stored_once_and_neither_can_change_the_other(whole, tmp_path):
    runs = runs_of(whole / "tiny")
    one, other = (runs[arm].snapshot(6) for arm in ("baseline", "rerun"))
    assert one.samefile(other)
    assert runs["flash"].sketch(0).samefile(runs["baseline"].sketch(0))
    assert not runs["flash"].snapshot(6).samefile(one)
    # a copy is whole
    shutil.copytree(whole / "tiny", tmp_path / "copy")
    assert all(damage(paths) == [] for paths in runs_of(tmp_path / "copy").values())


def test_a_kill_while_files_are_dropped_is_gone_on_with(settle, monkeypatch):
    left = 5

    def killed(path):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        path.unlink(missing_ok=True)

    with monkeypatch.context() as context:
        context.setattr(run_files, "remove_any", killed)
        with pytest.raises(KeyboardInterrupt):
            settle("none")
    folder, observer = settle("none")
    assert {state for _, _, state, message in observer.ended if message == "kept"} == {"finished"}
    assert all(snapshot_steps(paths) == [0] for paths in runs_of(folder).values())
    assert {check.state for check in check_pairs(read_study(folder))} == {"holds"}


def test_an_arm_that_is_added_later_has_its_baseline_trained_anew_to_the_same_bits(settle):
    folder, _ = settle("none")
    first = read_manifest(runs_of(folder)["baseline"].manifest)
    more = {"attention": {"implementation": "flash", "profile": "all_bf16"}}
    folder, observer = settle("none", {**ARMS, "added": more})
    assert any("were dropped (keep), and added is to be measured" in x for x in observer.notes)
    again = read_manifest(runs_of(folder)["baseline"].manifest)
    assert again.all_files.items() >= {
        (name, sum) for name, sum in first.all_files.items() if name.startswith("sn")
    }
    study = read_study(folder)
    assert {check.state for check in check_pairs(study)} == {"holds"}
    matrix = study_distances(study, [0])[0].weights[6]
    # the baseline's snapshot is there again, the others' are not
    others = set(ARMS) - {"baseline"}
    assert {frozenset(x) for x in matrix.sketched} == {frozenset((x, "added")) for x in others}
    exact = study_distances(study, [0])[0].weights[0]
    assert exact.sketched == ()


def test_a_forged_drift_or_distance_is_found_by_sketch(settle):
    folder, _ = settle("none")
    study = read_study(folder)
    distances = study_distances(study, [0])[0]
    matrix = distances.weights[6]
    rows = tuple(tuple(1.1 * x for x in row) for row in matrix.rows)
    forged = {**distances.weights, 6: replace(matrix, rows=rows)}
    write_distances(folder, replace(distances, weights=forged))
    (said,) = other_distances(read_study(folder), every=True)
    assert "by the sketches" in said
    # another run's sketch in the place of a run's own, listed as it should be
    runs = runs_of(folder)
    manifest = read_manifest(runs["flash"].manifest)
    runs["flash"].sketch(6).unlink()
    shutil.copy(runs["nudge"].sketch(4), runs["flash"].sketch(6))
    files = {**manifest.files}
    files["sketches/step-00000006.safetensors"] = read_manifest(runs["nudge"].manifest).files[
        "sketches/step-00000004.safetensors"
    ]
    write_manifest(runs["flash"].manifest, replace(manifest, files=files))
    check = check_drifts_of(runs["baseline"], runs["flash"])
    assert check.state == "damaged"
    assert "by the sketches" in check.said


def test_nothing_is_dropped_before_all_that_needs_it_is_on_record(whole, tmp_path, text_file):
    shutil.copytree(whole, tmp_path / "runs")
    study = load_study(write_tiny(tmp_path, text_file, edited("none")))
    runs, folder = plan_study(study, tmp_path / "runs"), tmp_path / "runs" / "tiny"
    (folder / "distances" / "seed-0.json").unlink()
    assert storage.drop_by_policy(folder, runs, "none") == 0
    assert check_study(runs) == []


def test_a_word_that_is_no_policy_is_refused(tmp_path, text_file):
    with pytest.raises(ValueError, match="keep"):
        load_study(write_tiny(tmp_path, text_file, edited("some")))
