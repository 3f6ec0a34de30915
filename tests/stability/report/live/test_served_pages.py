"""The pages of many studies: one that is odd takes nothing from the others."""

import logging
import os
import threading

import pytest

from stability.records.metric_log import MetricLog
from stability.records.parallel_reading import ReaderProcess
from stability.report.live import served_pages
from stability.report.live.served_pages import ServedPages


def test_error_that_nobody_foresaw_is_shown_and_logged(synthetic, tmp_path, monkeypatch, caplog):
    for name in ("good", "odd"):
        synthetic.write_synthetic(tmp_path / name, seeds=[0])
    summarise = served_pages.summary_of_study

    def summarise_or_fail(study):
        if study.question == "odd":
            raise KeyError("a bug")
        return summarise(study)

    synthetic.write_study_json(tmp_path / "odd", question="odd")
    monkeypatch.setattr(served_pages, "summary_of_study", summarise_or_fail)
    monkeypatch.setattr(served_pages, "PATIENCE", 60)
    page = ServedPages(tmp_path).index()
    assert "can&#39;t be read: KeyError" in page
    assert "7 finished of 7 runs" in page
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_what_is_in_the_making_at_the_end_is_left_in_silence(
    synthetic, tmp_path, monkeypatch, caplog
):
    for name in ("a", "b", "c", "d"):
        synthetic.write_synthetic(tmp_path / name, seeds=[0])
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def fail_at_the_end(study):
        asked.append(study.folder.name)
        begun.set()
        go_on.wait(60)
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(served_pages, "summary_of_study", fail_at_the_end)
    monkeypatch.setattr(served_pages, "PATIENCE", 0)
    monkeypatch.setattr(served_pages, "CLOSING_S", 0.01)
    pages = ServedPages(tmp_path)
    pages.index()
    assert begun.wait(60)
    pages.close()
    go_on.set()
    pages._reader.join(60)
    assert len(asked) == 1
    assert not caplog.records
    pages.index()  # somebody asks once more: nothing begins anew
    assert len(asked) == 1


def test_an_index_asked_for_late_starts_no_thread(synthetic, tmp_path):
    synthetic.write_synthetic(tmp_path / "a", seeds=[0])
    pages = ServedPages(tmp_path)
    pages.close()
    assert "a" in pages.index()
    assert not pages._reader.is_alive()
    assert pages._summaries.last("a") is None


def test_records_that_lead_out_are_not_read(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path / "runs" / "study", question="secret")
    (tmp_path / "runs" / "study" / "study.json").rename(tmp_path / "study.json")
    (tmp_path / "runs" / "study" / "study.json").symlink_to(tmp_path / "study.json")
    pages = ServedPages(tmp_path / "runs")
    found = pages.find()["study"]
    for page in (pages.study(found), pages.comparison([found, found], "1"), pages.index()):
        assert "leads out of" in page
        assert "secret" not in page


def test_states_are_shown_before_the_numbers(synthetic, tmp_path, monkeypatch):
    for name in ("a", "b"):
        synthetic.write_synthetic(tmp_path / name, seeds=[0])
    summarise, go_on = served_pages.summary_of_study, threading.Event()

    def summarise_later(study):
        assert go_on.wait(60)
        return summarise(study)

    monkeypatch.setattr(served_pages, "summary_of_study", summarise_later)
    monkeypatch.setattr(served_pages, "PATIENCE", 2)
    pages = ServedPages(tmp_path)
    early = pages.index()
    assert early.count("7 finished of 7 runs") == 2
    assert early.count("its numbers are being read") == 2
    assert "rungs" not in early
    stamp = pages.index_stamp()
    go_on.set()
    monkeypatch.setattr(served_pages, "PATIENCE", 60)
    late = pages.index()
    assert "being read" not in late
    assert late.count("7 finished of 7 runs") == 2
    assert pages.index_stamp() != stamp


@pytest.mark.parametrize("start", ["works", "fails"])
def test_several_processes_sum_up_what_one_does(synthetic, tmp_path, monkeypatch, start):
    for name in "abc":
        synthetic.write_synthetic(tmp_path / name, seeds=[0])
    (tmp_path / "b" / "study.json").write_text("{")
    monkeypatch.setattr(served_pages, "PATIENCE", 60)
    alone = ServedPages(tmp_path).index()
    asked = []

    class Counted(ReaderProcess):
        def __init__(self, function):
            if start == "fails":
                raise BlockingIOError("no more processes")
            super().__init__(function)

        def read(self, path):
            asked.append(path.name)
            return super().read(path)

    monkeypatch.setattr(served_pages, "ReaderProcess", Counted)
    monkeypatch.setattr(served_pages, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    pages = ServedPages(tmp_path)
    assert pages.index() == alone
    assert "b/study.json" in alone
    assert bool(asked) == (start == "works")
    asked.clear()
    assert pages.index() == alone
    assert not asked, "what is known is not read again"


def test_next_dashboard_computes_only_what_has_changed(synthetic, tmp_path, monkeypatch):
    for name in ("same", "grows"):
        synthetic.write_synthetic(tmp_path / "runs" / name, seeds=[0])
    monkeypatch.setattr(served_pages, "PATIENCE", 60)
    summarise, computed = served_pages.summary_of_study, []

    def summarise_and_tell(study):
        computed.append(study.folder.name)
        return summarise(study)

    monkeypatch.setattr(served_pages, "summary_of_study", summarise_and_tell)

    def page():
        computed.clear()
        return ServedPages(tmp_path / "runs", tmp_path / "store").index()

    first = page()
    assert set(computed) == {"same", "grows"}
    assert page() == first
    assert computed == []
    log = MetricLog(tmp_path / "runs" / "grows" / "baseline" / "seed-0" / "metrics.jsonl")
    log.append(200, {"train/loss": 7.0})
    log.close()
    page()
    assert computed == ["grows"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_records_that_lead_out_are_not_told_from_the_store(
    synthetic, tmp_path, monkeypatch, is_kept
):
    monkeypatch.setattr(served_pages, "PATIENCE", 60)
    study = synthetic.write_synthetic(tmp_path / "runs" / "study", seeds=[0], question="secret")
    if is_kept:
        assert "secret" in ServedPages(tmp_path / "runs", tmp_path / "store").index()
    (study / "baseline").rename(tmp_path / "away")
    (study / "baseline").symlink_to(tmp_path / "away")
    for _ in range(2):
        page = ServedPages(tmp_path / "runs", tmp_path / "store").index()
        assert "leads out of" in page
        assert "secret" not in page
