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

PUBLISHED = StatedTest(statement="falls", found="0.5x", holds=True)
CONTROL = StatedTest(statement="rerun differs by nothing", found="0", holds=True, control=True)
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


REFUTED = replace(PUBLISHED, holds=False)
FAILED = replace(CONTROL, holds=False)


@pytest.mark.parametrize(
    ("tests", "agrees", "controls_hold"),
    [
        ((PUBLISHED, PUBLISHED, CONTROL), "yes", True),
        ((PUBLISHED, REFUTED, CONTROL), "in part", True),
        ((REFUTED, REFUTED, CONTROL), "no", True),
        ((REFUTED, FAILED), "no", False),
        ((PUBLISHED, FAILED, CONTROL), "yes", False),
        ((PUBLISHED,), "yes", True),
        ((CONTROL,), "nothing published", True),
        ((), "nothing published", True),
    ],
)
def test_only_published_statements_agree_and_every_control_must_hold(tests, agrees, controls_hold):
    record = _with(*tests)
    assert (record.agrees, record.controls_hold) == (agrees, controls_hold)


def _edit(path):
    path.write_text(path.read_text().replace("0.002", "0.001"))


def _without(path, key):
    content = read_sealed(path, "")
    del content[key]
    write_sealed(path, content)


def _old_test(path):
    content = read_sealed(path, "")
    content["tests"] = [{"statement": "falls", "passed": True}]
    write_sealed(path, content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_edit, "damaged or edited"),
        (lambda path: path.write_text(path.read_text()[:-9]), "torn or damaged"),
        (lambda path: path.unlink(), "no such file; `stability experiment` writes it"),
        (lambda path: _without(path, "commit"), "record of an experiment; see commit"),
        (_old_test, "tests must each have control, found, holds, statement"),
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
    holds = StatedTest(statement="falls", found="0.5x", holds=True)
    fails = replace(holds, holds=False)
    for published, explanation in ((holds, ""), (fails, "because")):
        found = Findings(
            measured="0.5x",
            published=[published],
            controls=[fails],
            rows=[],
            explain=lambda: "because",
        )
        assert [test.control for test in found.tests] == [False, True]
        assert found.explanation == explanation
