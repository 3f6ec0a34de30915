"""A finished study on W&B: every number is the records', every digit, and nothing is sent twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import wandb

from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.cli.workspace import publish_study, workspace_names
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_lines
from stability.records.paths import RunPaths, StudyPaths
from stability.report.page.html import write_page
from stability.report.view.evidence import headline
from stability.tracking import publish
from stability.tracking.history import numbers_of, open_wandb_run
from stability.tracking.panels import plan_panels
from stability.tracking.tables import alert_level, deviation_rows
from tests.stability.sealing import seal

ROOT = Path(__file__).parents[3]
PUBLISHED = [("baseline", 0), ("flash_fa2", 1), ("init_seed", 0)]


@pytest.fixture(scope="module")
def published(synthetic, tmp_path_factory) -> Path:
    """The folder of a study of two seeds whose records have been published offline."""
    folder = synthetic.write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")
    write_page(read_study(folder), folder)
    assert publish_study(read_study(folder), folder, "offline") == ""
    return folder


@pytest.fixture(scope="module")
def ladder(published) -> dict:
    return json.loads(StudyPaths(published).ladder.read_text())


@pytest.mark.parametrize(("arm", "seed"), PUBLISHED)
def test_every_row_is_a_line_of_the_records(published, offline_log, read_rows, arm, seed):
    paths = RunPaths.for_run(published, arm, seed)
    expected = [
        {**numbers_of(line), "trainer/global_step": line["step"]}
        for _, line in read_lines(paths.metrics)
    ]
    assert read_rows(offline_log(paths.wandb_dir)) == expected
    assert len(expected) >= 200


@pytest.mark.parametrize(("arm", "seed"), PUBLISHED)
def test_the_summary_is_the_arms_row_of_the_ladder(
    published, ladder, offline_log, read_summary, arm, seed
):
    summary = read_summary(offline_log(RunPaths.for_run(published, arm, seed).wandb_dir))
    (row,) = [row for row in ladder["rows"] if row["arm"] == arm]
    assert summary["ladder/change"] == row["change"]
    assert summary["ladder/state"] == row["state"] == "finished"
    for name in ("final_loss", "rel_l2/early", "rel_l2/last", "w1/last", "ratio/early"):
        spread = row
        for part in name.split("/"):
            spread = spread[part]
        assert summary.get(f"ladder/{name}") == spread["per_seed"].get(str(seed)), name
        assert summary.get(f"ladder/{name}/mean") == spread["mean"], name
        assert summary.get(f"ladder/{name}/max") == spread["max"], name
    assert summary["ladder/early_step"] == ladder["early_step"] == 20


@pytest.mark.slow
def test_stale_drifts_are_not_sent_and_other_lines_keep_their_rows(
    synthetic, tmp_path, offline_log, read_rows, read_summary
):
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])
    paths = RunPaths.for_run(folder, "nudge", 0)
    lines = [line for _, line in read_lines(paths.metrics)]
    gone = {"drift_of": "a" * 64, "drift_from": "b" * 64}
    late = [line["step"] >= 50 for line in lines]  # the drifts up to there name no parents
    paths.metrics.write_text(
        "".join(seal({**line, **(gone if x else {})}) for line, x in zip(lines, late, strict=True))
    )
    write_page(read_study(folder), folder)
    assert publish_study(read_study(folder), folder, "offline") == ""
    sent = read_rows(offline_log(paths.wandb_dir))
    for line, is_late, row in zip(lines, late, sent, strict=True):
        expected = {
            name: value
            for name, value in numbers_of(line).items()
            if not (is_late and name.startswith("drift/"))
        }
        assert row == {**expected, "trainer/global_step": line["step"]}
    summary = read_summary(offline_log(paths.wandb_dir))
    assert summary["drift/all/rel_l2"] == synthetic.rel_l2("nudge", 0, 20)


def _study_row(folder: Path, offline_log, read_rows) -> tuple[dict, Path]:
    log = offline_log(StudyPaths(folder).wandb_dir)
    (row,) = read_rows(log)
    return row, log.parent / "files"


def _cells(row: dict, files: Path, name: str) -> tuple[list[str], list[list]]:
    content = json.loads((files / row[f"{name}.path"]).read_text())
    return content["columns"], content["data"]


def test_the_table_of_the_ladder_has_every_number_of_the_ladder(
    published, ladder, offline_log, read_rows
):
    columns, data = _cells(*_study_row(published, offline_log, read_rows), "ladder")
    assert [row[columns.index("arm")] for row in data] == [row["arm"] for row in ladder["rows"]]
    for row, cells in zip(ladder["rows"], data, strict=True):
        found = dict(zip(columns, cells, strict=True))
        for name in ("final_loss", "rel_l2/early", "w1/last", "ratio/last", "w1_floor/early"):
            spread = row
            for part in name.split("/"):
                spread = spread[part]
            for key in ("n", "mean", "min", "max"):
                assert found[f"{name}/{key}"] == spread[key], (row["arm"], name, key)
            for seed in ("0", "1"):
                assert found.get(f"{name}/per_seed/{seed}") == spread["per_seed"].get(seed)


def test_the_table_of_layers_has_the_worst_of_each_layer(published, offline_log, read_rows):
    columns, data = _cells(*_study_row(published, offline_log, read_rows), "deviations")
    study = read_study(published)
    logged = [
        (arm.name, name, series.values)
        for arm in study.arms
        for run in arm.runs.values()
        for name, series in run.metrics.items()
    ]
    assert (columns, data) == deviation_rows(logged)
    found = {tuple(cells[:4]): dict(zip(columns, cells, strict=True)) for cells in data}
    runs = study.arm("flash_fa2").runs.values()
    bias = [v for run in runs for v in run.series("deviation/layer_0/out/bias_ulp").values()]
    assert found["flash_fa2", "layer_0", "", "out"]["bias_ulp"] == min(bias) < 0


def test_the_table_of_evidence_has_a_row_for_each_arm_and_level_and_numbers_as_numbers(
    published, offline_log, read_rows, read_records
):
    columns, data = _cells(*_study_row(published, offline_log, read_rows), "evidence")
    study = read_study(published)
    verdict = judge_arms(study, study.policy)
    found = [dict(zip(columns, cells, strict=True)) for cells in data]
    assert [(row["arm"], row["level"], row["state"]) for row in found] == [
        (arm.arm, level, evidence.state)
        for arm in verdict.arms
        for level, evidence in arm.levels.items()
    ]
    by_place = {(row["arm"], row["level"]): row for row in found}
    operator = verdict.arm("flash_fa2").levels["operator"]
    row = by_place["flash_fa2", "operator"]
    assert row["error_ratio"] == operator.figures["error_ratio"] > 0.5
    assert (row["verdict"], row["p_holds"]) == ("INCONCLUSIVE", operator.p_holds)
    silent = by_place["flash_fa2", "gradient"]
    assert silent["state"] == "not measured"
    assert [silent[name] for name in ("cell", "error_ratio", "p_harmed", "p_holds")] == [None] * 4
    types = _column_types(read_records(offline_log(StudyPaths(published).wandb_dir)), "evidence")
    assert {types[name] for name in ("arm", "verdict", "state", "decides")} == {"string"}
    assert {types[name] for name in ("error_ratio", "looks", "p_harmed", "p_holds")} == {"number"}


def _column_types(records: list[dict], table: str) -> dict[str, str]:
    """What the artifact of a table says of each column, besides that a cell may be missing."""
    (artifact,) = [
        record["artifact"]
        for record in records
        if record["type"] == "artifact" and record["artifact"]["name"].endswith(f"-{table}")
    ]
    (file,) = artifact["manifest"]["contents"]
    said = json.loads(Path(file["local_path"]).read_text())["column_types"]["params"]["type_map"]
    kinds = {
        name: {each["wb_type"] for each in x["params"]["allowed_types"]} for name, x in said.items()
    }
    assert all("none" in each for each in kinds.values())
    return {name: (each - {"none"}).pop() for name, each in kinds.items()}


@pytest.mark.parametrize(("table", "text"), [("ladder", 6), ("deviations", 4)])
def test_every_other_column_of_a_table_holds_numbers(
    published, offline_log, read_records, table, text
):
    types = _column_types(read_records(offline_log(StudyPaths(published).wandb_dir)), table)
    assert set(types.values()) == {"string", "number"}
    assert list(types.values()).count("string") == text


@pytest.mark.slow
def test_the_verdict_can_be_sorted_by_in_the_table_of_runs(published, offline_log, read_summary):
    summary = read_summary(offline_log(StudyPaths(published).wandb_dir))
    assert summary["verdict/flash_fa2"] == summary["verdict/flash_all_bf16"] == "INCONCLUSIVE"
    own = read_summary(offline_log(RunPaths.for_run(published, "flash_fa2", 1).wandb_dir))
    study = read_study(published)
    levels = judge_arms(study, study.policy).arm("flash_fa2").levels
    assert own["verdict"] == "INCONCLUSIVE"
    assert own["evidence/operator/error_ratio"] == levels["operator"].figures["error_ratio"]
    assert own["evidence/training/state"] == "not measured"
    baseline = read_summary(offline_log(RunPaths.for_run(published, "baseline", 1).wandb_dir))
    assert not [name for name in baseline if name.startswith(("verdict", "evidence"))]


@pytest.mark.slow
def test_every_panel_shows_what_is_in_the_offline_files(
    published, offline_log, read_rows, read_summary
):
    logs = [offline_log(StudyPaths(published).wandb_dir)]
    study = read_study(published)
    logs += [offline_log(r.paths.wandb_dir) for r in study.arm("flash_fa2").runs.values()]
    there = {name for log in logs for row in read_rows(log) for name in row}
    there |= {name for log in logs for name in read_summary(log)}
    panels = [x for part in plan_panels(workspace_names(study)) for x in part.panels]
    assert {name for panel in panels for name in panel.metrics} <= there
    assert len(panels) > 15


def test_the_report_is_there_byte_for_byte(published, offline_log, read_rows):
    row, files = _study_row(published, offline_log, read_rows)
    assert (files / row["report.path"]).read_bytes() == StudyPaths(published).report.read_bytes()


def test_the_study_has_a_run_of_its_own_in_its_group(published, offline_log, read_records):
    log = offline_log(StudyPaths(published).wandb_dir)
    (run,) = [record["run"] for record in read_records(log) if record["type"] == "run"]
    assert (run["run_group"], run["job_type"]) == ("quickstart", "study")


def _logs(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.wandb") if not path.is_symlink()}


@pytest.fixture
def copied(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "quickstart", symlinks=True))


@pytest.mark.slow
def test_publishing_again_writes_nothing_until_something_has_changed(copied, synthetic):
    before = _logs(copied)
    assert publish_study(read_study(copied), copied, "offline") == ""
    assert _logs(copied) == before
    synthetic.write_study_json(copied, early_step=50)
    write_page(read_study(copied), copied)
    assert publish_study(read_study(copied), copied, "offline") == ""
    after = _logs(copied)
    assert not set(after.values()) & set(before.values()), "every row of the ladder is another"
    assert len(after) == len(before), "what was superseded is gone"


def test_what_w_and_b_refuses_is_one_line_and_no_error(copied, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise wandb.Error("the server\nis on fire")

    monkeypatch.setattr(publish, "_publish_run", refuse)
    said = publish_study(read_study(copied), copied, "offline")
    assert said.startswith("W&B is not up to date: the server is on fire; the records are whole")


def test_a_run_that_another_process_has_open_with_the_same_service_is_one_line(copied):
    run = next(iter(read_study(copied).arm("baseline").runs.values()))
    stamps = list(copied.rglob("published-offline.sha256"))
    for stamp in stamps:
        stamp.unlink()
    manifest = run.manifest
    described = {"study": manifest.study, "arm": manifest.arm, "seed": manifest.seed}
    described["changes"] = manifest.diff
    mine = open_wandb_run(
        "offline", axis=manifest.axis, config=manifest.config, paths=run.paths, **described
    )
    try:
        said = publish_study(read_study(copied), copied, "offline")
    finally:
        mine.close()
    assert "\n" not in said
    assert said.startswith("W&B is not up to date: its service refuses: run ID ")
    assert " is in use; the records are whole" in said


def test_a_failure_half_way_leaves_no_run_open_for_the_next_study(copied, monkeypatch):
    finished = []

    def watched(*args, **options):
        run, path = start_run(*args, **options)
        finish = run.finish
        monkeypatch.setattr(run, "finish", lambda: (finished.append(True), finish()))
        return run, path

    start_run = publish.start_run
    monkeypatch.setattr(publish, "start_run", watched)
    monkeypatch.setattr(publish, "study_tables", lambda *_: [][0])
    StudyPaths(copied).report.write_text("another page, so that it is published anew")
    with pytest.raises(IndexError):
        publish_study(read_study(copied), copied, "offline")
    assert finished == [True]


def test_disabled_publishes_nothing(synthetic, tmp_path, monkeypatch):
    folder = synthetic.write_synthetic(tmp_path / "quickstart")
    write_page(read_study(folder), folder)
    assert publish_study(read_study(folder), folder, "disabled") == ""
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert publish_study(read_study(folder), folder, "disabled") == ""
    assert not list(folder.rglob("wandb"))


KILLED = """
import os, signal, sys
from pathlib import Path
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.cli.workspace import publish_study, workspace_names
from stability.tracking import history, publish

