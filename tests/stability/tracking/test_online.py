"""Online, against a server on this machine: who is refused, and runs that go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.cli.workspace import workspace_names
from stability.report.view.evidence import headline
from stability.tracking.panels import plan_panels

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
shown = open_wandb_run("online", study="s", arm="fp32", seed=1, axis="precision", patience_s=15,
                       changes=["precision"], config={"depth": 2}, paths=RunPaths(folder))
log = MirroredLog(folder / "metrics.jsonl", shown)
lines = (folder / "metrics.jsonl").read_bytes().split(b"\\n") if start else []
log.truncate_to(sum(len(line) + 1 for line in lines[:start]))
for step in range(start, until):
    log.append(step, {"train/loss": [5.0, 4.0, 4.5, 3.0, 2.0, 2.5, 7.0][step]})
print(log.end_mirror(failed=False))
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
@pytest.mark.parametrize("status", [500, 0], ids=["500", "silent"])
def test_a_server_that_goes_away_is_waited_for_a_while_and_gets_all_rows_later(
    server, train, status
):
    server.status, server.fails_after = status, "UpsertBucket"
    done = train(0, 5)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Timed out finishing run.\n"
    server.status = None
    assert train(5, 7).stdout == "\n", "nothing went wrong"
    (run,) = server.values()
    assert [row["train/loss"] for row in run.rows] == LOSSES


def _one_candidate(content: dict) -> None:
    content["base"] |= {"watch": {"every": 2}, "held_out": {"batches": 1}}
    content["base"]["probe"]["golden"] = True
    content["arms"] = {
        "baseline": {},
        "flash": {"attention": {"implementation": "flash", "profile": "fa2"}},
        "reference": {"role": "reference"},
        "nudge": {"nudge": {"ulps": 1}},
    }
    content |= {"seeds": [0], "yardstick": "reference"}


@pytest.mark.slow
def test_a_study_online_has_all_that_a_view_shows_and_is_sent_once(server, write_study, tmp_path):
    path = write_study(_one_candidate)
    words = ["run", str(path), "--out", str(tmp_path / "runs"), "--wandb", "online", "--jobs", "2"]

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "stability.cli.main", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "W&B" not in done.stdout

    run()
    by_arm = {run.about["jobType"]: run for run in server.values()}
    assert sorted(by_arm) == ["baseline", "flash", "nudge", "reference", "study"]
    flash, own = by_arm["flash"], by_arm["study"]
    steps = [row["trainer/global_step"] for row in flash.rows if "train/loss" in row]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert [row["_step"] for row in flash.rows] == list(range(len(flash.rows)))
    assert [sent for sent in flash.artifacts if sent[0] == "tiny-flash-seed-0"] == [
        ("tiny-flash-seed-0", "latest", f"step-{step}") for step in (0, 1, 2, 4, 6)
    ]
    folder = tmp_path / "runs" / "tiny"
    ladder = json.loads((folder / "ladder.json").read_text())
    (row,) = [row for row in ladder["rows"] if row["arm"] == "flash"]
    summary = json.loads(flash.summary)
    assert summary["ladder/rel_l2/last"] == row["rel_l2"]["last"]["per_seed"]["0"]

    study = read_study(folder)
    names = workspace_names(study)
    shown = {name for part in plan_panels(names) for panel in part.panels for name in panel.metrics}
    wanted = {"train/loss", "eval/loss", "drift/all/rel_l2", "deviation/layer_0/out/gain"}
    assert wanted | {"evidence/training/excess", "evidence", "weights/all/histogram"} <= shown
    arrived = {name for run in server.values() for row in run.rows for name in row}
    assert shown <= arrived | summary.keys()

    verdict = judge_arms(study, study.policy)
    assert summary["verdict"] == json.loads(own.summary)["verdict/flash"] == "INCONCLUSIVE"
    evidence = verdict.arm("flash").levels["training"]
    assert summary["evidence/training/excess"] == evidence.figures["excess"]
    (table,) = [x for name, x in own.files.items() if name.startswith("media/table/evidence_")]
    columns, cells = (json.loads(table)[part] for part in ("columns", "data"))
    found = [dict(zip(columns, row, strict=True)) for row in cells]
    assert [row["excess"] for row in found if row["level"] == "training"] == [
        evidence.figures["excess"]
    ]
    assert own.alerts == [("WARN", "tiny: not decided", f"{headline(verdict)}\nDoes it matter?")]

    sent = _sent(by_arm)
    run()
    assert _sent(by_arm) == sent
    for stamp in folder.glob("wandb/published-*"):  # as after a change of the report alone
        stamp.unlink()
    run()
    assert len(own.rows) == 2
    assert len(own.alerts) == 1, "what was told is no news"


def _sent(by_arm: dict) -> dict:
    return {arm: (list(x.lines), len(x.artifacts), len(x.alerts)) for arm, x in by_arm.items()}
