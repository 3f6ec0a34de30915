"""A log read in another process says the same, whatever becomes of that process."""

import pytest

from stability.records.events import Event, log_event, read_log_and_events
from stability.records.metric_log import MetricLog
from stability.records.parallel_reading import ReaderProcess


@pytest.fixture
def path(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.append(0, {"train/loss": 1.5, "x": float("nan")})
    log.append(2**40, {"x": -0.0}, counts={"y/ulp_histogram": [0, 2**70]})
    log_event(log, Event(3, "alert", "", "ünï"))
    log.close()
    return tmp_path / "metrics.jsonl"


def test_it_says_what_reading_here_says(path):
    content, events = read_log_and_events(path)
    with ReaderProcess(read_log_and_events) as process:
        for _ in range(2):
            found, found_events = process.read(path)
            assert repr(dict(found.metrics)) == repr(dict(content.metrics))
            assert (found.counts, found.kept, found_events) == (
                content.counts,
                content.kept,
                events,
            )


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_it_fails_as_reading_here_does_and_goes_on(path, tmp_path, damage):
    other = tmp_path / "other.jsonl"
    if damage is not None:
        other.write_bytes(damage + path.read_bytes().removeprefix(b"{"))
    with pytest.raises((ValueError, OSError)) as here:
        read_log_and_events(other)
    with ReaderProcess(read_log_and_events) as process:
        with pytest.raises(type(here.value)) as there:
            process.read(other)
        assert str(there.value) == str(here.value)
        assert process.read(path)[1][0].text == "ünï"


def test_a_process_that_has_died_is_done_without(path):
    with ReaderProcess(read_log_and_events) as process:
        process._process.kill()
        process._process.wait()
        assert process.read(path)[1] == read_log_and_events(path)[1]
