"""The verdict in the terminal: the answer first, the table of evidence within 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stability.analysis.evidence import LEVELS
from stability.report.terminal.verdict import print_answer, verdict_lines
from stability.report.view.evidence import evidence_rows, headline
from stability.tracking.tables import evidence_rows as wandb_rows
from stability.tracking.tables import outcome_summary
from tests.stability.report.synthetic_verdict import STATES, study_verdict

QUESTION = "Is [bold red]x[/] y?"


def printed(verdict, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_answer(QUESTION, verdict, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_every_figure_is_whole(width):
    text = printed(study_verdict(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    # three of the first arm, four of fa2, four of the broken one
    assert text.count("1.02x +0.0001%ab") == 11
    assert "broken FAIL, as it must. " in text.replace("\n", " ")
    assert text.count("not measured") == 1


def test_the_answer_is_the_first_line():
    question, first = printed(study_verdict()).strip().split("\n\n")[:2]
    assert question == QUESTION
    assert first == "a_candidate_of_a_long_name FAIL, flash_fa2 PASS; broken FAIL, as it must"
    assert verdict_lines(study_verdict(), study_verdict().arms)[0] == f"{first}."


def test_a_control_that_does_not_fail_is_in_the_first_line_and_in_red():
    text = printed(study_verdict(broken="PASS"))
    assert text.strip().split("\n\n")[1].endswith("; broken PASS, but it must FAIL")
    assert evidence_rows(study_verdict(broken="PASS"))[-1].tone == "bad"
    assert evidence_rows(study_verdict())[-1].tone == "good"


def test_what_was_changed_after_the_seal_is_said_before_the_table():
    text = printed(study_verdict(exploratory=("margin_nats was 0.005, is 0.5",)))
    assert text.strip().split("\n\n")[1].startswith("EXPLORATORY: a_candidate")
    assert text.index("margin_nats was 0.005") < text.index("operator")


def test_before_the_first_look_there_is_no_verdict():
    assert headline(study_verdict(look=0)).endswith("no verdict before the first look, at 3 seeds")


def test_a_cell_says_what_would_decide_it():
    cells = evidence_rows(study_verdict())[0].cells
    assert [cell.state for cell in cells] == list(STATES)
    assert cells[2].sentence.endswith("of 1.10. To decide it: 5 seeds.")
    assert "To decide" not in cells[0].sentence


def test_each_level_has_its_sentence_in_the_lines():
    verdict = study_verdict()
    text = " ".join(" ".join(verdict_lines(verdict, verdict.arms)).split())
    for level, state in zip(LEVELS, STATES, strict=True):
        assert f"a_candidate_of_a_long_name at the {level} is {state}" in text


def test_what_e_is_stands_once_and_only_beside_a_figure_of_it():
    plain = study_verdict()
    arms = (replace(plain.arms[0], sentence="its intervals exclude E 1.04, E 1.1"), *plain.arms[1:])
    for verdict, count in ((plain, 0), (replace(plain, arms=arms), 1)):
        for lines in (verdict_lines(verdict, verdict.arms), printed(verdict).splitlines()):
            said = [line for line in lines if line.startswith("E: an arm's distance from the ref")]
            assert len(said) == count
            assert all(len(line) <= 80 for line in said)


def test_what_f_is_stands_beside_a_figure_of_it():
    plain = study_verdict()
    first = plain.arms[0]
    level = replace(first.levels["gradient"], cell="1.02x f -0.012")
    arm = replace(first, levels={**first.levels, "gradient": level})
    said = "f: the share of a gradient's squared error that is the same at all looks."
    assert said not in printed(plain)
    assert printed(replace(plain, arms=(arm, *plain.arms[1:]))).count(said) == 1


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("3x +0.004%", ["x: an error, as", "%: by how much"]),
        ("18x f 0.263", ["x: an error, as", "f: the share"]),
        ("-2e-05%", ["%: by how much"]),
        ("1.02x", ["x: an error, as"]),
        ("not finite", []),
        ("-3.6e-5 nats", []),
    ],
)
def test_what_the_figures_of_a_cell_are_stands_below_the_table(cell, found):
    plain = study_verdict()
    quiet = {name: replace(one, cell="-") for name, one in plain.arms[0].levels.items()}
    arm = replace(
        plain.arms[0], levels={**quiet, "operator": replace(quiet["operator"], cell=cell)}
    )
    text = printed(replace(plain, arms=(arm,)))
    signs = ("x: an error, as", "%: by how much", "f: the share", "E: an arm's")
    assert [sign for sign in signs if sign in text] == found


def test_the_step_that_training_is_judged_at_stands_below_the_table():
    plain = study_verdict()
    arms = []
    for arm in plain.arms:
        level = replace(arm.levels["training"], figures={"step": 30.0})
        arms.append(replace(arm, levels={**arm.levels, "training": level}))
    assert "training at step" not in printed(plain)
    said = " ".join(printed(replace(plain, arms=tuple(arms))).split())
    assert "judged at the look at 3 seeds, training at step 30" in said
    assert "warm-up" not in said
    assert "training at step" not in printed(replace(plain, arms=tuple(arms), look=0))
    early = replace(arms[0].levels["training"], figures={"step": 30.0, "warm_up": 50.0})
    arms[0] = replace(arms[0], levels={**arms[0].levels, "training": early})
    said = " ".join(printed(replace(plain, arms=tuple(arms))).split())
    assert "training at step 30, in the warm-up of 50 updates" in said


def test_wandb_gets_a_row_for_each_arm_and_level():
    columns, rows = wandb_rows(study_verdict().to_dict()["arms"])
    assert len(rows) == 3 * len(LEVELS)
    first = dict(zip(columns, rows[1], strict=True))
    assert (first["arm"], first["verdict"], first["level"]) == (
        "a_candidate_of_a_long_name",
        "FAIL",
        "gradient",
    )
    assert first["state"] == "harmed"


def test_wandb_keeps_the_controls_apart_from_the_verdicts():
    summary = outcome_summary(study_verdict().to_dict()["arms"])
    assert summary == {
        "verdict/a_candidate_of_a_long_name": "FAIL",
        "verdict/flash_fa2": "PASS",
        "control/broken": "FAIL, as it must",
    }
    assert outcome_summary(study_verdict(broken="PASS").to_dict()["arms"])["control/broken"] == (
        "PASS, but it must FAIL"
    )


def test_a_study_without_a_candidate_has_its_question_alone():
    assert printed(None).strip() == QUESTION
