"""W&B offline: read back with W&B's own reader, silent, and without an account or a network."""

import math
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from wandb.sdk.mailbox import HandleAbandonedError

from stability.metrics.ulp import ULP_EDGES
from stability.records.paths import RunPaths
from stability.tracking.history import MirroredLog, WandbRun, check_counts, open_wandb_run
from stability.tracking.wandb_run import start_run
from tests.stability.fuzz.offline_wandb import OfflineRun

ROOT = Path(__file__).parents[3]
RUN = {
    "study": "quickstart",
    "arm": "flash_fa2",
    "seed": 1,
    "axis": "attention",
    "changes": ["attention.profile"],
    "config": {"precision": "bf16-mixed", "model": {"depth": 5}, "train": {"snapshot_steps": [1]}},
}
SEEDS = {"base": 1, "init_offset": 0}
LOGGED = [
    (0, {"train/loss": 5.5}),
    (0, {"deviation/layer_0/out/max_abs": 0.25, "deviation/layer_0/out/bias": math.nan}),
    (0, {"drift/all/w1": 0.0}),
    (1, {"train/loss": 5.25}),
    (1, {"drift/all/w1": 1.5e-7, "drift/blocks.layer_0.query.weight/w1": 3e-9}),
]


def _of(records: list[dict], kind: str) -> list[dict]:
    return [record[kind] for record in records if record["type"] == kind]


@pytest.fixture(scope="module")
def records(tmp_path_factory, offline_log, read_records):
    directory = tmp_path_factory.mktemp("run") / "wandb"
    described = {**RUN, "config": {**RUN["config"], "seed": SEEDS}}
    shown = open_wandb_run("offline", paths=RunPaths(directory.parent), **described)
    for step, metrics in LOGGED:
        shown.send({"step": step, **metrics})
    shown.close()
    assert "WANDB_MODE" not in os.environ, "one run's mode does not leak into the next"
    return read_records(offline_log(directory))


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
    own = {"study": "quickstart", "arm": "flash_fa2", "seed": 1, "axis": "attention"}
    assert config["changed_group"] == "attention"
    assert {key: config[key] for key in own} == own
    assert config["seeds"] == SEEDS


def test_every_metric_is_drawn_over_the_step_and_told_by_one_rule_alone(records):
    metrics = {m.get("name") or m["glob_name"]: m for m in _of(records, "metric")}
    assert metrics.pop("trainer/global_step")["options"]["hidden"]
    assert {m["step_metric"] for m in metrics.values()} == {"trainer/global_step"}
    for name in (name for _, logged in LOGGED for name in logged):
        fitting = [rule for rule in metrics if fnmatchcase(name, rule)]
        assert len(fitting) == 1, "of two that fit W&B takes one by chance"


def test_the_summary_has_the_value_that_counts(read_summary, offline_log, tmp_path):
    shown = open_wandb_run("offline", paths=RunPaths(tmp_path), **RUN)
    for step, value in enumerate((2.0, 3.0, 1.0)):
        names = ("max_abs", "error_ratio", "cosine", "sqnr_db", "bias_ulp")
        metrics = {f"deviation/layer_0/dq/{name}": value for name in names}
        metrics |= {"train/loss": value, "drift/all/w1": value, "watch/grad_norm": value}
        shown.send({"step": step, **metrics})
    shown.close()
    summary = read_summary(offline_log(tmp_path / "wandb"))
    largest, least = {"last": 1, "max": 3}, {"last": 1, "min": 1}
    assert summary["train/loss"] == least
    assert summary["watch/grad_norm"] == largest
    assert summary["drift/all/w1"] == 1
    for name in ("max_abs", "error_ratio", "bias_ulp"):
        assert summary[f"deviation/layer_0/dq/{name}"] == largest
    for name in ("cosine", "sqnr_db"):
        assert summary[f"deviation/layer_0/dq/{name}"] == least


def test_a_run_that_goes_on_keeps_its_id_and_others_have_their_own(tmp_path):
    ids = []
    for folder in ("0", "0", "1"):
        shown = open_wandb_run("offline", paths=RunPaths(tmp_path / folder), **RUN)
        ids.append(shown.run.id)
        shown.close()
    assert ids[0] == ids[1] != ids[2]


