"""Every word of a record arrives on the page and in the terminal, and none of it becomes markup."""

import io
import re
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from experiments.kit.record import ExperimentRecord
from experiments.kit.results_table import (
    BEGIN,
    END,
    SECTIONS,
    Described,
    described,
    filled_in,
    print_experiment,
    print_experiments,
)
from experiments.kit.stated_tests import StatedTest

DOCSTRING = """Toy numbers fall.

Claim: each number is below
    the one before.
Source: a book, page 3
Published: 4 to 1
Varies: the place
Measured: the number
Refuted if: one rises
Sizes: cpu: 3 places, 2 heads; gpu: 30 places; at least
    2 GiB; quick: 2 places

    stability experiment toy
"""
PAGE = f"Written by hand.\n{BEGIN}\nof before\n{END}\nBelow.\n"
RECORD = ExperimentRecord(
    name="toy",
    size="cpu",
    settings={},
    measured="5 to 2",
    explanation="",
    tests=[
        asdict(StatedTest(statement="falls", found="0.5x", decision="holds")),
        asdict(StatedTest(statement="by half", found="0.4x", decision="refuted")),
        asdict(StatedTest(statement="to a third", found="0.3x", decision="undecided")),
        asdict(
            StatedTest(
                statement="rerun is the same", found="0 in 3", decision="holds", control=True
            )
        ),
    ],
    rows=[],
    hardware={"name": "Intel(R) Xeon(R) Processor", "cores": 2},
    versions={"torch": "2.13.0"},
    commit="abc1234",
    seconds=12.34,
)
TOY = described("toy", DOCSTRING)


def _generated(*records: ExperimentRecord, each=TOY) -> str:
    page = filled_in(PAGE, [each], {each.name: records})
    return page.partition(BEGIN)[2].partition(END)[0]


