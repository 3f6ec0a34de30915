"""The metric log: what is written comes back, and a kill costs at most the line being written."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records.metric_log import MetricLog, read_metrics, read_text

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != "step")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 99), st.dictionaries(NAMES, st.floats(), max_size=4))))
def test_every_number_comes_back_to_the_bit(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    log = MetricLog(path)
    log.append(0, {})
    for step, metrics in lines:
        log.append(step, metrics)
    log.close()
    found = read_metrics(path)
    for name in {name for _, metrics in lines for name in metrics}:
        expected = [(step, metrics[name]) for step, metrics in lines if name in metrics]
        assert found[name].steps == [step for step, _ in expected]
        for value, (_, original) in zip(found[name].values, expected, strict=True):
            assert value == original or (math.isnan(value) and math.isnan(original))


def test_text_is_kept_apart_from_metrics(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.append(1, {"train/loss": 2.0}, batch_hash="abc")
    log.close()
    assert set(read_metrics(tmp_path / "metrics.jsonl")) == {"train/loss"}
    assert read_text(tmp_path / "metrics.jsonl", "batch_hash") == {1: "abc"}


def test_a_line_is_on_disk_before_append_returns(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.append(1, {"a": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl")["a"].values == [1.0]
    log.close()


def test_a_torn_last_line_is_ignored_and_never_glued_onto(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2, "a": 2')
    assert read_metrics(path)["a"].steps == [1]
    log = MetricLog(path)
    log.append(3, {"a": 3.0})
    log.close()
    assert path.read_bytes() == b'{"step": 1, "a": 1.0}\n{"step": 3, "a": 3.0}\n'


@pytest.mark.parametrize("bad", [b"{torn\n", b"[1]\n", b'{"a": 1}\n'])
def test_a_damaged_line_is_refused_with_its_number(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 must be"):
        read_metrics(path)


def test_cutting_goes_back_to_a_position_and_appending_goes_on_there(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    assert log.position() == 0
    log.append(1, {"a": 1.0})
    position = log.position()
    log.append(2, {"a": 2.0})
    log.close()
    again = MetricLog(tmp_path / "metrics.jsonl")
    again.truncate_to(position)
    again.append(3, {"a": 3.0})
    assert again.position() > position
    again.close()
    assert read_metrics(tmp_path / "metrics.jsonl")["a"].steps == [1, 3]
    with pytest.raises(ValueError, match=r"must be at least 99999 bytes long .* is \d+; remove"):
        again.truncate_to(99_999)


def test_making_a_log_writes_nothing(tmp_path):
    MetricLog(tmp_path / "run" / "metrics.jsonl").close()
    assert list(tmp_path.iterdir()) == []
