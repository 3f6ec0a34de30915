"""A verdict as Markdown and as annotations: the answer first, and no name is markup."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.report import markdown
from stability.report.markdown import annotations, summary_text
from tests.stability.report.synthetic_verdict import study_verdict


def tables(text):
    """Return the tables of a text as lists of rows of cells."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            found.append(rows)
            rows = []
    return found


@pytest.fixture
def plain(monkeypatch):
    """A study of hostile words, without a ladder."""
    monkeypatch.setattr(markdown, "_drifts", lambda _: ["(drifts)"])
    monkeypatch.setattr(markdown, "ladder_of", lambda _: None)
    monkeypatch.setattr(markdown, "scope_line", lambda _: "Tried: 9 weights, a*b.")
    return SimpleNamespace(name="a|b", question="<img src=x> *is* `x`\n| y | ?")


def test_the_answer_is_the_heading_and_each_arm_has_a_row(plain):
    text = summary_text(plain, study_verdict())
    first = text.splitlines()[0]
    assert first.startswith(
        "### a&#124;b: a\\_candidate\\_of\\_a\\_long\\_name FAIL, flash\\_fa2 PASS; "
    )
    (evidence,) = tables(text)
    assert evidence[0] == ["arm", "operator", "gradient", "training", "outcome", "answer"]
    answers = {row[0]: row[-1] for row in evidence[2:]}
    assert answers == {
        "a\\_candidate\\_of\\_a\\_long\\_name": "❌ FAIL",
        "flash\\_fa2": "✅ PASS",
        "broken": "✅ FAIL, as it must",
    }
    assert {len(row) for row in evidence} == {6}
    assert "<sub>Judged at the look at 3 seeds. Tried: 9 weights, a\\*b. training-" in text


def test_what_e_is_stands_below_a_figure_of_it(plain):
    verdict = study_verdict()
    assert "the reference's weights" not in summary_text(plain, verdict)
    arms = (replace(verdict.arms[0], sentence="its intervals exclude E 1.04"), *verdict.arms[1:])
    text = summary_text(plain, replace(verdict, arms=arms))
    assert text.count("E: an arm's distance from the reference's weights, over the") == 1


def test_nothing_of_the_users_is_markup(plain):
    text = summary_text(plain, study_verdict())
    assert "<img" not in text
    assert "*&#60;img src=x&#62; \\*is\\* \\`x\\` &#124; y &#124; ?*" in text
    assert "[bold]" not in text.replace("\\[bold\\]", "")


def test_of_one_arm_alone_the_others_are_left_out(plain):
    verdict = study_verdict()
    (evidence,) = tables(summary_text(plain, verdict, verdict.arms[1:2]))
    assert [row[0] for row in evidence[2:]] == ["flash\\_fa2"]
    assert len(annotations(verdict, verdict.arms[1:2])) == 1


def test_what_is_exploratory_is_said_before_the_table(plain):
    text = summary_text(plain, study_verdict(exploratory=("margin_nats was 0.005, is 0.5",)))
    assert text.index("EXPLORATORY") < text.index("| arm |")


def test_annotations_are_commands_whose_text_ends_none():
    verdict = study_verdict()
    found = annotations(verdict, verdict.arms)
    kinds = [re.match(r"::(\w+) title=([^:]*)::(.*)$", line).groups() for line in found]
    assert [kind for kind, _, _ in kinds] == ["error", "notice", "notice"]
    # a comma would begin another property
    assert kinds[2][1] == "broken FAIL%2C as it must"
    wild = study_verdict(broken="PASS")
    object.__setattr__(wild.arms[0], "sentence", "100 %\n::warning::x")
    line = annotations(wild, wild.arms)[0]
    assert "\n" not in line
    assert "100 %25%0A" in line or "100 %25 " in line


def test_a_study_on_disk_has_its_drifts_in_a_table(trained, tmp_path, monkeypatch, capsys):
    place = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    for _ in range(2):
        code = main(["verdict", str(trained), "--markdown", "--github"])
        assert code in (1, 3)
    said = capsys.readouterr().out
    assert "::" in said
    study = read_study(trained)
    assert place.read_text() == 2 * summary_text(study), "a job's summary is added to"
    drifts = tables(summary_text(study))[-1]
    assert drifts[0][:2] == ["arm", "what changed"]
    assert {row[0].replace("\\", "") for row in drifts[2:]} == {arm.name for arm in study.arms}
    (rerun,) = (row for row in drifts if row[0] == "rerun")
    assert "0 (exact)" in rerun
    assert {len(row) for row in drifts} == {len(drifts[0])}