def _cells(row: str) -> list[str]:
    """Split a row as GitHub does: at bars that no backslash escapes."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def _shown(markdown: str) -> str:
    """What a reader sees of text in which every escape is one."""
    return re.sub(r"\\([^a-z0-9\s])", r"\1", markdown)


def test_docstring_sections_are_joined_and_what_follows_is_none_of_them():
    assert TOY.title == "Toy numbers fall"
    assert TOY.sections["Claim"] == "each number is below the one before."
    assert TOY.sections["Sizes"].endswith("quick: 2 places")
    assert set(TOY.sections) == set(SECTIONS)


def test_a_section_may_begin_on_the_next_line_and_is_never_lost():
    later = DOCSTRING.replace("Claim: each", "Claim:\n    each")
    assert described("toy", later).sections["Claim"] == TOY.sections["Claim"]
    twice = DOCSTRING + "\nClaim: and all are even\n"
    assert described("toy", twice).sections["Claim"].endswith("before. and all are even")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_or_empty_section_is_named(section):
    pattern = rf"{section}:.*\n(    .*\n)*"
    for spoilt in (re.sub(pattern, "", DOCSTRING), re.sub(pattern, f"{section}:\n", DOCSTRING)):
        with pytest.raises(ValueError, match=f"experiment toy: .* a line `{section}: ...`"):
            described("toy", spoilt)
    with pytest.raises(ValueError, match=r"a line `Claim: \.\.\.`, has none"):
        described("toy", "")


def test_row_has_claim_published_measured_hardware_and_the_count_that_agrees():
    row = _generated(RECORD).splitlines()[3]
    assert _cells(row) == [
        "[toy](#toy-cpu)",
        "each number is below the one before",
        "4 to 1 (a book, page 3)",
        "5 to 2",
        "Intel Xeon, 2 cores",
        "in part: 1 of 3 hold, 1 refuted, 1 undecided",
    ]


def test_section_has_figure_numbers_commit_its_own_size_and_every_test():
    text = _generated(RECORD)
    assert "![Toy numbers fall](results/toy.cpu.png)" in text
    assert "[every number](results/toy.cpu.json); 12 s on" in text
    assert "Intel Xeon, 2 cores, torch 2.13.0 at abc1234. Size: 3 places, 2 heads.\n" in text
    assert "| stated test | found | decision |" in text
    assert "| falls | 0.5x | holds |\n| by half | 0.4x | **refuted** |\n" in text
    assert "| to a third | 0.3x | **undecided** |\n" in text
    assert "| control: rerun is the same | 0 in 3 | holds |" in text
    assert "Why:" not in text
    gpu = replace(RECORD, size="gpu", commit="", hardware={"name": "NVIDIA H100"})
    text = _generated(gpu)
    assert (
        "NVIDIA H100, torch 2.13.0 at an unknown commit. Size: 30 places; at least 2 GiB." in text
    )


def test_explanation_stands_below_the_tests():
    text = _generated(replace(RECORD, explanation="the sum * 2\nwas kept"))
    assert text.index("| control: rerun") < text.index("Why: the sum \\* 2 was kept\n")


def test_one_row_a_size_and_none_for_what_was_not_run():
    text = _generated(RECORD, replace(RECORD, size="gpu"))
    assert len(re.findall(r"^\| \[toy\]", text, flags=re.MULTILINE)) == 2
    assert _generated() == "\n"


@pytest.mark.parametrize("name", ["toy", "stable_fig3", "head_dim_256", "FA3_table"])
def test_links_of_the_table_are_the_anchors_that_github_makes(name):
    text = _generated(RECORD, replace(RECORD, size="gpu"), each=described(name, DOCSTRING))
    headings = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    # what is no letter, digit, _, - or space goes; spaces become hyphens
    anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings]
    assert re.findall(r"\]\(#(.*?)\)", text) == anchors
    assert len(set(anchors)) == 2


HOSTILE = (
    "max |a - b| of P*V, dO*O and ~30 < 31; _x_ and x_y; [0, 1) ~ $2$ a\\|b; `f(x|y) * 2`; <b>"
)


def test_hostile_words_stay_words_in_cells_and_prose():
    test = asdict(StatedTest(statement=HOSTILE, found=HOSTILE, decision="holds"))
    record = replace(RECORD, measured=HOSTILE, explanation=HOSTILE, tests=[test])
    text = _generated(record)
    row = text.splitlines()[3]
    statement = next(line for line in text.splitlines() if line.startswith("| max"))
    assert len(_cells(row)) == 6
    assert len(_cells(statement)) == 3
    why = text.partition("Why: ")[2].partition("\n")[0]
    for cell in (_cells(row)[3], *_cells(statement)[:2], why):
        assert _shown(cell) == HOSTILE
        prose = re.sub("`.*?`", "", cell)
        assert not re.search(r"(?<!\\)[*~<$\[]|(?<![\\\w])_", prose), prose


def test_code_stays_code_and_a_lone_backtick_opens_none():
    row = _generated(replace(RECORD, measured="`a * b`")).splitlines()[3]
    assert "| `a * b` |" in row
    row = _generated(replace(RECORD, measured="a ` b * c")).splitlines()[3]
    assert "| a \\` b \\* c |" in row


def test_what_is_written_by_hand_stays_and_a_second_filling_changes_nothing():
    page = filled_in(PAGE, [TOY], {"toy": [RECORD]})
    assert page.startswith(f"Written by hand.\n{BEGIN}\n| experiment |")
    assert page.endswith(f"{END}\nBelow.\n")
    assert "of before" not in page
    assert filled_in(page, [TOY], {"toy": [RECORD]}) == page


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}\n{BEGIN}"])
def test_a_page_without_its_marks_is_an_error(page):
    with pytest.raises(ValueError, match="must hold the lines"):
        filled_in(page, [TOY], {})


PLAIN = Described(
    name="toy",
    title="Toy numbers fall",
    sections={"Source": "a book", "Claim": "it falls in [0, 1)", "Published": "from [bold]4 to 1"},
)


def _record(*tests: StatedTest, size: str = "cpu", explanation: str = "") -> ExperimentRecord:
    return ExperimentRecord(
        name="toy",
        size=size,
        settings={},
        measured="5 to 2",
        explanation=explanation,
        tests=[asdict(test) for test in tests],
        rows=[],
        hardware={"name": "a CPU", "cores": 2},
        versions={"torch": "2.13.0"},
        commit="abc1234",
        seconds=12.34,
    )


FALLS = StatedTest(statement="number [b] falls", found="0.5x [red] 3 seeds", decision="holds")
HALVES = StatedTest(statement="number halves", found="0.4x", decision="refuted")
RERUN = StatedTest(statement="rerun is the same", found="0 in 3", decision="holds", control=True)
THIRDS = StatedTest(statement="number thirds", found="0.3x", decision="undecided")
FAILED = StatedTest(statement="a bug is found", found="0 of 3", decision="refuted", control=True)


def _printed(record: ExperimentRecord, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_experiment(PLAIN, record, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_word_is_printed_within_the_width(width):
    text = _printed(_record(FALLS, HALVES, RERUN, explanation="of the [i] sum"), width)
    words = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    for word in ("[0,", "[bold]4", "[b]", "[red]", "[i]", "halves", "0.4x", "control:", "Toy"):
        assert word in words, word


def test_the_verdict_counts_published_statements_and_says_if_a_control_failed():
    assert _printed(_record(FALLS, HALVES, RERUN)).endswith(
        "agrees: in part: 1 of 2 hold, 1 refuted; 12 s\n"
    )
    assert "agrees: undecided: 0 of 1 hold, 1 undecided; 12 s" in _printed(_record(THIRDS))
    assert "agrees: nothing published; 12 s" in _printed(_record(RERUN))
    text = _printed(_record(FALLS, FAILED))
    assert "agrees: yes: 1 of 1 holds; 12 s; a control is refuted" in text
    vague = replace(FAILED, decision="undecided")
    assert "12 s; a control is undecided" in _printed(_record(FALLS, vague))


def test_each_test_has_its_line():
    lines = _printed(_record(FALLS, HALVES, THIRDS, RERUN)).splitlines()
    tests = [line.split()[0] for line in lines if "number " in line or "rerun" in line]
    assert tests == ["holds", "refuted", "undecided", "holds"]


def test_the_list_tells_each_size_on_record():
    console = Console(file=io.StringIO(), width=100)
    other = Described(name="other", title="Never run", sections={})
    records = {"toy": [_record(FALLS, THIRDS), _record(HALVES, size="gpu")]}
    print_experiments([PLAIN, other], records, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    agrees = ["cpu:", "yes,", "where", "decided:", "1", "of", "2", "hold,", "1", "undecided"]
    assert ["toy", "Toy", "numbers", "fall", *agrees] in lines
    assert ["gpu:", "no:", "0", "of", "1", "hold,", "1", "refuted"] in lines
    assert ["other", "Never", "run", "not", "run"] in lines
