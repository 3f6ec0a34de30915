"""A study's workspace: every panel shows what the study has logged, and the package builds it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.cli.workspace import workspace_names
from stability.records.metric_names import STEP_AXIS
from stability.tracking.panels import build_workspace, plan_panels


@pytest.fixture(scope="module")
def folder(synthetic, tmp_path_factory) -> Path:
    return synthetic.write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")


@pytest.fixture
def study(folder):
    return read_study(folder)


def _kinds(names: list[str], kind: str) -> set[str]:
    panels = [panel for section in plan_panels(names) for panel in section.panels]
    return {name for panel in panels if panel.kind == kind for name in panel.metrics}


def test_a_panel_is_there_if_and_only_if_what_it_shows_is(study):
    names = workspace_names(study)
    logged = {name for arm in study.arms for run in arm.runs.values() for name in run.metrics}
    assert {"train/loss", "drift/all/rel_l2", "deviation/layer_0/out/gain"} & logged <= _kinds(
        names, "line"
    )
    assert _kinds(names, "line") <= logged
    assert _kinds(names, "bar") == {
        "ladder/rel_l2/early",
        "ladder/rel_l2/last",
        "ladder/ratio/early",
        "ladder/final_loss",
    }
    assert _kinds(names, "table") == {"evidence", "ladder", "deviations"}
    assert _kinds(names, "media") == {"report"}, "this study has counted no weights"
    assert "Watch" not in {section.name for section in plan_panels(names)}, "nor watched anything"
    more = ["eval/loss", "evidence/training/excess", "watch/grad_norm", "weights/all/histogram"]
    assert _kinds(more, "line") == {"eval/loss", "watch/grad_norm"}
    assert _kinds(more, "bar") == {"evidence/training/excess"}
    assert _kinds(more, "media") == {"weights/all/histogram"}
    assert plan_panels([]) == []


def test_drift_is_drawn_on_a_log_axis_and_a_deviation_with_a_line_for_each_layer(study):
    sections = {section.name: section.panels for section in plan_panels(workspace_names(study))}
    drift = {panel.metrics[0]: panel.log for panel in sections["Drift from the baseline"]}
    assert drift["drift/all/rel_l2"]
    assert not drift["drift/all/cosine"]
    deviation = {panel.title: panel for panel in sections["Deviation within each layer"]}
    ratio = deviation["error_ratio of out"]
    assert ratio.metrics == tuple(f"deviation/layer_{n}/out/error_ratio" for n in range(5))
    assert ratio.log
    assert not deviation["bias_ulp of out"].log


# wandb-workspaces 0.4, reports/v2: its validators are in pydantic 1's style; a later one mends it
@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
def test_the_workspace_shows_the_runs_of_the_study_by_arm_over_the_step(study):
    workspace = build_workspace(
        study.name, workspace_names(study), runs=9, entity="me", project="mine"
    )
    assert (workspace.entity, workspace.project, workspace.name) == ("me", "mine", "quickstart")
    assert [section.name for section in workspace.sections] == [
        section.name for section in plan_panels(workspace_names(study))
    ]
    planned = [panel for section in plan_panels(workspace_names(study)) for panel in section.panels]
    drawn = [panel for section in workspace.sections for panel in section.panels]
    for plan, panel in zip(planned, drawn, strict=True):
        if plan.kind == "line":
            assert (panel.x, tuple(panel.y), panel.log_y) == (STEP_AXIS, plan.metrics, plan.log)
    sent = workspace._to_model().model_dump_json(by_alias=True)
    assert '"value":"quickstart"' in sent, "the filter"
    assert '"name":"jobType"' in sent, "the grouping"


def test_the_panels_can_be_printed_without_a_network(folder, capsys):
    assert main(["workspace", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["group"], printed["grouped_by"], printed["x"]) == (
        "quickstart",
        "job_type",
        STEP_AXIS,
    )
    assert [section["name"] for section in printed["sections"][:2]] == ["Evidence", "Ladder"]


def test_without_the_package_it_is_named(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ValueError, match=r"pip install 'training-stability\[workspace\]'"):
        build_workspace(study.name, [], runs=1, entity="me", project="mine")


def test_offline_it_says_what_to_do(folder, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(SystemExit, match="2"):
        main(["workspace", str(folder)])
    said = "stability: WANDB_MODE must be online or unset, got 'offline'"
    assert capsys.readouterr().err.startswith(said)


def test_without_an_account_the_way_that_this_verb_has_is_named(folder, monkeypatch, capsys):
    """`--wandb offline`, which other verbs have, is none of its options."""
    monkeypatch.setattr("wandb.login", lambda **_: False)
    monkeypatch.setattr(
        "stability.tracking.environment.set_up",
        lambda _: SimpleNamespace(settings=SimpleNamespace(base_url="https://w.b")),
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["workspace", str(folder)])
    said = " ".join(capsys.readouterr().err.split())
    assert "no account is known at https://w.b" in said
    assert said.endswith("set WANDB_API_KEY; `--json` prints the panels without")


def test_a_variable_that_is_no_setting_is_told_without_the_words_of_pydantic(folder):
    done = subprocess.run(
        [sys.executable, "-m", "stability.cli.main", "workspace", str(folder)],
        env={**os.environ, "WANDB_BASE_URL": "nonsense"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("stability: a WANDB_* variable is no W&B setting: base_url: ")


def test_a_folder_without_a_study_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["workspace", str(tmp_path), "--json"])
    assert "study.json" in capsys.readouterr().err
