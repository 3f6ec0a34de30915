"""The metric log: every number comes back, and a kill costs at most the line being written."""

import errno
import math
import os
import signal
import subprocess
import sys
from hashlib import sha256
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records import file_operations
from stability.records.atomic_files import DiskFullError
from stability.records.metric_columns import Series
from stability.records.metric_log import MetricLog, hash_start, read_log, read_metrics, read_text
from tests.stability.sealing import seal

ROOT = Path(__file__).parents[3]
NAMES = st.text(min_size=1).filter(lambda name: name not in ("step", "crc"))


@pytest.fixture
def log(tmp_path):
    log = MetricLog(tmp_path / "run" / "metrics.jsonl")
    yield log
    log.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_metrics_and_texts_come_back_by_name_and_step(log, path):
    log.append(0, {"train/loss": 1.25})
    log.append(1, {}, batch_hash="ab")
    log.append(1, {"train/loss": 1.0, "drift/all/w1": 0.0})
    assert read_metrics(path) == {
        "train/loss": Series([0, 1], [1.25, 1.0]),
        "drift/all/w1": Series([1], [0.0]),
    }
    assert read_text(path, "batch_hash") == {1: "ab"}
    assert path.read_text().startswith(seal('{"step": 0, "train/loss": 1.25}'))


def test_making_a_log_writes_nothing(log, path):
    assert log.position() == 0
    log.truncate_to(0)
    assert not path.parent.exists()


@settings(max_examples=50)
@given(NAMES, st.lists(st.tuples(st.integers(0, 9), st.floats()), max_size=8))
def test_every_name_and_float_come_back_to_the_bit(tmp_path_factory, name, entries):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.touch()
    log = MetricLog(path)
    for step, value in entries:
        log.append(step, {name: value})
    log.close()
    found = read_metrics(path).get(name, Series())
    assert found.steps == [step for step, _ in entries]
    assert [repr(v) for v in found.values] == [repr(value) for _, value in entries]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(log, path):
    log.append(3, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert path.read_text() == seal('{"step": 3, "a": "nan", "b": "inf", "c": "-inf"}')
    found = read_metrics(path)
    assert math.isnan(found["a"].values[0])
    assert (found["b"].values, found["c"].values) == ([math.inf], [-math.inf])


def test_a_line_is_on_disk_when_append_returns(log, path):
    for step in range(3):
        log.append(step, {"x": 1.0})
        assert read_metrics(path)["x"].steps == list(range(step + 1))


@pytest.mark.parametrize("tail", ['{"step": 2, "x": 1', '{"step": 2, "x": 1}', '{"ü'])
def test_a_torn_last_line_is_ignored_and_never_glued_to(log, path, tail):
    log.append(1, {"x": 1.0})
    whole = log.position()
    log.close()
    with path.open("ab") as file:
        file.write(tail.encode()[:-1] if tail.endswith("ü") else tail.encode())
    assert read_metrics(path)["x"].steps == [1]
    again = MetricLog(path)
    assert again.position() == whole
    again.append(5, {"x": 2.0})
    again.close()
    assert read_metrics(path)["x"] == Series([1, 5], [1.0, 2.0])


@pytest.mark.parametrize("read", [read_metrics, read_log])
@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 1, "x": 1{"step"',
        "[1]",
        '{"x": 1}',
        '{"step": 1, "x": null}',
        '{"step": 1, "x": []}',
        '{"step": 1, "x": [1, 2.5]}',
        '{"step": 1, "x": [1, -1]}',
        '{"step": 1, "x": [true]}',
        '{"step": 1, "x": [[1]]}',
    ],
)
def test_damage_before_the_last_line_is_an_error_that_names_file_and_line(path, damage, read):
    path.parent.mkdir()
    path.write_text(seal('{"step": 0, "x": 1}') + seal(damage) + seal('{"step": 2, "x": 1}'))
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2"):
        read(path)


def test_counts_come_back_by_name_and_step_and_are_no_metrics(log, path):
    log.append(0, {"x": 1.5}, counts={"a/ulp_histogram": [0, 2**60, 3]}, note="hello")
    log.append(0, {}, counts={"b/ulp_histogram": (7,)})
    log.append(5, {}, counts={"a/ulp_histogram": [1, 1, 1]})
    assert read_log(path).counts == {
        "a/ulp_histogram": {0: [0, 2**60, 3], 5: [1, 1, 1]},
        "b/ulp_histogram": {0: [7]},
    }
    assert read_metrics(path) == {"x": Series([0], [1.5])}
    assert read_text(path, "note") == {0: "hello"}
    assert seal('{"step": 0, "b/ulp_histogram": [7]}') in path.read_text()


