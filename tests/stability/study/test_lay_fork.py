"""A fork inherits the parent's log up to its step, less the drifts."""

import torch

from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog, read_metrics, read_text
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.study.checkpoints import lay_fork


def test_a_line_is_left_out_for_a_drift_and_not_for_a_text_that_speaks_of_one(tmp_path):
    files = RunFiles.unnamed(tmp_path / "parent")
    log = MetricLog(files.paths.metrics)
    said = 'as "drift/all/rel_l2" tells'
    log.append(1, {"train/loss": 2.0}, note=said)
    log.append(1, {drift_name("all", "rel_l2"): 0.5})
    log.append(2, {"train/loss": 1.0}, of='"drift/')
    recorded = {**RunWriter(files, log).state_dict(), "stretches": [{"first": 0}]}
    log.append(3, {"train/loss": 0.5})
    log.close()
    checkpoint = files.paths.checkpoint(2)
    checkpoint.parent.mkdir(parents=True)
    state = {
        "callbacks": {"TrainerDoor": recorded},
        "optimizer_states": [{"param_groups": [{"eps": 1e-8}]}],
    }
    torch.save(state, checkpoint)
    files.add(checkpoint)

    fork = RunPaths(tmp_path / "fork")
    fork.root.mkdir()

    def resettle(checkpoint):
        checkpoint["optimizer_states"][0]["param_groups"][0]["eps"] = 1e-6

    lay_fork(files.paths, fork, 2, resettle)
    inherited = read_metrics(fork.metrics)
    assert list(inherited) == ["train/loss"]
    assert list(inherited["train/loss"].steps) == [1, 2]
    assert read_text(fork.metrics, "note") == {1: said}
    assert read_text(fork.metrics, "of") == {2: '"drift/'}
    laid = torch.load(fork.checkpoint(2), weights_only=True)
    assert laid["callbacks"]["TrainerDoor"]["position"] == fork.metrics.stat().st_size
    assert laid["callbacks"]["TrainerDoor"]["stretches"] == []
    assert laid["optimizer_states"][0]["param_groups"][0]["eps"] == 1e-6
