"""A study of commands on W&B: named, grouped and drawn like one of our own trainer's."""

import json

import pytest

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.cli.workspace import workspace_names
from stability.records.metric_log import read_lines
from stability.records.metric_names import BATCH_HASH, STEP_AXIS, WEIGHT_HISTOGRAM
from stability.records.paths import StudyPaths
from stability.tracking.history import numbers_of
from stability.tracking.panels import plan_panels
from tests.stability.recorder.recording import Recording, code_of, words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A baseline and an arm, published after each command."""
    recorded = Recording(tmp_path_factory.mktemp("commands"), words("evaluates.py"))
    offline = ("--wandb", "offline")
    assert recorded.record("baseline", options=offline) == 0
    assert recorded.record("lr_x2", "--lr", "0.02", options=offline) == 0
    return recorded


def test_a_run_has_its_arms_name_its_studys_group_and_what_it_changed(
    study: Recording, offline_log, read_records
) -> None:
    log = offline_log(study.paths("lr_x2").wandb_dir)
    (run,) = [record["run"] for record in read_records(log) if record["type"] == "run"]
    assert (run["display_name"], run["run_group"], run["job_type"]) == (
        "lr_x2-seed0",
        "study",
        "lr_x2",
    )
    assert "flags.lr" in run["tags"]
    config = run["config"]["update"]
    assert (config["study"], config["arm"], config["seed"]) == ("study", "lr_x2", 0)
    assert (config["axis"], config["changed_group"]) == ("flags.lr", "flags")
    assert config["flags"]["lr"] == "0.02"


def test_every_row_is_a_line_of_the_records_and_the_summary_its_row_of_the_ladder(
    study: Recording, offline_log, read_rows, read_summary
) -> None:
    log = offline_log(study.paths("lr_x2").wandb_dir)
    lines = [line for _, line in read_lines(study.paths("lr_x2").metrics)]
    # a line of hashes alone is no row
    found = [(line["step"], numbers_of(line)) for line in lines]
    expected = [{**numbers, STEP_AXIS: step} for step, numbers in found if numbers]
    rows = read_rows(log)
    numbers = [{k: v for k, v in row.items() if not k.startswith(WEIGHT_HISTOGRAM)} for row in rows]
    assert numbers == expected
    assert any(name.startswith(WEIGHT_HISTOGRAM) for row in rows for name in row)
    assert {"train/loss", "drift/all/rel_l2", "eval/loss"} <= {
        name for row in expected for name in row
    }
    assert BATCH_HASH in lines[1], lines[1]
    assert BATCH_HASH not in {name for row in expected for name in row}
    ladder = json.loads(StudyPaths(study.folder).ladder.read_text())
    (row,) = [row for row in ladder["rows"] if row["arm"] == "lr_x2"]
    summary = read_summary(log)
    assert summary["ladder/change"] == row["change"]
    assert summary["ladder/rel_l2/last"] == row["rel_l2"]["last"]["per_seed"]["0"]


def test_the_study_has_a_run_with_its_ladder_and_report(
    study: Recording, read_rows, read_records
) -> None:
    paths = StudyPaths(study.folder)
    # one after each command, the later one has both arms
    log = max(paths.wandb_dir.glob("offline-run-*/run-*.wandb"), key=lambda x: x.stat().st_mtime)
    (run,) = [record["run"] for record in read_records(log) if record["type"] == "run"]
    assert (run["display_name"], run["run_group"], run["job_type"]) == ("study", "study", "study")
    row = read_rows(log)[-1]
    table = json.loads((log.parent / "files" / row["ladder.path"]).read_text())
    arms = [cells[table["columns"].index("arm")] for cells in table["data"]]
    assert sorted(arms) == ["baseline", "lr_x2"]
    assert (log.parent / "files" / row["report.path"]).read_bytes() == paths.report.read_bytes()


def test_every_panel_shows_what_the_commands_have_logged(
    study: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = read_study(study.folder)
    logged = {name for arm in recorded.arms for run in arm.runs.values() for name in run.metrics}
    sections = {each.name: each.panels for each in plan_panels(workspace_names(recorded))}
    assert {"Ladder", "Loss", "Drift from the baseline"} <= sections.keys()
    lines = [x for panels in sections.values() for x in panels if x.kind == "line"]
    assert {name for panel in lines for name in panel.metrics} <= logged
    assert "eval/loss" in {name for panel in sections["Loss"] for name in panel.metrics}
    assert main(["workspace", str(study.folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["group"], printed["grouped_by"], printed["x"]) == (
        "study",
        "job_type",
        STEP_AXIS,
    )


def test_the_same_command_again_publishes_nothing_more(study: Recording) -> None:
    before = {path: path.stat().st_size for path in study.folder.rglob("*.wandb")}
    assert study.record("lr_x2", "--lr", "0.02", options=("--wandb", "offline")) == 0
    assert {path: path.stat().st_size for path in study.folder.rglob("*.wandb")} == before
    assert code_of("show", str(study.folder)) == 0