def test_a_failed_run_is_shown_as_failed(tmp_path, offline_log, read_records):
    shown = open_wandb_run("offline", paths=RunPaths(tmp_path), **RUN)
    shown.close(failed=True)
    (end,) = _of(read_records(offline_log(tmp_path / "wandb")), "exit")
    assert end["exit_code"] == 1


ODD = [
    "<script>alert(1)</script>",
    "\"quoted\" & 'single'",
    "../../outside",
    "/etc/passwd",
    "\N{SNOWMAN}\N{PILE OF POO}",
    "x" * 300,
    "a.b*c[0]",
    "line\nbreak",
]


def test_odd_names_are_text_and_stay_in_the_folder(tmp_path, offline_log, read_rows, read_records):
    logged = {f"drift/{name}/w1": float(n) for n, name in enumerate(ODD)}
    logged |= {f"deviation/{name}/out/max_abs": float(n) for n, name in enumerate(ODD)}
    shown = open_wandb_run("offline", paths=RunPaths(tmp_path / "run"), **RUN)
    shown.send({"step": 3, **logged})
    for name in ODD:
        shown.send({"step": 3, "event": "alert", "layer": name, "text": name})
    shown.close()
    log = offline_log(tmp_path / "run" / "wandb")
    assert read_rows(log) == [{**logged, "trainer/global_step": 3}]
    texts = [record["alert"]["text"] for record in read_records(log) if record["type"] == "alert"]
    assert texts == ODD
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_study_and_an_arm_may_have_the_longest_names_and_any_config(tmp_path):
    config = {"text": ODD, "nested": {name: name for name in ODD}}
    described = {"study": "s" * 64, "arm": "a" * 64, "seed": 10**9, "axis": "x." * 99}
    described["changes"] = ["optimizer.lr", "optimizer.warmup_steps", "x." * 99]
    shown = open_wandb_run("offline", paths=RunPaths(tmp_path), config=config, **described)
    assert shown.run.config["nested"] == config["nested"]
    assert shown.run.config["changed_group"] == "optimizer + schedule"
    assert set(shown.run.tags) == {("x." * 99)[:64], "optimizer", "schedule", "seed-1000000000"}
    shown.close()


def test_another_layout_is_a_tag_beside_what_else_changed(tmp_path):
    shown = open_wandb_run("offline", paths=RunPaths(tmp_path), is_other_layout=True, **RUN)
    assert shown.run.config["changed_group"] == "attention + layout"
    assert {"attention", "layout"} <= set(shown.run.tags)
    shown.close()


def test_disabled_makes_nothing(tmp_path):
    assert open_wandb_run("disabled", paths=RunPaths(tmp_path), **RUN) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"directory must be called wandb, got .*tracks"):
        start_run("offline", tmp_path / "tracks", tags=[])


def test_counts_that_do_not_fit_their_edges_are_refused():
    bins = len(ULP_EDGES) + 1
    check_counts({"a/ulp_histogram": [1] * bins})
    with pytest.raises(ValueError, match=f"a/b must have {bins} bins, .* got 3; count between"):
        check_counts({"a/b": [1, 2, 3]})


@pytest.mark.slow
def test_a_fresh_process_prints_nothing_warns_of_nothing_and_ends(tmp_path, offline_log, read_rows):
    code = (
        "from pathlib import Path\n"
        "from stability.records.paths import RunPaths\n"
        "from stability.tracking.history import open_wandb_run\n"
        "shown = open_wandb_run('offline', study='s', arm='a', seed=0, axis='none', changes=[],\n"
        f"    config={{}}, paths=RunPaths(Path({str(tmp_path)!r})))\n"
        "shown.send({'step': 0, 'train/loss': 1.0})\n"
        "shown.close()\n"
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
    assert len(read_rows(offline_log(tmp_path / "wandb"))) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HandleAbandonedError(), "its service has ended"),
        (TimeoutError("Timed out"), "Timed out"),
        (RuntimeError("anything\nelse"), "RuntimeError: anything else"),
    ],
)
def test_what_w_and_b_raises_at_the_end_is_told_and_not_raised(tmp_path, error, said):
    class Ending(OfflineRun):
        def finish(self, **_: object) -> None:
            raise error

    path = tmp_path / "metrics.jsonl"
    log = MirroredLog(path, WandbRun(Ending(), 0, path))
    assert log.end_mirror(failed=False) == said
