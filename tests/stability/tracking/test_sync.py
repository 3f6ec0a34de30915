"""Offline folders arrive on a W&B server as one run: whole, in order, once, and so does news."""

import json
import subprocess
import sys

import pytest

from stability.analysis.study_records import read_study
from stability.cli.workspace import publish_study
from stability.records.paths import RunPaths, StudyPaths
from stability.report.page.html import write_page
from stability.tracking.history import MirroredLog, open_wandb_run

RUN = {
    "study": "s",
    "arm": "fp32",
    "seed": 1,
    "axis": "precision",
    "changes": ["precision"],
    "config": {"depth": 2},
}
LOSSES = [5.0, 4.0, 4.5, 3.0, 2.0, 2.5, 7.0]


@pytest.fixture
def train(tmp_path):
    """Return a function that logs the losses up to a step, going on from the one before."""

    def train(until: int, start: int = 0) -> None:
        shown = open_wandb_run("offline", paths=RunPaths(tmp_path), **RUN)
        log = MirroredLog(tmp_path / "metrics.jsonl", shown)
        for step in range(start, until):
            log.append(step, {"train/loss": LOSSES[step]})
        log.close()
        shown.complete_summary()
        shown.close()

    return train


def _sync(directory) -> None:
    folders = [str(path) for path in sorted(directory.glob("offline-run-*"))]
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", *folders],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=directory,  # where it writes logs of its own
    )
    assert done.returncode == 0, done.stderr
    assert "Finished syncing" in done.stderr


def _arrived(runs) -> list[tuple[int, int, float]]:
    (run,) = runs.values()
    return [(row["_step"], row["trainer/global_step"], row["train/loss"]) for row in run.rows]


EXPECTED = [(step, step, loss) for step, loss in enumerate(LOSSES)]


def test_a_run_that_went_on_is_one_folder_with_its_whole_history(train, server, tmp_path):
    train(until=4)
    train(start=4, until=7)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    _sync(tmp_path / "wandb")
    assert _arrived(server) == EXPECTED
    (run,) = server.values()
    assert (run.about["groupName"], run.about["jobType"]) == ("s", "fp32")
    assert run.exit_code == 0


@pytest.mark.slow
def test_a_run_uploaded_half_way_gets_the_rest_and_the_summary_of_all(train, server, tmp_path):
    train(until=5)
    _sync(tmp_path / "wandb")
    train(start=5, until=7)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2, "what was sent stays"
    _sync(tmp_path / "wandb")
    assert _arrived(server) == EXPECTED
    (run,) = server.values()
    assert json.loads(run.summary)["train/loss"] == {"last": 7, "min": 2}


@pytest.mark.slow
def test_the_verdict_is_told_once_whenever_its_folders_are_uploaded(synthetic, server, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])
    paths = StudyPaths(folder)

    def publish(comment: str) -> None:
        """Publish the study with another report and the same verdict."""
        write_page(read_study(folder), folder)
        paths.report.write_text(paths.report.read_text() + f"<!-- {comment} -->")
        assert publish_study(read_study(folder), folder, "offline") == ""

    publish("first")
    publish("the first was never uploaded, so its folder and the alert in it are gone")
    assert not server
    _sync(paths.wandb_dir)
    (run,) = server.values()
    ((level, title, text),) = run.alerts
    assert (level, title) == ("WARN", "quickstart: not decided")
    assert text.endswith(read_study(folder).question)
    publish("another page is no news")
    _sync(paths.wandb_dir)
    assert (len(run.alerts), len(run.rows)) == (1, 2)
    table = next(name for name in run.files if name.startswith("media/table/evidence_"))
    assert json.loads(run.files[table])["columns"][:4] == ["arm", "role", "verdict", "level"]
