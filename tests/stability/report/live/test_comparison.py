"""Several studies on one page: what differs, ratios and drifts of each, names as text."""

import re
from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.report.live.comparison import differences, render_comparison
from tests.stability.report.pages import figures_of

HOSTILE = "<script>alert(1)</script>\"'" + 300 * "x"


@pytest.fixture
def study(finished):
    return read_study(finished)


def renamed(study, old, new):
    arms = tuple(replace(arm, name=new) if arm.name == old else arm for arm in study.arms)
    return replace(study, arms=arms)


def test_only_what_differs_is_listed(study):
    base = {**study.base, "precision": "32-true", "probe": {"every": 9}}
    other = replace(study, base=base, seeds=(0,), yardstick="nudge")
    assert differences({"a": study, "b": study}) == []
    assert differences({"a": study, "b": other}) == [
        ("precision", ["bf16-mixed", "32-true"]),
        ("seeds", ["[0, 1]", "[0]"]),
        ("yardstick", ["fp32", "nudge"]),
    ]


def test_what_a_study_does_not_name_is_told_as_it_is_read(study):
    reference = tuple(replace(x, role="reference") if x.name == "fp32" else x for x in study.arms)
    policy = replace(study.policy, step=10)
    other = replace(study, yardstick="", early_step=0, arms=reference, policy=policy)
    assert differences({"a": study, "b": other}) == [("early_step", ["20", "10"])]


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
