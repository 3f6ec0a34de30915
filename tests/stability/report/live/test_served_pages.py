"""The pages of many studies: one that is odd takes nothing from the others."""

import logging
import re
from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import scientific
from stability.analysis.study_records import read_study
from stability.config.schema import PolicyConfig
from stability.report.live import served_pages
from stability.report.live.served_pages import ServedPages
from stability.report.live.small_ladder import small_ladder
from stability.report.live.study_summary import answers, summary_of_study
from stability.report.page.compare_page import differences, render_comparison
from stability.report.view.palette import arm_styles
from tests.stability.report.pages import figures_of

HOSTILE = "<script>alert(1)</script>\"'" + 300 * "x"


@pytest.fixture
def study(finished):
    return read_study(finished)


def renamed(study, old, new):
    arms = tuple(replace(arm, name=new) if arm.name == old else arm for arm in study.arms)
    return replace(study, arms=arms)


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


def test_summary_says_how_a_study_that_runs_goes(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS[:3]:
        synthetic.write_run(tmp_path, arm, 0)
    synthetic.write_run(tmp_path, synthetic.ARMS[3], 0, state="running", until=80)
    synthetic.write_run(tmp_path, synthetic.ARMS[4], 0, state="failed", until=40)
    found = summary_of_study(read_study(tmp_path))
    assert found.state == (
        "1 running, 1 failed, 3 finished, 9 missing of 14 runs; now rerun, seed 0, at step 80"
    )
    assert found.is_running
    assert found.is_bad
    assert found.done == pytest.approx((3 * 200 + 80 + 40) / (14 * 200))
    synthetic.write_study_json(tmp_path / "new")
    assert summary_of_study(read_study(tmp_path / "new")).done == 0


def test_answer_is_the_verdict_once_there_is_one(study):
    ladder = ladder_of(study)
    assert [said.split()[0] for said in answers(study, ladder)] == ["flash_fa2", "flash_all_bf16"]
    policy = PolicyConfig(candidate="flash_fa2", yardstick="fp32", level=0.5)
    assert answers(replace(study, policy=policy), ladder)[0].startswith("PASS: at step 20")
    too_sure = replace(study, policy=replace(policy, level=0.9))
    assert answers(too_sure, ladder) == answers(study, ladder)
    controls = replace(study, arms=tuple(a for a in study.arms if a.axis != "attention"))
    assert "its controls" in answers(controls, ladder_of(controls))[0]


def test_small_ladder_places_arms_by_the_logarithm_of_their_ratio(study):
    ladder = ladder_of(study)
    small = small_ladder(ladder, arm_styles([arm.name for arm in study.arms]))
    rungs = {rung.arm: rung for rung in small.rungs}
    assert list(rungs) == [row.arm for row in ladder.rows if row.arm != "baseline"]
    assert rungs["rerun"].text == "0 (exact)"
    assert rungs["rerun"].early is None
    assert rungs["init_seed"].early is None, "decades away: named only"
    assert rungs["init_seed"].text == "244x"
    assert rungs["fp32"].early.mean == small.yardstick_at
    marks = [rungs[arm].early for arm in ("nudge", "flash_fa2", "flash_all_bf16")]
    assert marks[0].mean < marks[1].mean < small.yardstick_at < marks[2].mean
    assert all(0 <= mark.low <= mark.mean <= mark.high <= 100 for mark in marks)
    without = ladder_of(replace(study, yardstick=""))
    small = small_ladder(without, arm_styles([arm.name for arm in study.arms]))
    assert small.yardstick_at is None
    assert small.measure.startswith("drift (relative L2)")
    assert [rung.text for rung in small.rungs if rung.arm == "fp32"] == [
        scientific(ladder.row("fp32").rel_l2.early.mean)
    ]


def test_only_what_differs_is_listed(study):
    base = {**study.base, "precision": "32-true", "probe": {"every": 9}}
    other = replace(study, base=base, seeds=(0,), yardstick="nudge")
    assert differences({"a": study, "b": study}) == []
    assert differences({"a": study, "b": other}) == [
        ("precision", ["bf16-mixed", "32-true"]),
        ("seeds", ["[0, 1]", "[0]"]),
        ("yardstick", ["fp32", "nudge"]),
    ]


def test_comparison_holds_each_studys_ratios_and_drifts(study):
    other = replace(study, yardstick="nudge", base={**study.base, "precision": "32-true"})
    page = render_comparison({"a": study, "b": other}, {"a": "/study/a/", "b": "/study/b/"}, "1")
    figures = figures_of(page)
    marks = figures["ladders"]["data"]
    row = ladder_of(study).row("flash_fa2")
    early = next(m for m in marks if "flash_fa2 of a at step 20" in m["hovertemplate"])
    assert early["x"] == [pytest.approx(row.ratio.early.mean)]
    assert early["error_x"]["array"] == [pytest.approx(row.ratio.early.high - early["x"][0])]
    assert early["marker"]["symbol"].endswith("-open")
    assert [note["text"] for note in figures["ladders"]["layout"]["annotations"]].count(
        "◂ 0 (exact)"
    ) == 2
    assert re.findall(r'data-choice="([^"]*)"', page) == ["arm shown", "metric"]
    assert re.search(r'data-choice="arm shown"[^>]*>\s*<option value="flash_all_bf16"', page)
    lines = [
        trace
        for trace in figures["drift-of-arm"]["data"]
        if (trace["meta"]["arm shown"], trace["meta"]["metric"]) == ("flash_fa2", "rel_l2")
        and trace["name"] in ("a", "b")
    ]
    assert all(
        t["x"] != [None]
        for t in figures["drift-of-arm"]["data"]
        if t["meta"]["arm shown"] != "rerun"
    )
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in lines}) == 2
    assert "The yardsticks differ (a: fp32, b: nudge)" in page
    assert "The baselines differ" in page


def test_comparison_of_the_same_base_may_set_drifts_against_each_other(study):
    other = replace(study, seeds=(0,))
    page = render_comparison({"a": study, "b": other}, {"a": "a", "b": "b"}, "1")
    assert "The baselines differ" not in page
    assert "The yardsticks differ" not in page


def test_studies_without_drifts_or_yardstick_can_be_compared(study, synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    pair = {"new": read_study(tmp_path), "bare": replace(study, yardstick="")}
    page = render_comparison(pair, {"new": "new", "bare": "bare"}, "1")
    notes = [n["text"] for n in figures_of(page)["ladders"]["layout"]["annotations"]]
    assert notes.count("no drift yet: missing") == 6
    assert notes.count("no ratio: no yardstick") == 5


def test_hostile_names_stay_text_in_a_comparison(study):
    spoiled = renamed(replace(study, question=HOSTILE, yardstick=HOSTILE), "fp32", HOSTILE)
    page = render_comparison({HOSTILE: spoiled, "b": study}, {HOSTILE: "/x", "b": "/y"}, "1")
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 5
    for figure in figures_of(page).values():
        texts = [str(trace.get("name", "")) for trace in figure["data"]]
        texts += [trace.get("hovertemplate") or "" for trace in figure["data"]]
        texts += figure["layout"]["yaxis"].get("ticktext", [])
        assert not any("<script" in text for text in texts), "plotly reads tags"
        assert max(map(len, figure["layout"]["yaxis"].get("ticktext", [""]))) < 80