@pytest.mark.parametrize("values", [[], [1.0], [-1], [True], ["1"]])
def test_a_list_that_is_no_counts_is_refused(log, path, values):
    with pytest.raises(ValueError, match="x must be one or more whole numbers >= 0, got"):
        log.append(1, {}, counts={"x": values})
    assert not path.exists()


def test_truncating_drops_what_came_after_and_appending_goes_on_there(log, path):
    log.append(1, {"x": 1.0})
    position = log.position()
    log.append(2, {"x": 2.0})
    log.truncate_to(position)
    assert read_metrics(path)["x"].steps == [1]
    log.append(2, {"x": 3.0})
    assert read_metrics(path)["x"] == Series([1, 2], [1.0, 3.0])


def test_a_log_shorter_than_its_checkpoint_is_refused(log, path):
    log.append(1, {"x": 1.0})
    with pytest.raises(ValueError, match="must be at least 1000 bytes long to be cut there"):
        log.truncate_to(1000)
    assert read_metrics(path)["x"].steps == [1]


@pytest.mark.parametrize(
    ("metrics", "counts", "text", "message"),
    [
        ({"step": 1.0}, {}, {}, "'step' must be given once"),
        ({"x": 1.0}, {}, {"x": "a"}, "'x' must be given once"),
        ({"x": 1.0}, {"x": [1]}, {}, "'x' must be given once"),
        ({}, {"step": [1]}, {}, "'step' must be given once"),
        ({}, {"x": [1]}, {"x": "a"}, "'x' must be given once"),
        ({}, {}, {"x": "nan"}, "x must not be the text 'nan'"),
    ],
)
def test_an_entry_that_would_not_come_back_is_refused(log, path, metrics, counts, text, message):
    with pytest.raises(ValueError, match=message):
        log.append(1, metrics, counts, **text)
    assert not path.exists()


def test_a_full_disk_leaves_whole_lines(log, path):
    log.append(1, {"x": 1.0})

    class Full(FileIO):
        def write(self, data):
            return super().write(data[: len(data) // 2])

    log.close()
    log._file = Full(path, "ab")
    with pytest.raises(DiskFullError, match=r": the disk is full, wrote 22 of 44 bytes$"):
        log.append(2, {"long": 1.0})
    log.append(3, {"x": 3.0})
    assert read_metrics(path) == {"x": Series([1, 3], [1.0, 3.0])}


def test_a_killed_writer_leaves_whole_lines(path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from stability.records.metric_log import MetricLog\n"
        "log = MetricLog(Path(sys.argv[1]))\n"
        "step = 0\n"
        "while True:\n"
        "    log.append(step, {f'metric/{i}': 0.1 * i for i in range(300)})\n"
        "    step += 1\n"
        "    if step == 50: print('going', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == b"going\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    series = read_metrics(path)
    steps = series["metric/0"].steps
    assert len(steps) >= 50
    assert steps == list(range(len(steps)))
    assert all(one.steps == steps for one in series.values())


def test_the_hash_of_a_start_is_that_of_its_bytes_however_the_log_went_on(log, path):
    ends = [0]
    for step in range(4):
        log.append(step, {"x": 1.0 / (step + 1)})
        ends.append(log.position())
    content = path.read_bytes()
    for end in (ends[2], ends[4], ends[1], ends[0]):
        expected = sha256(content[:end]).hexdigest()
        assert log.hash_until(end) == hash_start(path, end) == expected
    log.truncate_to(ends[1])
    log.append(1, {"y": 2.0})
    assert log.hash_until(log.position()) == sha256(path.read_bytes()).hexdigest()


def test_sync_forces_the_lines_and_once_the_name(log, path, monkeypatch):
    synced = []
    monkeypatch.setattr(file_operations, "sync", synced.append)
    log.sync()
    assert synced == []
    log.append(1, {"x": 1.0})
    log.sync()
    log.append(2, {"x": 1.0})
    log.sync()
    assert synced == [path.parent.parent, path, path.parent, path]


def test_an_error_of_the_disk_names_the_log_and_the_next_line_is_whole(log, path, monkeypatch):
    log.append(1, {"x": 1.0})
    write = file_operations.write

    def half(file, data):
        write(file, data[: len(data) // 2])
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(file_operations, "write", half)
        with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
            log.append(2, {"x": 2.0})
    log.append(3, {"x": 3.0})
    assert read_metrics(path)["x"] == Series([1, 3], [1.0, 3.0])
