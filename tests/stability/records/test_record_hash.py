"""The hash of a record is that of its losses, snapshots, role and notes, and of no drift."""

from dataclasses import replace

import pytest

from stability.records.metric_log import MetricLog
from stability.records.record_hash import record_hash
from stability.records.run_files import RunFiles

DRIFT = {"drift/all/rel_l2": 0.5}


@pytest.fixture
def run(tmp_path):
    """Return the paths and the manifest of a run with a log of two losses."""
    files = RunFiles.unnamed(tmp_path)
    log = MetricLog(files.paths.metrics)
    log.append(0, {"train/loss": 1.0})
    log.append(1, {"eval/loss": float("nan")})
    log.close()
    return files.paths, replace(files.manifest, files={"snapshots/step-00000000.safetensors": "a"})


def logged(paths, step, metrics):
    log = MetricLog(paths.metrics)
    log.append(step, metrics)
    log.close()


@pytest.mark.parametrize("more", [{"train/loss": 2.0}, {"eval/loss": 2.0}])
def test_a_loss_more_changes_it(run, more):
    paths, manifest = run
    before = record_hash(paths, manifest)
    logged(paths, 2, more)
    assert record_hash(paths, manifest) != before


def test_a_drift_that_is_logged_anew_does_not(run):
    paths, manifest = run
    before = record_hash(paths, manifest)
    logged(paths, 2, DRIFT)
    assert record_hash(paths, manifest) == before


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"snapshots/step-00000000.safetensors": "b"}},
        {"role": "rerun"},
        {"resolved": {"untold": ["x"]}},
    ],
)
def test_another_snapshot_role_or_note_changes_it(run, change):
    paths, manifest = run
    assert record_hash(paths, replace(manifest, **change)) != record_hash(paths, manifest)


def test_other_files_and_what_becomes_of_the_run_do_not(run):
    paths, manifest = run
    files = {**manifest.files, "witness.json": "w", "checkpoints/step-00000001.ckpt": "c"}
    after = replace(manifest, files=files, state="finished", observer={"equal": True})
    assert record_hash(paths, after) == record_hash(paths, manifest)
