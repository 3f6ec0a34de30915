"""One writer for every run: its log, the drifts from a baseline, how it ends or stops."""

import json
import math

import pytest
import torch

from stability.metrics.drift import drift
from stability.metrics.weight_hash import weight_hash
from stability.metrics.weight_sketch import weight_sketch
from stability.recorder.writer import PATIENCE, Baseline, RunWriter, running_hashes, stopped
from stability.records.metric_log import MetricLog, read_metrics, read_text
from stability.records.metric_names import (
    BATCH_HASH,
    DRIFT_FROM,
    DRIFT_OF,
    NONFINITE_WEIGHTS,
    TRAIN_LOSS,
    WEIGHT_HISTOGRAM,
    drift_name,
    parse_drift,
)
from stability.records.paths import sketch_steps, snapshot_steps
from stability.records.record_hash import record_hash
from stability.records.run_files import RunFiles, damage, read_run_snapshot
from stability.records.run_lease import LeaseLostError
from stability.records.weight_sketches import read_weight_sketch


@pytest.fixture
def opened(tmp_path):
    """Return a function that begins a run in a folder of this name."""
    logs = []

    def begin(name="run", **options):
        files = RunFiles.unnamed(tmp_path / "arm" / name)
        logs.append(MetricLog(files.paths.metrics))
        return files, RunWriter(files, logs[-1], **options)

    yield begin
    for log in logs:
        log.close()


def _state(value=0.0):
    return {"a": torch.full((3,), value), "b": torch.arange(4.0).view(2, 2)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_five_losses_in_a_row_that_are_no_number_are_a_divergence_from_the_first_on(opened, bad):
    _, writer = opened()
    for step, loss in enumerate([1.0, 1.0, *[bad] * PATIENCE], start=1):
        assert writer.diverged is None
        assert writer.may_diverge == (step == 2 + PATIENCE)
        writer.updated(step, loss, "ab")
    assert writer.diverged == 2


@pytest.mark.parametrize("between", [1.0, None], ids=["finite", "unseen"])
def test_another_loss_in_between_starts_the_count_anew(opened, between):
    _, writer = opened()
    losses = [*[math.nan] * 4, between, *[math.nan] * 4]
    for step, loss in enumerate(losses, start=1):
        writer.updated(step, loss, "ab")
    assert writer.diverged is None


def test_a_loss_stands_at_the_step_of_its_weights_and_a_hash_at_the_updates_it_covers(opened):
    files, writer = opened(log_every=2)
    for step, batch in enumerate(("aa", "bb", "cc"), start=1):
        writer.updated(step, float(step), batch)
    losses = read_metrics(files.paths.metrics)[TRAIN_LOSS]
    assert (losses.steps, losses.values) == ([0, 2], [1.0, 3.0])
    found = read_text(files.paths.metrics, BATCH_HASH)
    assert found == dict(enumerate(running_hashes(["aa", "bb", "cc"]), start=1))
    streams = [("aa", "bb"), ("bb", "aa"), ("aa",), ("aa", "bb", "cc"), ("aa", "b", "b")]
    assert len({[*running_hashes(stream)][-1] for stream in streams}) == len(streams)


def test_from_a_batch_that_was_not_seen_on_there_is_no_hash(opened):
    files, writer = opened()
    for step, batch in enumerate(("aa", "", "cc"), start=1):
        writer.updated(step, None, batch)
    assert list(read_text(files.paths.metrics, BATCH_HASH)) == [1]
    assert list(running_hashes(["aa", "", "cc"]))[1:] == ["", ""]
    writer.ended("f" * 64)
    assert "batches" not in files.manifest.hashes


def test_weights_are_counted_and_those_that_are_no_number_apart(opened):
    files, writer = opened()
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    writer.state(0, {"a": values, "steps": torch.tensor([7])})
    assert read_metrics(files.paths.metrics)[NONFINITE_WEIGHTS].values == [3.0]
    (line,) = (json.loads(line) for line in files.paths.metrics.read_text().splitlines())
    assert sum(line[WEIGHT_HISTOGRAM]) == 3  # NaN lies in no bin


def test_a_drift_names_both_snapshots_and_is_checked_before(opened):
    own, baseline = opened("baseline")
    baseline.state(0, _state())
    baseline.state(2, _state())
    own_sums = own.manifest.files
    checked = []
    pair = Baseline(paths=own.paths, steps=[0, 2], check=checked.append)
    files, writer = opened("candidate", baseline=pair)
    for step, value in ((0, 0.0), (1, 1.0), (2, 0.5)):
        writer.state(step, _state(value))
    assert checked == [0, 2]
    expected = drift(_state(0.5), _state())["all"]["rel_l2"]
    found = read_metrics(files.paths.metrics)[drift_name("all", "rel_l2")]
    assert (found.steps, found.values) == ([0, 2], [0.0, expected])
    name = files.paths.name_of(files.paths.snapshot(2))
    assert read_text(files.paths.metrics, DRIFT_OF)[2] == files.manifest.files[name]
    assert read_text(files.paths.metrics, DRIFT_FROM)[2] == own_sums[name]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": torch.zeros(3)}, "weights must be those of the baseline, this run has no b"),
        ({**_state(), "c": torch.zeros(1)}, "of the baseline, the baseline has no c"),
        ({**_state(), "a": torch.zeros(4)}, r"baseline's shape \(3,\), has \(4,\)"),
    ],
)
def test_weights_that_are_not_the_baselines_are_refused(opened, state, said):
    own, baseline = opened("baseline")
    baseline.state(0, _state())
    own.update()
    _, writer = opened("candidate", baseline=Baseline(paths=own.paths, steps=[0]))
    with pytest.raises(ValueError, match=said):
        writer.state(0, state)


