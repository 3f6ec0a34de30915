"""What of a verdict reaches W&B: numbers as numbers, and nothing where nothing was measured."""

import importlib.util
import math
from pathlib import Path

import pytest

from stability.analysis.evidence import LevelEvidence
from stability.cli.workspace import evidence_of
from stability.tracking.tables import (
    alert_level,
    column_types,
    evidence_rows,
    outcome_summary,
    run_summary,
)

LADDER = {"early_step": 2, "last_step": 6, "rows": [{"arm": "flash"}, {"arm": "nudge"}]}


@pytest.fixture(scope="module")
def verdicts():
    path = Path(__file__).parents[1] / "report" / "synthetic_verdict.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arms(verdicts) -> list[dict]:
    """An arm with E in one level, and figures that are no numbers in another."""
    arm = verdicts.arm_verdict("flash", "PASS").to_dict()
    figures = {"excess": 1.02, "excess_low": math.nan, "seeds": 3, "excess_seed_0": 1.1}
    arm["levels"]["training"] |= {"figures": figures, "p_holds": "nan", "p_harmed": 0.5}
    arm["levels"]["operator"] |= {"figures": {"gain": -2e-4, "gain_excluded": "inf"}}
    return [arm]


def test_a_figure_that_is_no_number_is_missing_and_one_of_a_seed_is_left_out(arms):
    columns, rows = evidence_rows(arms)
    by_level = {row[columns.index("level")]: dict(zip(columns, row, strict=True)) for row in rows}
    assert list(by_level) == ["operator", "gradient", "training", "outcome"]
    training, operator = by_level["training"], by_level["operator"]
    assert (training["excess"], training["excess_low"], training["seeds"]) == (1.02, None, 3)
    assert (training["p_harmed"], training["p_holds"]) == (0.5, None)
    assert (operator["gain"], operator["gain_excluded"]) == (-2e-4, None)
    assert (operator["excess"], training["gain"]) == (None, None), "of another level"
    assert not [name for name in columns if name.endswith("_seed_0")]
    types = dict(zip(columns, column_types(columns, rows), strict=True))
    assert {name for name, kind in types.items() if kind is str} == {
        *("arm", "role", "verdict", "level", "state", "cell", "sentence", "decides")
    }


def test_a_run_has_the_verdict_on_its_arm_in_its_summary(arms):
    summary = run_summary(LADDER, arms, "flash", 0)
    assert summary["verdict"] == "PASS"
    assert summary["evidence/training/state"] == "undecided"
    assert summary["evidence/training/excess"] == 1.02
    assert summary["evidence/operator/gain"] == -2e-4
    missing = ("training/excess_low", "training/excess_seed_0", "operator/gain_excluded")
    assert not {f"evidence/{name}" for name in missing} & summary.keys()
    assert run_summary(LADDER, arms, "nudge", 0).keys() == {"ladder/early_step", "ladder/last_step"}


def test_a_table_without_a_decided_level_still_has_text_where_text_will_be(verdicts):
    silent = LevelEvidence(level="operator", state="not measured", sentence="")
    arm = verdicts.arm_verdict("flash", "INCONCLUSIVE").to_dict()
    arm["levels"] = {"operator": silent.to_dict()}
    columns, rows = evidence_rows([arm])
    types = dict(zip(columns, column_types(columns, rows), strict=True))
    assert (types["cell"], types["decides"], types["p_holds"]) == (str, str, float)


def test_after_a_change_of_the_protocol_nothing_says_pass(verdicts):
    passed = verdicts.study_verdict()
    assert outcome_summary(evidence_of(passed))["verdict/flash_fa2"] == "PASS"
    assert alert_level(evidence_of(passed)) == "ERROR"
    changed = evidence_of(verdicts.study_verdict(exploratory=("the seeds",)))
    assert outcome_summary(changed) == {
        "verdict/a_candidate_of_a_long_name": "EXPLORATORY: FAIL",
        "verdict/flash_fa2": "EXPLORATORY: PASS",
        "control/broken": "EXPLORATORY: FAIL, as it must",
    }
    assert alert_level(changed) == "WARN"
    columns, rows = evidence_rows(changed)
    assert {row[columns.index("verdict")].split(":")[0] for row in rows} == {"EXPLORATORY"}
