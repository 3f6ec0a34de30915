"""A probe's record is read back as it was written, and a damaged one is refused by name."""

from dataclasses import replace

import pytest

from stability.records.metric_log import MetricLog
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    ProbeRecord,
    SealedLog,
    check_probe_log,
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


def _ended(folder):
    """Write a probe that has ended after three steps; return its log."""
    log = MetricLog(folder / METRICS_FILE)
    for step in range(3):
        log.append(step, {"train/loss": 1.0 + step})
    log.close()
    length = log.position()
    sealed = SealedLog(bytes=length, sha256=log.hash_until(length))
    write_probe_record(folder, replace(RECORD, state="ended", log=sealed))
    return folder / METRICS_FILE


def _lines(count):
    return lambda data: b"".join(data.splitlines(keepends=True)[:count])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_lines(2), "has lost its end: it must hold "),
        (lambda data: data[:-1], "has lost its end: it must hold "),
        (lambda data: data * 2, "must end after "),
        (lambda data: data + b"{", "must end after "),
        (lambda data: data.replace(b"1.0", b"7.0"), "is damaged in its first "),
    ],
)
def test_a_log_that_is_not_the_one_an_ended_probe_has_closed_is_refused(tmp_path, spoil, message):
    log = _ended(tmp_path)
    check_probe_log(tmp_path, read_probe_record(tmp_path))
    log.write_bytes(spoil(log.read_bytes()))
    with pytest.raises(ValueError, match=f"{METRICS_FILE}: {message}") as caught:
        check_probe_log(tmp_path, read_probe_record(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_log_that_is_gone_is_refused_and_a_seal_that_is_gone_too(tmp_path):
    _ended(tmp_path).unlink()
    with pytest.raises(ValueError, match=f"{METRICS_FILE}: has lost its end"):
        check_probe_log(tmp_path, read_probe_record(tmp_path))
    with pytest.raises(ValueError, match=f"{PROBE_FILE}: must say which log"):
        check_probe_log(tmp_path, replace(RECORD, state="ended"))


def test_nothing_is_asked_of_the_log_of_a_probe_that_runs_or_is_old(tmp_path):
    _ended(tmp_path).unlink()
    for state in ("running", ""):
        check_probe_log(tmp_path, replace(RECORD, state=state))
