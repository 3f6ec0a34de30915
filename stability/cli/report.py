"""`stability report`: the HTML page of a study or a probe, once or for as long as it runs."""

import time
import webbrowser
from pathlib import Path

from rich.console import Console

from stability.analysis.study_records import RecordedStudy, read_study
from stability.cli.inspect import holds_probe
from stability.report.live.study_index import find_studies
from stability.report.page.html import write_page, write_probe_page

__all__ = ["report"]

RELOAD_S = 5
"""How often a page that is watched loads itself anew."""
SHARE = 10
"""Looking and writing may take one part in so many of the time: training needs the cores."""


def report(folder: Path, open: bool = False, watch: bool = False) -> int:
    """Write a study's report.html, or a probe's probe.html, anew from its records.

    Args:
        folder: the folder of a study, e.g. runs/quickstart, or of a probe
        open: open the page in the browser
        watch: write it whenever the records have grown, until the study has ended or Ctrl-C
    """
    if watch and holds_probe(folder):
        raise ValueError(
            f"report: watch is for a study, got the probe {str(folder)!r}; "
            "`stability dashboard` follows a probe"
        )
    study = None if holds_probe(folder) else read_study(folder)
    reload_s = RELOAD_S if watch and study and _goes_on(study) else 0
    written = write_page(study, folder, reload_s=reload_s) if study else write_probe_page(folder)
    Console().print(written, soft_wrap=True, highlight=False, markup=False)
    if open:
        webbrowser.open(written.resolve().as_uri())
    if study and reload_s:
        _follow(folder, study)
    return 0


def _follow(folder: Path, study: RecordedStudy) -> None:
    """Write the page whenever the records have changed, and at last one that stays as it is."""
    stamp, seconds = "", 0.0
    try:
        while _goes_on(study):
            time.sleep(max(RELOAD_S / 2, SHARE * seconds))
            start = time.monotonic()
            newer = next(iter(find_studies(folder).values())).stamp
            if newer != stamp:
                stamp, study = newer, read_study(folder, study)
                write_page(study, folder, reload_s=RELOAD_S)
            seconds = time.monotonic() - start
    except KeyboardInterrupt:
        pass
    finally:
        write_page(read_study(folder, study), folder)


def _goes_on(study: RecordedStudy) -> bool:
    states = {run.state for arm in study.arms for run in arm.runs.values()}
    return bool(states & {"running", "missing"})
