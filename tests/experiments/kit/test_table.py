"""What `stability experiment` prints: every word of the tests, however narrow the terminal."""

import io
from dataclasses import asdict

import pytest
from rich.console import Console

from experiments.kit.page import Described, print_experiment, print_experiments
from experiments.kit.record import ExperimentRecord
from stability.analysis.stated_tests import StatedTest

TOY = Described(
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


FALLS = StatedTest(statement="number [b] falls", found="0.5x [red] 3 seeds", holds=True)
HALVES = StatedTest(statement="number halves", found="0.4x", holds=False)
RERUN = StatedTest(statement="rerun is the same", found="0 in 3", holds=True, control=True)
FAILED = StatedTest(statement="known bug is found", found="0 of 3", holds=False, control=True)


def _printed(record: ExperimentRecord, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_experiment(TOY, record, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_word_is_printed_within_the_width(width):
    text = _printed(_record(FALLS, HALVES, RERUN, explanation="of the [i] sum"), width)
    words = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    for word in ("[0,", "[bold]4", "[b]", "[red]", "[i]", "halves", "0.4x", "control:", "Toy"):
        assert word in words, word


def test_the_verdict_counts_published_statements_and_says_if_a_control_failed():
    assert _printed(_record(FALLS, HALVES, RERUN)).endswith("agrees: in part; 12 s\n")
    assert "agrees: yes; 12 s; a control failed" in _printed(_record(FALLS, FAILED))


def test_each_test_has_its_line():
    lines = _printed(_record(FALLS, HALVES, RERUN)).splitlines()
    tests = [line.split()[0] for line in lines if "number " in line or "rerun" in line]
    assert tests == ["yes", "no", "yes"]


def test_the_list_tells_each_size_on_record():
    console = Console(file=io.StringIO(), width=100)
    other = Described(name="other", title="Never run", sections={})
    records = {"toy": [_record(FALLS), _record(HALVES, size="gpu")]}
    print_experiments([TOY, other], records, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["toy", "Toy", "numbers", "fall", "cpu:", "yes"] in lines
    assert ["gpu:", "no"] in lines
    assert ["other", "Never", "run", "not", "run"] in lines
