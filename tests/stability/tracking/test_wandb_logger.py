"""W&B offline: read back with W&B's own reader, silent, and without an account or a network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stability.tracking.wandb_logger import finish, make_wandb_logger, resolve_mode

ROOT = Path(__file__).parents[3]
RUN = {
    "study": "quickstart",
    "arm": "flash_fa2",
    "seed": 1,
    "axis": "attention",
    "config": {"precision": "bf16-mixed", "model": {"depth": 5}, "train": {"snapshot_steps": [1]}},
}
LOGGED = [
    (0, {"train/loss": 5.5}),
    (0, {"deviation/layer_0/out/max_abs": 0.25, "deviation/layer_0/out/bias": math.nan}),
    (0, {"drift/all/w1": 0.0}),
    (1, {"train/loss": 5.25}),
    (1, {"drift/all/w1": 1.5e-7, "drift/blocks.layer_0.query.weight/w1": 3e-9}),
]


@pytest.fixture(autouse=True, scope="module")
def without_wandb_mode():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        yield


def _records(directory: Path) -> list[dict]:
    """Return what W&B's own reader, the one behind `wandb leet`, finds in the only run's file."""
    (path,) = directory.glob("offline-run-*/run-*.wandb")
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)],
        env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _of(records: list[dict], kind: str) -> list[dict]:
    return [record[kind] for record in records if record["type"] == kind]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "wandb"
    logger = make_wandb_logger("offline", directory=directory, **RUN)
    for step, metrics in LOGGED:
        logger.log_metrics(metrics, step=step)
    finish(logger)
    assert "WANDB_MODE" not in os.environ, "one run's mode does not leak into the next"
    return _records(directory)


def test_the_offline_file_holds_the_metric_names_and_values(records):
    rows = [history["item"] for history in _of(records, "history")]
    assert len(rows) == len(LOGGED)
    for row, (step, metrics) in zip(rows, LOGGED, strict=True):
        found = {name: value for name, value in row.items() if not name.startswith("_")}
        written = {n: "NaN" if math.isnan(value) else value for n, value in metrics.items()}
        assert found == {**written, "trainer/global_step": step}


def test_the_offline_file_says_which_study_arm_and_seed(records):
    (run,) = _of(records, "run")
    assert run["run_group"] == "quickstart"
    assert run["job_type"] == "flash_fa2"
    assert run["display_name"] == "flash_fa2-seed1"
    assert run["project"] == "training-stability"
    assert sorted(run["tags"]) == ["attention", "seed-1"]
    config = run["config"]["update"]
    assert {key: config[key] for key in RUN["config"]} == RUN["config"]


def test_every_metric_is_drawn_over_the_step(records):
    metrics = _of(records, "metric")
    assert {(m.get("name") or m["glob_name"], m.get("step_metric")) for m in metrics} == {
        ("trainer/global_step", None),
        ("*", "trainer/global_step"),
    }


def test_a_run_that_goes_on_keeps_its_id_and_others_have_their_own(tmp_path):
    ids = []
    changes = [{}, {}, {"seed": 2}, {"arm": "fp32"}, {"study": "other"}, {"config": {"a": 1}}]
    for index, change in enumerate(changes):
        directory = tmp_path / str(index) / "wandb"
        logger = make_wandb_logger("offline", directory=directory, **{**RUN, **change})
        ids.append(logger.experiment.id)
        finish(logger)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 5


def test_disabled_makes_nothing(tmp_path):
    assert make_wandb_logger("disabled", directory=tmp_path / "wandb", **RUN) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"directory must be called wandb, got .*tracks"):
        make_wandb_logger("offline", directory=tmp_path / "tracks", **RUN)


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        ("offline", None, "offline"),
        ("offline", "online", "online"),
        ("offline", "disabled", "disabled"),
        ("offline", "dryrun", "offline"),
        ("online", "disabled", "online"),
        ("disabled", "online", "disabled"),
    ],
)
def test_the_environment_replaces_the_default_alone(monkeypatch, argument, variable, expected):
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert resolve_mode(argument) == expected


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offlien")
    with pytest.raises(ValueError, match=r"WANDB_MODE must be one of offline, .* got 'offlien'"):
        resolve_mode("offline")


def test_a_fresh_process_prints_nothing_warns_of_nothing_and_ends(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from stability.tracking.wandb_logger import finish, make_wandb_logger\n"
        "logger = make_wandb_logger('offline', study='s', arm='a', seed=0, axis='none',\n"
        f"    config={{}}, directory=Path({str(tmp_path / 'wandb')!r}))\n"
        "logger.log_metrics({'train/loss': 1.0}, step=0)\n"
        "finish(logger)\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(_of(_records(tmp_path / "wandb"), "history")) == 1
