"""The last line of a log that a process still writes."""

import pytest

from stability.records import log_tail
from stability.records.log_tail import last_logged
from stability.records.metric_log import MetricLog


@pytest.mark.parametrize("tail", [2**18, 300], ids=["all of it", "its tail"])
def test_the_last_step_of_a_metric_is_found(tmp_path, monkeypatch, tail):
    monkeypatch.setattr(log_tail, "TAIL", tail)
    log = MetricLog(tmp_path / "metrics.jsonl")
    for step in range(1, 40):
        log.append(step, {"train/loss": step / 2})
    log.append(39, {"eval/loss": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')
    assert last_logged(tmp_path / "metrics.jsonl", "train/loss") == (39, 19.5)
    assert last_logged(tmp_path / "metrics.jsonl", "other") is None
    assert last_logged(tmp_path / "none.jsonl", "train/loss") is None