left, send, tables = [int(sys.argv[2])], history.WandbRun.send, publish._send_tables

def deadly(self, line):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    send(self, line)

def deadly_tables(*arguments):
    tables(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

history.WandbRun.send, publish._send_tables = deadly, deadly_tables
folder = Path(sys.argv[1])
publish_study(read_study(folder), folder, "offline")
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [30, 10**9], ids=["in a run", "in the study's own"])
def test_a_kill_while_it_publishes_harms_no_record_and_the_next_call_sends_all(
    synthetic, tmp_path, offline_log, read_rows, lines
):
    folder = synthetic.write_synthetic(tmp_path / "quickstart")
    write_page(read_study(folder), folder)
    records = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # W&B's server of this process, which outlives the other, is not to be shared
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, folder, str(lines)],
        env={**own, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    assert records == {path: path.read_bytes() for path in records}
    assert publish_study(read_study(folder), folder, "offline") == ""
    for arm, seed in PUBLISHED:
        paths = RunPaths.for_run(folder, arm, seed)
        numbered = [line for _, line in read_lines(paths.metrics) if numbers_of(line)]
        assert len(read_rows(offline_log(paths.wandb_dir))) == len(numbered)
    assert offline_log(StudyPaths(folder).wandb_dir).is_file()


def test_a_run_in_other_processes_than_its_baseline_is_tagged_layout(
    synthetic, tmp_path, monkeypatch
):
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])
    path = RunPaths.for_run(folder, "nudge", 0).manifest
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, resolved={**manifest.resolved, "ranks": 2}))
    write_page(read_study(folder), folder)
    shown = {}

    def open_run(mode, *, arm, is_other_layout, **given):
        shown[arm] = is_other_layout

    monkeypatch.setattr(publish, "open_wandb_run", open_run)
    monkeypatch.setattr(publish, "_publish_study", lambda *_: None)
    assert publish_study(read_study(folder), folder, "offline") == ""
    assert [arm for arm, is_other in shown.items() if is_other] == ["nudge"]
    assert "baseline" in shown


