"""The pages of many studies: one that is odd takes nothing from the others."""

import logging

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


def test_records_that_lead_out_are_not_read(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path / "runs" / "study", question="secret")
    (tmp_path / "runs" / "study" / "study.json").rename(tmp_path / "study.json")
    (tmp_path / "runs" / "study" / "study.json").symlink_to(tmp_path / "study.json")
    pages = ServedPages(tmp_path / "runs")
    found = pages.find()["study"]
    for page in (pages.study(found), pages.comparison([found, found], "1"), pages.index()):
        assert "leads out of" in page
        assert "secret" not in page
