"""A probe's record is read back as it was written, and a damaged one is refused by name."""

import pytest

from stability.records.probe_record import (
    PROBE_FILE,
    ProbeRecord,
    read_probe_record,
    write_probe_record,
)
from stability.records.sealed_json import read_sealed, write_sealed

RECORD = ProbeRecord(
    model="GPT2",
    primary={"implementation": "own"},
    shadows={"flash:fa2": {"engine": "twin"}},
    golden=True,
    layers=["h.0", "h.1"],
    steps=3,
    environment={"torch": "2.13"},
)


def test_a_record_comes_back(tmp_path):
    write_probe_record(tmp_path, RECORD)
    assert read_probe_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [PROBE_FILE]


def _without(key):
    return lambda content: content.pop(key)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without("layers"), "missing key layers; it is no whole record"),
        (lambda c: c.update(extra=1), "unknown key 'extra'; nearest: "),
        (lambda c: c.update(steps="3"), "steps must be of type int, is '3'"),
        (lambda c: c.update(shadows=[]), r"shadows must be of type dict, is \[\]"),
    ],
)
def test_a_damaged_record_is_one_line_with_file_and_key(tmp_path, edit, message):
    write_probe_record(tmp_path, RECORD)
    content = read_sealed(tmp_path / PROBE_FILE, "")
    edit(content)
    write_sealed(tmp_path / PROBE_FILE, content)
    with pytest.raises(ValueError, match=f"{PROBE_FILE}: {message}") as caught:
        read_probe_record(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_a_torn_and_a_foreign_file_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="there is no such file; `stability probe` writes it"):
        read_probe_record(tmp_path)
    (tmp_path / PROBE_FILE).write_text('{"model": ')
    with pytest.raises(ValueError, match="must be JSON, is torn or damaged"):
        read_probe_record(tmp_path)
    (tmp_path / PROBE_FILE).write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object, is list"):
        read_probe_record(tmp_path)
