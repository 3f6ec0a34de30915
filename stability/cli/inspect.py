"""`stability show` and `stability report`: look at a study whose records exist."""

from pathlib import Path

from rich.console import Console

from stability.analysis.ladder import build_ladder
from stability.report.html import write_report
from stability.report.terminal import print_ladder

__all__ = ["report", "show"]


def show(study: Path) -> int:
    """Print the ladder of a study.

    Args:
        study: the study's folder, e.g. runs/quickstart
    """
    print_ladder(build_ladder(_existing(study)), Console())
    return 0


def report(study: Path) -> int:
    """Write the study's report.html anew from its records, also while it runs.

    Args:
        study: the study's folder, e.g. runs/quickstart
    """
    Console().print(write_report(_existing(study)), soft_wrap=True, highlight=False)
    return 0


def _existing(study: Path) -> Path:
    if not (study / "study.json").is_file():
        raise ValueError(
            f"study must be a folder that holds study.json, got {str(study)!r}; "
            "`stability run` makes one"
        )
    return study
