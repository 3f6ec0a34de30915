"""What is recorded of weights that no process holds: as of a process that holds them all."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from stability.analysis.distance_check import other_distances
from stability.analysis.study_check import check_pairs
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.metrics.drift import drift
from stability.metrics.weight_hash import weight_hash
from stability.metrics.weight_sketch import weight_sketch
from stability.records.distances import read_distances
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import damage, read_run_snapshot
from stability.records.snapshots import hash_state
from stability.records.weight_files import open_weights
from stability.records.weight_sketches import read_weight_sketch
from stability.study.checkpoints import resume_from
from stability.study.fork import fork_drifts, plan_fork, run_fork
from stability.study.sharded_checkpoints import read_rest
from stability.study.storage import link_equal_files
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, run_quietly, write_tiny

pytestmark = pytest.mark.slow

SHARDED = {"shard": 2}
STEPS = [0, 2, 4]


def edited(keep="all", **arms):
    def edit(content):
        content.update(arms={"baseline": {}, **arms}, seeds=[0], yardstick="", keep=keep)
        content["base"]["parallel"] = SHARDED
        content["base"]["precision"] = "32-true"
        content["base"]["train"] |= {"steps": 4, "snapshot_steps": [2], "checkpoint_every": 2}
        content["base"]["probe"] = {"every": 0}

    return edit


ARMS = {
    "rerun": {},
    "one": {"parallel": {"shard": 1}},
    "tensor": {"parallel": {"shard": 1, "tensor": 2}},
    "half": {"precision": "bf16-true"},
    "larger": {"model": {"qk_norm": True}},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("sharded")
    run_quietly(
        load_study(write_tiny(folder, text_file, edited(**ARMS))), folder / "runs", isolated=True
    )
    return folder / "runs" / "tiny"


def run_of(study, arm):
    return RunPaths.for_run(study, arm, 0)


def test_each_rank_writes_its_part_of_a_snapshot_and_one_process_a_file(study):
    for arm in ("baseline", *ARMS):
        paths = run_of(study, arm)
        assert read_manifest(paths.manifest).state == "finished"
        assert snapshot_steps(paths) == STEPS
        ends = {path.suffix for path in paths.snapshots_dir.iterdir()}
        assert ends == {".safetensors" if arm == "one" else ".dcp"}
        assert damage(paths) == []
    folder = run_of(study, "baseline").sharded_snapshot(4)
    parts = sorted(folder.glob("*.distcp"))
    assert len(parts) == 2
    sizes = [part.stat().st_size for part in parts]
    # neither has gathered the other's
    assert max(sizes) < 1.2 * min(sizes)


def test_hash_sketch_and_end_are_those_of_the_whole(study):
    for arm in ("baseline", *ARMS):
        paths = run_of(study, arm)
        for step in STEPS:
            state, stored = read_run_snapshot(paths, step), read_weight_sketch(paths.sketch(step))
            found = weight_sketch(state)
            assert stored.weights == weight_hash(state)
            assert (stored.outline, stored.outside) == (found.outline, found.outside)
            assert stored.buckets.equal(found.buckets)
        final = read_manifest(paths.manifest).hashes["final_weights"]
        assert final == hash_state(read_run_snapshot(paths, 4))
    # other files of the same bits
    starts = [run_of(study, arm).sketch(0).read_bytes() for arm in ("baseline", "one", "tensor")]
    assert len(set(starts)) == 1


@pytest.mark.parametrize("arm", ["one", "tensor", "rerun", "half"])
def test_the_drift_of_parts_is_that_of_the_whole_to_the_bit(study, arm):
    paths = run_of(study, arm)
    log = read_metrics(paths.metrics)
    for step in STEPS:
        whole = drift(
            read_run_snapshot(paths, step), read_run_snapshot(run_of(study, "baseline"), step)
        )
        for parameter, values in whole.items():
            for metric, value in values.items():
                series = log[drift_name(parameter, metric)]
                assert series.values[list(series.steps).index(step)] == value, (parameter, metric)
        # weights in BF16 differ from the baseline's from the start
        moves = arm == "half" or (step > 0 and arm != "rerun")
        assert (whole["all"]["rel_l2"] > 0) == moves


def test_every_number_on_record_is_that_of_the_snapshots(study):
    """Drifts, counts, histograms and distances are computed anew by one process."""
    recorded = read_study(study)
    checks = check_pairs(recorded, every_drift=True)
    assert {check.state for check in checks} == {"holds"}, checks
    assert all(list(check.recomputed) == STEPS for check in checks)
    assert other_distances(recorded, every=True) == []
    weights = read_distances(study, 0).weights
    assert list(weights) == STEPS
    # and a verdict rests on them, whatever holds the snapshots
    assert study_distances(recorded, [0])[0].weights == weights
    assert weights[4].between("baseline", "rerun") == 0
    assert weights[4].between("baseline", "one") > 0
    # at the start the bits are the same in every layout, though the files are not
    assert weights[0].between("baseline", "one") == weights[0].between("one", "tensor") == 0


def test_equal_parts_are_stored_once(study):
    baseline, rerun = (run_of(study, arm).sharded_snapshot(4) for arm in ("baseline", "rerun"))
    same = [(baseline / path.name).samefile(path) for path in rerun.iterdir()]
    assert same == [True, True, True]


def test_what_is_dropped_is_checked_by_sketch(study, tmp_path, text_file):
    shutil.copytree(study.parent, tmp_path / "runs")
    run_quietly(
        load_study(write_tiny(tmp_path, text_file, edited("none", **ARMS))),
        tmp_path / "runs",
        isolated=True,
    )
    folder = tmp_path / "runs" / "tiny"
    for arm in ("rerun", "one", "tensor"):
        assert snapshot_steps(run_of(folder, arm)) == [0]
    checks = check_pairs(read_study(folder), every_drift=True)
    assert {check.state for check in checks} == {"holds"}, checks
    assert {*checks[0].sketched} == {2, 4}


def test_each_rank_writes_its_part_of_a_checkpoint_and_training_goes_on_from_it(study):
    baseline = run_of(study, "baseline")
    folder = baseline.held_checkpoint(2)
    assert folder.suffix == ".dcp"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    parts = [size for name, size in sizes.items() if name.endswith(".distcp")]
    weights = baseline.held_snapshot(2)
    assert sum(parts) > 2.5 * sum(path.stat().st_size for path in weights.glob("*.distcp"))
    assert len(parts) == 2
    assert max(parts) < 1.2 * min(parts)
    # no weight is in what one rank writes alone
    tensors = [x for x in tree_leaves(read_rest(folder)) if isinstance(x, torch.Tensor)]
    assert {x.numel() for x in tensors if x.is_floating_point()} == {1}
    found = open_weights(folder)
    state = read_run_snapshot(baseline, 2)
    assert hash_state({name: found[f"model.{name}"] for name in state}) == hash_state(state)

    options = TrainOptions(wandb_mode="disabled")
    same = plan_fork(baseline, 2, {}, name="same")
    assert run_fork(same, options, SilentObserver()).state == "finished"
    assert set(fork_drifts(same).values()) == {0.0}
    for name, layout in {"whole": {"shard": 1}, "cut": {"shard": 1, "tensor": 2}}.items():
        other = plan_fork(baseline, 2, {"parallel": layout}, name=name)
        assert run_fork(other, options, SilentObserver()).state == "finished"
        assert 0 < fork_drifts(other)[4] < 1e-5, name


def test_a_kill_while_equal_parts_are_linked_damages_no_snapshot(study, tmp_path, monkeypatch):
    shutil.copytree(study, tmp_path / "tiny")  # a copy holds each file by itself
    paths = [run_of(tmp_path / "tiny", arm) for arm in ("baseline", "rerun")]
    runs = [SimpleNamespace(paths=each) for each in paths]

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            link_equal_files(runs)
    assert [damage(each) for each in paths] == [[], []]
    assert link_equal_files(runs) > 0
    assert [damage(each) for each in paths] == [[], []]


def test_a_damaged_checkpoint_costs_no_later_one(study, tmp_path):
    shutil.copytree(study, tmp_path / "tiny")
    paths = run_of(tmp_path / "tiny", "baseline")
    rest = paths.held_checkpoint(2) / "rest.pt"
    rest.write_bytes(rest.read_bytes()[:-1])
    assert resume_from(paths, read_manifest(paths.manifest), print)[0] == 4


def test_a_checkpoint_whose_rest_is_damaged_is_passed_over(study, tmp_path):
    shutil.copytree(study, tmp_path / "tiny")
    paths = run_of(tmp_path / "tiny", "baseline")
    rest = paths.held_checkpoint(4) / "rest.pt"
    rest.write_bytes(rest.read_bytes()[:-1])
    told = []
    at, kept = resume_from(paths, read_manifest(paths.manifest), told.append)
    assert at == 2
    assert any("step-00000004.dcp is damaged" in said for said in told)
    assert {path for path in kept if path.startswith("checkpoints/")} == {
        "checkpoints/step-00000002.dcp"
    }
