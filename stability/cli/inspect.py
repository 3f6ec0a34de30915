"""`stability show` and `stability report`: look at a study or a probe whose records exist."""

from pathlib import Path

from rich.console import Console

from stability.analysis.growth_law import study_growth
from stability.analysis.ladder import ladder_of
from stability.analysis.recorded import read_study
from stability.records.probe_record import PROBE_FILE
from stability.report.growth_table import print_growth
from stability.report.html import write_report
from stability.report.probe_page import write_probe_page
from stability.report.probe_table import print_found, print_probe
from stability.report.terminal import print_ladder

__all__ = ["report", "show"]


def show(folder: Path) -> int:
    """Print the ladder of a study, or the table of a probe.

    Args:
        folder: the folder of a study, e.g. runs/quickstart, or of a probe
    """
    console = Console()
    if _holds_probe(folder):
        print_probe(folder, console)
        return 0
    study = read_study(folder)
    print_ladder(ladder_of(study), console)
    console.print()
    print_growth(study_growth(study), console)
    print_found(study, console)
    return 0


def report(folder: Path) -> int:
    """Write a study's report.html, or a probe's probe.html, anew from its records.

    Also while it runs.

    Args:
        folder: the folder of a study, e.g. runs/quickstart, or of a probe
    """
    written = write_probe_page(folder) if _holds_probe(folder) else write_report(folder)
    Console().print(written, soft_wrap=True, highlight=False)
    return 0


def _holds_probe(folder: Path) -> bool:
    if (folder / PROBE_FILE).is_file():
        return True
    if (folder / "study.json").is_file():
        return False
    raise ValueError(
        f"folder must hold study.json or {PROBE_FILE}, got {str(folder)!r}; `stability run` and "
        "`stability probe` make one"
    )
