"""The fast reader of a log says what a plain one says, for any line, and finds any flipped bit."""

import json
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stability.records import metric_log
from stability.records.metric_columns import Column, Series, column_of
from stability.records.metric_log import read_lines, read_log, read_metrics, read_text
from tests.stability.sealing import seal

NUMBERS = st.one_of(
    st.floats(),
    st.sampled_from([5e-324, -0.0, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1 + 0.2]),
    st.integers(-(10**300), 10**300),
    st.integers(-10, 2**64),
    st.booleans(),
    st.sampled_from(["nan", "inf", "-inf"]),
)
COUNTS = st.lists(st.integers(0, 2**70), min_size=1, max_size=3)
# few names, so that lines share some, in any order; "note" and "a/b" turn up as every kind of entry
NAMES = st.sampled_from(["train/loss", "note", "a/b", "ünï 🚀", "", 'a"b, "crc": "'])
LINES = st.lists(
    st.tuples(
        st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1),
        st.dictionaries(NAMES, NUMBERS | COUNTS | st.text(), max_size=4),
        st.booleans(),
    ),
    max_size=8,
)


def plain(path):
    """What a log says, read the obvious way: metrics, counts and whole lines, in its order."""
    metrics, counts, lines = {}, {}, []
    *whole, _torn = path.read_bytes().split(b"\n")
    for number, raw in enumerate(whole, start=1):
        line = json.loads(raw)
        del line["crc"]
        lines.append((number, line))
        for name, value in line.items():
            if name == "step":
                continue
            if isinstance(value, list):
                counts.setdefault(name, {})[line["step"]] = value
            elif not isinstance(value, str) or value in ("nan", "inf", "-inf"):
                metrics.setdefault(name, []).append((line["step"], bits(float(value))))
    return metrics, counts, lines


def bits(value):
    return struct.pack("d", value)


@pytest.mark.slow
@settings(max_examples=400)
@given(LINES, st.binary(max_size=9).filter(lambda tail: b"\n" not in tail))
@example(
    [(0, {"a/b": 1.0}, True), (0, {"a/b": 2.0, "note": "x"}, True), (0, {"a/b": 3}, True)], b""
)
def test_it_gives_what_a_plain_reader_gives(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    text = "".join(seal(json.dumps({"step": s, **line}, ensure_ascii=a)) for s, line, a in lines)
    path.write_bytes(text.encode("utf-8", "surrogatepass") + torn)
    metrics, counts, whole = plain(path)
    found = read_log(path, keep=["note"])
    assert list(found.metrics) == list(metrics)
    for name, entries in metrics.items():
        series, column = found.metrics[name], found.metrics.column(name)
        read = zip(series.steps, map(bits, series.values), strict=True)
        assert [*read] == entries
        assert [*zip(column.steps.tolist(), map(bits, column.values), strict=True)] == entries
    assert found.counts == read_log(path).counts == counts
    kept = [
        (n, {k: v for k, v in line.items() if k == "note" or type(v) is not float})
        for n, line in whole
        if "note" in line
    ]
    assert repr(found.kept) == repr(kept)
    assert repr([*read_lines(path)]) == repr(whole)
    texts = {line["step"]: line["note"] for _, line in whole if "note" in line}
    assert repr(read_text(path, "note")) == repr(texts)


def test_every_flipped_bit_is_found_and_its_line_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 0, "train/loss": 1.25, "watch/x": "nan"},
        {"step": 1, "event": "alert", "layer": "", "text": "é"},
        {"step": 1, "a/ulp_histogram": [0, 12, 3]},
    ]
    sound = "".join(map(seal, lines)).encode()
    last = len(sound) - 1  # without this newline the last line is a torn one
    for place in range(last):
        for bit in range(8):
            spoiled = bytearray(sound)
            spoiled[place] ^= 1 << bit
            path.write_bytes(spoiled)
            number = sound[:place].count(b"\n") + 1
            for read in (read_log, lambda path: [*read_lines(path)]):
                with pytest.raises(ValueError, match=rf"metrics.jsonl: line {number}\b"):
                    read(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (f'{{"step": {2**63}, "x": 1}}', "must be an object with a step"),
        (f'{{"step": 1, "x": 1{"0" * 400}}}', "x must be a number, a text or a list of counts"),
        (f'{{"step": 1, "x": {"[" * 100_000}', "must be JSON"),
        ('{"step": 1.0, "x": 1}', "must be an object with a step"),
    ],
)
def test_what_no_machine_number_holds_is_damage_not_a_crash(tmp_path, damage, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(seal({"step": 0, "x": 1.0}) + seal(damage))
    with pytest.raises(ValueError, match=f"metrics.jsonl: line 2.*{message}"):
        read_log(path)


def test_the_last_of_several_lines_of_a_step_counts():
    column = Column(np.array([3, 1, 3, 2, 1]), np.array([0.0, 1.0, 2.0, 3.0, 4.0]))
    once = column.last_of_each_step()
    assert (once.steps.tolist(), once.values.tolist()) == ([1, 2, 3], [4.0, 3.0, 2.0])


def test_a_column_is_that_of_the_series_and_nobody_can_change_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(seal({"step": 0, "x": 1.0}) + seal({"step": 7, "x": 2.0}))
    metrics = read_metrics(path)
    for found in (column_of(metrics, "x"), column_of({"x": metrics["x"]}, "x")):
        assert (found.steps.tolist(), found.values.tolist()) == ([0, 7], [1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        metrics.column("x").values[0] = 5.0
    assert column_of(metrics, "y").steps.size == 0
    assert metrics.get("y", Series()) == Series()


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text(seal({"step": 1, "a": 2}))
    length = path.stat().st_size
    monkeypatch.setattr(metric_log, "MOST_OF_A_LINE", length)
    assert read_metrics(path)["a"].values == [2]
    with path.open("ab") as file:
        file.truncate(2**27)
    with pytest.raises(ValueError, match=f"metrics.jsonl: line 2 must have fewer than {length} "):
        read_metrics(path)
