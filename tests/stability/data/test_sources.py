"""Where text comes from, and what is refused before any training starts."""

import json
import logging
import os
import sysconfig
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from stability.config.schema import DataConfig
from stability.data.sources import load_texts

ROWS = ["first\nrow", "zweite Zeile, größer", ""]


def _texts(path, **options):
    return load_texts(DataConfig(source=str(path), **options))


@pytest.fixture
def no_hub(monkeypatch):
    """Point the hub at a port where nobody answers."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def announced():
    """What the libraries log meanwhile; their handlers write past pytest's capture."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


def _write_json(path):
    path.write_text(json.dumps([{"text": row, "n": 1} for row in ROWS]))


def _write_jsonl(path):
    path.write_text("".join(json.dumps({"text": row, "n": 1}) + "\n" for row in ROWS))


def _write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": ROWS}), path)


@pytest.mark.parametrize("write", [_write_json, _write_jsonl, _write_parquet])
def test_local_rows_are_read_whole_and_in_order(tmp_path, write):
    path = tmp_path / f"data.{write.__name__.removeprefix('_write_')}"
    write(path)
    assert _texts(path) == ROWS


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("one\n\n  two\nthree")
    assert _texts(path) == ["one\n\n  two\nthree"]


def test_a_file_that_changed_under_the_same_name_size_and_time_is_read_anew(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "old"}\n')
    stamp = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    assert _texts(path) == ["old"]
    path.write_text('{"text": "new"}\n')
    os.utime(path, ns=stamp)
    assert _texts(path) == ["new"]


def test_stdlib_is_the_top_level_modules_by_name():
    texts = _texts("stdlib")
    folder = Path(sysconfig.get_path("stdlib"))
    expected = sorted(path.name for path in folder.glob("*.py"))
    assert len(texts) == len(expected)
    for at in (0, -1, expected.index("random.py")):
        assert texts[at] == (folder / expected[at]).read_text(encoding="utf-8")
    assert sum(map(len, texts)) > 4_000_000


def test_another_column_can_be_read_and_null_rows_are_left_out(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"body": "a"}\n{"body": null}\n{"body": "b"}\n')
    assert _texts(path, text_column="body") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, r"stdlib, a file or a data set, got .*gone.txt'; no such file"),
        ("empty.txt", "", r"must hold text, got .*empty.txt', which is empty"),
        ("empty.jsonl", "", "which is empty"),
        ("rows.json", "[]", "which is empty"),
        ("blank.jsonl", "\n\n", "which is empty"),
        ("nulls.jsonl", '{"text": null}\n', "which is empty"),
        ("bad.jsonl", "{oops\n", r"readable as .jsonl, got .*bad.jsonl': JSON parse error"),
        ("bad.parquet", "oops", r"readable as .parquet, got .*bad.parquet': "),
        ("page.html", "<p>", r"a file of .txt, .json, .jsonl, .parquet, got .*page.html'; convert"),
        (
            "numbers.jsonl",
            '{"text": 3}\n',
            r"text_column must hold strings, got 3 in column 'text'",
        ),
        ("other.jsonl", '{"body": "a"}\n', r"column of .*other.jsonl \(body\), got 'text'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, announced, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as refusal:
        _texts(path)
    assert "\n" not in str(refusal.value)
    assert announced == [], "nothing but the error is shown"


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"readable as .txt, got .*latin.txt'.*utf-8"):
        _texts(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        _texts(tmp_path)


def test_an_unreachable_data_set_is_refused_at_once_in_one_line(no_hub, announced):
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(ValueError, match="'no/such' is neither stdlib, a file, nor a reachable"):
        _texts("no/such")
    assert announced == [], "nothing is tried again"
    assert before == datasets.config.HF_HUB_OFFLINE, "the offline mode is put back"


def test_a_data_set_on_the_hub_is_asked_for_by_name_config_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"body": ["a", None, "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("stability.data.hub.is_reachable", lambda: True)
    options = {"text_column": "body", "split": "validation"}
    assert _texts("owner/name:small", **options) == _texts("owner/name", **options) == ["a", "b"]
    assert asked == [("owner/name", "small", "validation"), ("owner/name", None, "validation")]