@pytest.mark.parametrize(
    ("outcomes", "level"),
    [
        ([("candidate", "PASS"), ("broken", "FAIL")], "INFO"),
        ([("candidate", "PASS"), ("candidate", "FAIL"), ("broken", "FAIL")], "ERROR"),
        ([("candidate", "INCONCLUSIVE"), ("broken", "FAIL")], "WARN"),
        # a fault that was not found is told, whatever passes
        ([("candidate", "PASS"), ("broken", "PASS")], "WARN"),
        ([("candidate", "NO ASSAY")], "WARN"),
        ([], "WARN"),
    ],
)
def test_an_alert_is_as_loud_as_the_verdict(outcomes, level):
    assert alert_level([{"role": role, "outcome": outcome} for role, outcome in outcomes]) == level


def test_the_verdict_is_an_alert_of_the_studys_run(published, offline_log, read_records):
    log = offline_log(StudyPaths(published).wandb_dir)
    (alert,) = [record["alert"] for record in read_records(log) if "alert" in record]
    study = read_study(published)
    verdict = judge_arms(study, study.policy)
    level = alert_level([arm.to_dict() for arm in verdict.arms])
    assert alert["level"] == level
    assert alert["title"].startswith("quickstart: ")
    assert alert["text"] == f"{headline(verdict)}\n{study.question}"
