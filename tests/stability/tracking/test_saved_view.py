"""The saved view of a study, as it arrives at a W&B server on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stability.cli.main import main
from stability.records.metric_names import STEP_AXIS

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(synthetic, tmp_path) -> Path:
    return synthetic.write_synthetic(tmp_path / "runs" / "quickstart")


def _save(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stability.cli.main", "workspace", str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _panels(spec: dict) -> list[dict]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def test_the_view_that_the_server_has_groups_the_arms_and_shows_what_is_planned(
    server, folder, capsys
):
    done = _save(folder)
    assert done.returncode == 0, done.stderr
    (view,) = server.views.values()
    assert (view["entityName"], view["projectName"]) == ("me", "training-stability")
    assert view["displayName"] == "quickstart"
    token = view["name"].removeprefix("nw-").removesuffix("-v")
    assert done.stdout == f"{server.address}/me/training-stability?nw={token}\n"
    spec = json.loads(view["spec"])
    (shown,) = spec["section"]["runSets"]
    assert shown["grouping"] == [{"section": "run", "name": "jobType"}]
    assert '"quickstart"' in json.dumps(shown["filters"])
    assert shown["runFeed"]["columnPinned"] == {
        "run:displayName": True,
        "summary:verdict": True,
    }, "there is no E without a reference"
    assert spec["section"]["settings"]["xAxis"] == STEP_AXIS
    assert spec["section"]["settings"]["shouldAutoGeneratePanels"] is False
    assert main(["workspace", str(folder), "--json"]) == 0
    planned = [p for s in json.loads(capsys.readouterr().out)["sections"] for p in s["panels"]]
    lines = [p["config"] for p in _panels(spec) if p["viewType"] == "Run History Line Plot"]
    assert {config["xAxis"] for config in lines} == {STEP_AXIS}
    assert [config["metrics"] for config in lines] == [
        panel["metrics"] for panel in planned if panel["kind"] == "line"
    ]
    bars = [p["config"] for p in _panels(spec) if p["viewType"] == "Bar Chart"]
    assert {config["groupBy"] for config in bars} == {"jobType"}
    assert [config["metrics"] for config in bars] == [
        panel["metrics"] for panel in planned if panel["kind"] == "bar"
    ]
    tables = json.dumps([p["config"] for p in _panels(spec) if p["viewType"] == "Weave"])
    for name in ("evidence", "ladder", "deviations"):
        assert f'"{name}"' in tables


def test_the_same_command_again_replaces_the_view_and_makes_another_only_if_it_is_gone(
    server, folder
):
    first = _save(folder)
    (view,) = server.views.values()
    spec = json.loads(view["spec"])
    spec["section"]["panelBankConfig"]["sections"].clear()
    view["spec"] = json.dumps(spec)
    assert _save(folder).stdout == first.stdout
    (view,) = server.views.values()
    assert len(_panels(json.loads(view["spec"]))) > 10, "they are those of the study again"
    server.views.clear()
    second = _save(folder)
    assert second.returncode == 0, second.stderr
    assert second.stdout != first.stdout
    assert len(server.views) == 1


@pytest.mark.parametrize("status", [401, 500, 0], ids=["401", "500", "silent"])
def test_a_server_that_refuses_the_view_is_one_line(server, folder, status):
    server.status, server.fails_after = status, "GetDefaultEntity"
    done = _save(folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stability: workspace: W&B refuses: ")
    assert done.stderr.count("\n") == 1
    assert not server.views