def test_what_an_earlier_try_has_left_is_cut_off_where_a_run_begins(opened):
    files, writer = opened()
    writer.updated(1, 1.0, "aa")
    writer.state(1, _state())
    writer.predictions(1, torch.zeros(2, 3))
    files.update(files={})
    writer.begin()
    assert files.paths.metrics.read_bytes() == b""
    assert snapshot_steps(files.paths) == []
    assert not files.paths.predictions(1).exists()


def test_a_file_that_is_listed_stays_as_it_was_written(opened):
    files, writer = opened()
    writer.snapshot(1, _state())
    was = files.paths.snapshot(1).read_bytes()
    writer.snapshot(1, _state(2.0))
    assert files.paths.snapshot(1).read_bytes() == was


@pytest.mark.parametrize("losses", [[1.0] * 6, [1.0, *[math.nan] * 5]], ids=["whole", "diverged"])
def test_a_run_that_has_ended_says_how_far_it_came_and_lists_its_log(opened, losses):
    files, writer = opened()
    for step, loss in enumerate(losses, start=1):
        writer.updated(step, loss, "ab")
    writer.ended("f" * 64)
    manifest = files.manifest
    said = "" if losses[1] == 1.0 else "the loss is not finite from step 1 on"
    assert (manifest.state, manifest.message) == ("diverged" if said else "finished", said)
    assert manifest.step == 6
    assert manifest.hashes == {
        "batches": writer.batches,
        "final_weights": "f" * 64,
        "record": record_hash(files.paths, manifest),
    }
    assert not [each for each in damage(files.paths) if "metrics" in each]
    assert "metrics.jsonl" in manifest.files


def test_how_a_run_stopped_is_said_with_what_its_log_tells_of(opened, monkeypatch):
    files, writer = opened()
    for step in (1, 2, 3):
        writer.updated(step, 1.0, "ab")
    stopped(files, "failed", "out of luck")
    manifest = files.manifest
    assert (manifest.state, manifest.message, manifest.step) == ("failed", "out of luck", 3)

    def lost(*_, **__):
        raise LeaseLostError("another process has taken the run over")

    monkeypatch.setattr(RunFiles, "update", lost)
    stopped(files, "interrupted")  # what stopped it is told, not what that has led to
    assert files.manifest.state == "failed"


def test_a_change_of_a_models_weights_drifts_over_those_that_both_have(opened):
    own, baseline = opened("baseline")
    baseline.state(0, {**_state(), "gone": torch.ones(5)})
    own.update()
    pair = Baseline(paths=own.paths, steps=[0], has_other_weights=True)
    files, writer = opened("candidate", baseline=pair)
    writer.state(0, {"added": torch.ones(2), **_state(0.5)})
    found = read_metrics(files.paths.metrics)
    expected = drift(_state(0.5), _state())
    assert found[drift_name("all", "rel_l2")].values == [expected["all"]["rel_l2"]]
    parameters = {parts.parameter for name in found if (parts := parse_drift(name))}
    assert parameters == set(expected)
    assert "added" in read_run_snapshot(files.paths, 0)


def test_each_snapshot_has_its_hash_and_sketch_beside_it(opened):
    own, baseline = opened("baseline")
    other, writer = opened("other")
    baseline.state(2, _state(1.0))
    writer.state(2, _state(1.0))
    writer.state(4, _state(1.5))
    assert writer.log is not baseline.log
    found = {
        name: read_weight_sketch(files.paths.sketch(step))
        for name, files, step in (("a", own, 2), ("b", other, 2), ("c", other, 4))
    }
    assert found["a"].weights == found["b"].weights == weight_hash(_state(1.0))
    assert found["c"].weights == weight_hash(_state(1.5))
    assert torch.equal(found["c"].buckets, weight_sketch(_state(1.5)).buckets)
    # listed with their checksums, and equal weights are equal files
    assert own.checksum(own.paths.sketch(2)) == other.checksum(other.paths.sketch(2))
    assert sketch_steps(other.paths) == [2, 4]


def test_a_sketch_that_an_earlier_try_has_left_is_written_anew(opened):
    files, writer = opened()
    files.paths.sketches_dir.mkdir(parents=True)
    files.paths.sketch(2).write_bytes(b"half of it")
    writer.begin()
    assert sketch_steps(files.paths) == []
