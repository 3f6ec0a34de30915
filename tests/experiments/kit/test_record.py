"""What an experiment found comes back as it was written, and damage is named."""

import json
import math
from dataclasses import asdict, replace

import pytest

from experiments.kit.record import (
    ExperimentRecord,
    Findings,
    StatedTest,
    read_experiment,
    write_experiment,
)
from stability.records.sealed_json import read_sealed, write_sealed

PUBLISHED = StatedTest(statement="falls", found="0.5x", decision="holds")
CONTROL = StatedTest(statement="rerun is the same", found="0", decision="holds", control=True)
RECORD = ExperimentRecord(
    name="toy",
    size="cpu",
    settings={"lengths": [64, 128], "device": "cpu"},
    measured="0.5x",
    explanation="",
    tests=[asdict(PUBLISHED), asdict(CONTROL)],
    rows=[{"format": "bf16", "seed": 0, "error": 2e-3}, {"format": "nano", "seed": 0, "error": 1}],
    hardware={"name": "a CPU", "cores": 2},
    versions={"torch": "2.13.0"},
    commit="abc1234-changed",
    seconds=1.5,
)


def _with(*tests: StatedTest) -> ExperimentRecord:
    return replace(RECORD, tests=[asdict(test) for test in tests])


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "results" / "toy.cpu.json"
    write_experiment(path, RECORD)
    assert read_experiment(path) == RECORD
    assert read_experiment(path).stated == (PUBLISHED, CONTROL)
    assert [each.name for each in path.parent.iterdir()] == ["toy.cpu.json"]


def test_numbers_that_json_lacks_are_numbers_again(tmp_path):
    path = tmp_path / "toy.cpu.json"
    odd = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": "nano", "e": None, "f": [1.0]}
    write_experiment(path, replace(RECORD, rows=[odd]))
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN as such is not JSON
    (row,) = read_experiment(path).rows
    assert math.isnan(row.pop("a"))
    assert row == {"b": math.inf, "c": -math.inf, "d": "nano", "e": None, "f": [1.0]}


REFUTED = replace(PUBLISHED, decision="refuted")
OPEN = replace(PUBLISHED, decision="undecided")
WRONG = replace(CONTROL, decision="refuted")
VAGUE = replace(CONTROL, decision="undecided")


@pytest.mark.parametrize(
    ("tests", "agrees", "controls"),
    [
        ((PUBLISHED, PUBLISHED, CONTROL), "yes", "holds"),
        ((PUBLISHED, REFUTED, CONTROL), "in part", "holds"),
        ((PUBLISHED, REFUTED, OPEN), "in part", "holds"),
        ((PUBLISHED, OPEN, CONTROL), "yes, where decided", "holds"),
        ((OPEN, CONTROL), "undecided", "holds"),
        ((REFUTED, OPEN), "no, where decided", "holds"),
        ((REFUTED, REFUTED, CONTROL), "no", "holds"),
        ((REFUTED, WRONG), "no", "refuted"),
        ((PUBLISHED, VAGUE, WRONG, CONTROL), "yes", "refuted"),
        ((PUBLISHED, VAGUE, CONTROL), "yes", "undecided"),
        ((PUBLISHED,), "yes", "holds"),
        ((CONTROL,), "nothing published", "holds"),
        ((), "nothing published", "holds"),
    ],
)
def test_only_published_statements_agree_and_every_control_must_hold(tests, agrees, controls):
    record = _with(*tests)
    assert (record.agrees, record.controls) == (agrees, controls)


def test_what_is_undecided_is_counted_apart_from_what_is_refuted():
    assert _with(PUBLISHED, REFUTED, OPEN, OPEN, WRONG, VAGUE).decisions == {
        "holds": 1,
        "refuted": 1,
        "undecided": 2,
    }


def _edit(path):
    path.write_text(path.read_text().replace("0.002", "0.001"))


def _without(path, key):
    content = read_sealed(path, "")
    del content[key]
    write_sealed(path, content)


def _tests(path, **changed):
    content = read_sealed(path, "")
    for test in content["tests"]:
        del test["decision"]
        test.update(changed)
    write_sealed(path, content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_edit, "damaged or edited"),
        (lambda path: path.write_text(path.read_text()[:-9]), "torn or damaged"),
        (lambda path: path.unlink(), "no such file; `stability experiment` writes it"),
        (lambda path: _without(path, "commit"), "record of an experiment; see commit"),
        (
            lambda path: _tests(path, holds=False),
            "tests must each have control, decision, found, statement; .* run the experiment again",
        ),
        (
            lambda path: _tests(path, decision="no"),
            "decision of tests must be one of holds, refuted, undecided, got 'no'",
        ),
    ],
)
def test_a_damaged_record_is_named(tmp_path, spoil, said):
    path = tmp_path / "toy.cpu.json"
    write_experiment(path, RECORD)
    spoil(path)
    with pytest.raises(ValueError, match=said) as caught:
        read_experiment(path)
    assert str(path) in str(caught.value)


def test_controls_are_marked_and_an_explanation_is_made_only_where_one_is_due():
    holds = StatedTest(statement="falls", found="0.5x", decision="holds")
    fails, vague = (replace(holds, decision=word) for word in ("refuted", "undecided"))
    for published, explanation in ((holds, ""), (fails, "because"), (vague, "because")):
        found = Findings(
            measured="0.5x",
            published=[published],
            controls=[fails],
            rows=[],
            explain=lambda: "because",
        )
        assert [test.control for test in found.tests] == [False, True]
        assert found.explanation == explanation
