"""What W&B has of a study beside its runs' logs has a name that the page of metrics explains."""

import json
from pathlib import Path

import pytest

from stability.analysis.study_records import read_study
from stability.cli.workspace import publish_study
from stability.records.figure_table import FIGURES
from stability.records.paths import RunPaths, StudyPaths
from stability.report.page.html import write_page
from stability.tracking.tables import STUDY_TABLES
from tests.test_reference_pages import IN_LOG, IN_SUMMARY, OF_STUDY, name_patterns, unnamed


@pytest.fixture(scope="module")
def published(synthetic, tmp_path_factory):
    folder = synthetic.write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")
    write_page(read_study(folder), folder)
    assert publish_study(read_study(folder), folder, "offline") == ""
    return folder


def _own(summary: dict) -> set[str]:
    return {name for name in summary if not name.startswith("_")}


def test_every_name_of_a_runs_summary_is_on_the_page(published, offline_log, read_summary):
    found = set()
    for arm in ("baseline", "flash_fa2", "init_seed"):
        found |= _own(read_summary(offline_log(RunPaths.for_run(published, arm, 0).wandb_dir)))
    assert unnamed(found, IN_LOG, IN_SUMMARY) == []
    # which figures there are depends on what was judged
    rows = {k: v for k, v in name_patterns(IN_SUMMARY).items() if not k.startswith("evidence/")}
    assert [row for row, fits in rows.items() if not any(map(fits.fullmatch, found))] == []


def test_every_name_of_the_studys_own_run_is_on_the_page(
    published, offline_log, read_summary, read_rows
):
    log = offline_log(StudyPaths(published).wandb_dir)
    names = _own(read_summary(log))
    (row,) = read_rows(log)
    assert unnamed({x.partition(".")[0] for x in names | row.keys()}, OF_STUDY) == []
    evidence, rungs, deviations = (_columns(log, row, x) for x in STUDY_TABLES if x != "report")
    assert evidence - _known("evidence") <= {name for found in FIGURES.values() for name in found}
    assert evidence >= _known("evidence")
    assert deviations == _known("deviations")
    in_summary = {f"ladder/{x}" for x in rungs if x != "arm" and "/per_seed/" not in x}
    assert unnamed(in_summary, IN_SUMMARY) == []


def _columns(log: Path, row: dict, table: str) -> set[str]:
    return set(json.loads((log.parent / "files" / row[f"{table}.path"]).read_text())["columns"])


def _known(table: str) -> set[str]:
    """Return the columns of a table that the page lists."""
    begins = f"COLUMN of {table} "
    return {x.removeprefix(begins) for x in name_patterns(OF_STUDY) if x.startswith(begins)}
