"""`stability show`: a study, one of its arms, or a probe, in the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import HOLDS, print_json, write_json
from stability.cli.probe import exit_code_of
from stability.records.probe_record import PROBE_FILE
from stability.records.study_file import studies_near

if TYPE_CHECKING:
    from rich.console import Console

    from stability.analysis.ladder import Ladder
    from stability.analysis.study_records import RecordedStudy

__all__ = ["holds_probe", "show"]


def show(folder: Path, arm: str | None = None, json: bool = False) -> int:
    """Print the ladder of a study, all about one of its arms, or the table of a probe.

    Of a probe the exit code is that of `stability probe`: 1 if a candidate failed or a limit is
    exceeded, 3 if some layer could not be compared. A study is only shown: its answer by exit code
    is `stability verdict`.

    Args:
        folder: the folder of a study, e.g. runs/quickstart, or of a probe
        arm: the arm to look at, e.g. flash_fa2; the ladder of all if not given
        json: print the ladder, or the arm, as JSON, every seed's value included
    """
    is_probe = holds_probe(folder)
    if is_probe and (arm is not None or json):
        raise ValueError(f"show: arm and json are for a study, got the probe {str(folder)!r}")
    from rich.console import Console  # heavy, and so is numpy behind the rest

    from stability.analysis.arm_summary import summarise_arm
    from stability.analysis.ladder import ladder_of
    from stability.analysis.study_records import read_study
    from stability.report.terminal.arm import print_arm
    from stability.report.terminal.probe import print_probe

    console = Console()
    if is_probe:
        return exit_code_of(print_probe(folder, console))
    study = read_study(folder)
    ladder = ladder_of(study)
    if arm is not None:
        view = summarise_arm(study, ladder, arm)
        print_json(view.to_dict()) if json else print_arm(view, console)
    elif json:
        write_json(ladder.to_json())
    else:
        _print_study(study, ladder, console)
    return HOLDS


def holds_probe(folder: Path) -> bool:
    """Whether the folder is a probe's; False for a study's, ValueError for any other."""
    if (folder / PROBE_FILE).is_file():
        return True
    if (folder / "study.json").is_file():
        return False
    near = studies_near(folder) or "`stability run` and `stability probe` make one"
    got = repr(str(folder)) if folder.exists() else f"no such folder, {str(folder)!r}"
    raise ValueError(f"folder must hold study.json or {PROBE_FILE}, got {got}; {near}")


def _print_study(study: "RecordedStudy", ladder: "Ladder", console: "Console") -> None:
    from stability.analysis.arm_growth import study_growth  # heavy: numpy
    from stability.report.terminal.arm import print_growth
    from stability.report.terminal.ladder import drift_sparks, print_ladder
    from stability.report.terminal.probe import print_found
    from stability.report.terminal.verdict import print_answer
    from stability.report.view.evidence import scope_line, verdict_of
    from stability.report.view.plain_text import as_text
    from stability.report.view.unlisted import unlisted_runs

    print_answer(study.question, verdict_of(study), console, scope_line(study))
    print_ladder(ladder, console, drift_sparks(study, console))
    if said := unlisted_runs(study):
        console.print(as_text(f"note: {said}", style="dim"))
    console.print()
    print_growth(study_growth(study), console)
    print_found(study, console)
