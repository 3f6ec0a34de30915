"""Ids on disk: what is read is what was written, and of two that submit one gives way."""

from dataclasses import replace

import pytest

from stability.execute.job_record import (
    JobArray,
    array_of,
    read_arrays,
    submitting,
    write_arrays,
)

FIRST = JobArray(name="tiny.nudge.1", arm="nudge", seeds=(0, 1), id="17", submitted="2026-11-26")
AGAIN = replace(FIRST, name="tiny.nudge.2", seeds=(1,), id="18")


def test_arrays_are_read_as_they_were_written(tmp_path):
    assert read_arrays(tmp_path) == []
    write_arrays(tmp_path, [FIRST, AGAIN])
    assert read_arrays(tmp_path) == [FIRST, AGAIN]
    assert array_of([FIRST, AGAIN], "nudge", 1) is AGAIN
    assert (FIRST.id_of(1), AGAIN.id_of(1)) == ("17_1", "18")


def test_an_array_all_of_whose_runs_were_submitted_again_is_dropped(tmp_path):
    write_arrays(tmp_path, [FIRST, replace(AGAIN, seeds=(1, 0))])
    assert [each.name for each in read_arrays(tmp_path)] == ["tiny.nudge.2"]


def test_a_damaged_record_is_named(tmp_path):
    write_arrays(tmp_path, [FIRST])
    path = tmp_path / "jobs" / "slurm.json"
    path.write_text(path.read_text().replace("17", "71"))
    with pytest.raises(ValueError, match=r"slurm\.json: must have the checksum"):
        read_arrays(tmp_path)


def test_one_process_submits_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("stability.records.run_lock.PATIENCE_S", 0.0)
    with (
        submitting(tmp_path),
        pytest.raises(ValueError, match="another process submits"),
        submitting(tmp_path),
    ):
        pass
