"""`stability report`: once, opened, or for as long as a study runs."""

import webbrowser

import pytest

from stability.cli import report as module
from stability.cli.report import report
from stability.records.manifest import read_manifest
from tests.stability.report.synthetic import (
    ARMS,
    STEPS,
    write_run,
    write_study_json,
    write_synthetic,
)
from tests.stability.report.synthetic_probe import write_probe


def test_report_is_opened_from_disk(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    folder = write_synthetic(tmp_path / "study", seeds=[0])
    assert report(folder, open=True) == 0
    assert opened == [(folder / "report.html").as_uri()]


def test_watched_page_follows_the_records_and_rests_once_the_study_has_ended(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])
    write_run(folder, ARMS[0], 0, state="running", until=40)
    pages, waiting = [], list(ARMS)

    def train_on(_seconds):
        pages.append((folder / "report.html").read_text())
        paths = write_run(folder, waiting.pop(0), 0)
        assert read_manifest(paths.manifest).step == STEPS

    # the first run's log is written from the start again, not on
    (folder / "baseline" / "seed-0" / "metrics.jsonl").unlink()
    monkeypatch.setattr(module.time, "sleep", train_on)
    assert report(folder, watch=True) == 0
    assert waiting == []
    assert all('data-reload="5"' in page for page in pages)
    assert pages[1] != pages[2]
    assert "data-reload=" not in (folder / "report.html").read_text().split("<script")[0]


def test_interrupted_watch_leaves_a_page_that_does_not_reload(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupt)
    assert report(folder, watch=True) == 0
    assert "data-reload=" not in (folder / "report.html").read_text().split("<script")[0]


def test_watching_a_probe_is_refused(tmp_path):
    with pytest.raises(ValueError, match="watch is for a study, got the probe"):
        report(write_probe(tmp_path), watch=True)
