"""Online, against a server on this machine: who is refused, and runs that go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOSSES = [5.0, 4.0, 4.5, 3.0, 2.0, 2.5, 7.0]
TRAIN = """
import sys
from pathlib import Path
from stability.records.paths import RunPaths
from stability.tracking.environment import check_wandb
from stability.tracking.history import MirroredLog, open_wandb_run
check_wandb("online")
folder, start, until = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
shown = open_wandb_run("online", study="s", arm="fp32", seed=1, axis="precision",
                       changes=["precision"], config={"depth": 2}, paths=RunPaths(folder))
log = MirroredLog(folder / "metrics.jsonl", shown)
lines = (folder / "metrics.jsonl").read_bytes().split(b"\\n") if start else []
log.truncate_to(sum(len(line) + 1 for line in lines[:start]))
for step in range(start, until):
    log.append(step, {"train/loss": [5.0, 4.0, 4.5, 3.0, 2.0, 2.5, 7.0][step]})
shown.close()
"""


@pytest.fixture
def train(tmp_path):
    """Return a function that trains from one step to another in a process of its own."""

    def train(start: int, until: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", TRAIN, str(tmp_path), str(start), str(until)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return train


@pytest.mark.slow
def test_a_run_killed_after_its_checkpoint_has_each_row_once(server, train):
    # five steps were logged, the checkpoint was that of step 3
    for start, until in ((0, 5), (3, 7)):
        done = train(start, until)
        assert done.returncode == 0, done.stderr
    (run,) = server.values()
    found = [(row["_step"], row["trainer/global_step"], row["train/loss"]) for row in run.rows]
    assert found == [(step, step, loss) for step, loss in enumerate(LOSSES)]
    assert sorted(run.about["tags"]) == ["precision", "seed-1"]


@pytest.mark.slow
def test_a_study_online_has_its_runs_snapshots_and_tables_and_is_sent_once(
    server, write_study, tmp_path
):
    def one_pair(content: dict) -> None:
        content.update(arms={"baseline": {}, "fp32": {"precision": "32-true"}}, seeds=[0])

    path = write_study(one_pair)
    words = ["run", str(path), "--out", str(tmp_path / "runs"), "--wandb", "online"]

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "stability.cli.main", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "W&B is not" not in done.stdout

    run()
    by_arm = {run.about["jobType"]: run for run in server.values()}
    assert sorted(by_arm) == ["baseline", "fp32", "study"]
    steps = [row["trainer/global_step"] for row in by_arm["fp32"].rows if "train/loss" in row]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert [row["_step"] for row in by_arm["fp32"].rows] == list(range(len(by_arm["fp32"].rows)))
    assert [sent for sent in by_arm["fp32"].artifacts if sent[0] == "tiny-fp32-seed-0"] == [
        ("tiny-fp32-seed-0", "latest", f"step-{step}") for step in (0, 1, 2, 4, 6)
    ]
    ladder = json.loads((tmp_path / "runs" / "tiny" / "ladder.json").read_text())
    (row,) = [row for row in ladder["rows"] if row["arm"] == "fp32"]
    summary = json.loads(by_arm["fp32"].summary)
    assert summary["ladder/rel_l2/last"] == row["rel_l2"]["last"]["per_seed"]["0"]
    assert {"ladder", "deviations", "report"} <= by_arm["study"].rows[0].keys()
    sent = {arm: (list(run.lines), len(run.artifacts)) for arm, run in by_arm.items()}
    run()
    assert {arm: (list(run.lines), len(run.artifacts)) for arm, run in by_arm.items()} == sent
