"""What verbs print with --json is JSON, and their exit codes are those of one table."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stability.cli import verdict
from stability.cli.main import main
from stability.cli.output import EXIT_CODES, UNDECIDED, in_lines, print_json, print_line

ROOT = Path(__file__).parents[3]


def test_a_figure_that_is_no_number_is_printed_as_text(capsys):
    print_json({"rel_l2": {4: math.nan, 6: -math.inf}, "parts": ("layer_0",)})
    text = capsys.readouterr().out
    assert text.endswith("}\n")
    assert json.loads(text, parse_constant=str.upper) == {
        "rel_l2": {"4": "nan", "6": "-inf"},
        "parts": ["layer_0"],
    }


def test_help_prints_the_table_of_exit_codes(capsys):
    assert main(["--help"]) == 0
    table = capsys.readouterr().out.partition("exit codes:\n")[2]
    told = " ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
    assert " ".join(table.split()) == told
    assert [line[:5].strip() for line in table.splitlines() if line[2] != " "] == [
        str(code) for code in EXIT_CODES
    ]


def test_the_page_on_studies_names_the_exit_codes_of_the_table():
    page = (ROOT / "docs" / "study.md").read_text()
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)  # links to the glossary
    (said,) = re.findall(r"\*\*Exit codes\*\*: (.*?)\n- ", page, re.S)
    parts = [" ".join(part.split()) for part in said.rstrip(".").split(";")]
    assert parts == [f"{code} {meaning}" for code, meaning in EXIT_CODES.items()]


LINES = """
import sys
from stability.cli import main, output, show

def verb(folder: str) -> int:
    output.print_line(folder)
    return 0

show.show = verb
sys.exit(main.main(["show", "any"]))
"""


def _run(*words, stdout):
    return subprocess.run(
        [sys.executable, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    "words",
    [["-m", "stability.cli.main", "--help"], ["-m", "stability.cli.main", "doctor"], ["-c", LINES]],
    ids=["all-at-once", "by-rich", "line-by-line"],
)
def test_a_reader_that_leaves_early_ends_a_verb_quietly(words):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _run(*words, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_without_room_is_told_on_one_line():
    with Path("/dev/full").open("w") as full:
        done = _run("-m", "stability.cli.main", "--version", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "stability: standard output: No space left on device\n"


def test_a_pipe_that_breaks_elsewhere_is_told(monkeypatch, capsys):
    def broken(folder):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("stability.cli.show.holds_probe", broken)
    with pytest.raises(SystemExit) as stop:
        main(["show", "runs"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "stability: show: Broken pipe\n"


def test_the_table_names_all_that_is_undecided():
    said = EXIT_CODES[UNDECIDED]
    outcomes = [outcome for outcome, code in verdict._EXIT_CODES.items() if code == UNDECIDED]
    assert outcomes
    assert all(outcome in said for outcome in outcomes), said
    runner = (ROOT / "experiments" / "kit" / "runner.py").read_text()
    assert '"undecided": UNDECIDED}[record.controls]' in runner
    assert "a control of an experiment" in said


def test_a_terminal_obeys_nothing_in_json_which_says_the_same(capsys):
    said = {"arm \x1b[2J\x7f\x9b\u202e\u2066\n": ["\\", "\u00e9\u4f60"]}
    print_json(said)
    text = capsys.readouterr().out
    assert json.loads(text) == said
    assert r"\u001b[2J\u007f\u009b\u202e\u2066\n" in text
    assert "\u00e9\u4f60" in text
    assert not {"\x7f", "\x9b", "\u202e", "\u2066"} & set(text)


def test_a_terminal_obeys_nothing_in_a_line_or_an_error(capsys):
    print_line("arm \x1b]0;owned\x07 FAIL")
    with pytest.raises(SystemExit):
        main(["verdict", "no/such/\x1b[2Jstudy"])
    said = capsys.readouterr()
    assert said.out == "arm \\x1b]0;owned\\x07 FAIL\n"
    assert r"no/such/\x1b[2Jstudy" in said.err
    assert "\x1b" not in said.err


class Terminal(io.StringIO):
    """What takes text as a terminal does."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("whole", [False, True])
def test_a_line_is_wrapped_in_a_terminal_unless_it_is_to_stay_whole(monkeypatch, whole):
    """As Markdown to paste, or an annotation of a workflow."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    print_line("word " * 20, **({"whole": True} if whole else {}))
    assert len(terminal.getvalue().splitlines()) == (1 if whole else 3)


@example(words=[29 * "a"], indent=4, width=32)
@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.text("abc-/{}", min_size=1, max_size=30), min_size=1, max_size=40),
    indent=st.integers(0, 12),
    width=st.integers(32, 100),
)
def test_a_terminal_gets_no_line_wider_than_it_is_and_no_word_broken(words, indent, width):
    text = " " * indent + " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        found = in_lines(text, Terminal())
    assert found.split() == words
    assert in_lines(text, io.StringIO()) == text
    for line in found.split("\n"):
        assert len(line) <= width or len(line.split()) == 1
        assert line.startswith(" " * indent)
