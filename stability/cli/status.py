"""`stability status`: where all runs of a study stand, on this machine and in the queue."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import HOLDS, print_json, print_line
from stability.config.load import read_mapping
from stability.records.paths import StudyPaths
from stability.records.study_file import studies_near

if TYPE_CHECKING:
    from rich.console import Console

    from stability.execute.status import RunStatus, StudyStatus

__all__ = ["status"]

SHOWN = 300
"""Letters of a message that are shown; --json has all."""


def status(study: Path | None = None, out: Path = Path("runs"), json: bool = False) -> int:
    """Show where every run of a study stands: state, step, job, node, and since when.

    Args:
        study: the folder of a study, e.g. runs/quickstart, or its YAML file; every study in --out
            if not given
        out: the folder that `stability run` was given
        json: print it as JSON
    """
    folders = _folders(study, out)
    from rich.console import Console  # heavy

    from stability.execute.status import study_status

    found = [study_status(folder) for folder in folders]
    if json:
        print_json([asdict(each) for each in found])
        return HOLDS
    console = Console()
    for each in found:
        _print_status(each, console)
    return HOLDS


def _folders(study: Path | None, out: Path) -> list[Path]:
    """Return the folders of the studies that are asked for; ValueError if there is none."""
    if study is not None and study.suffix in (".yaml", ".yml") and study.is_file():
        study = out / str(read_mapping(study).get("name", ""))
    begun = sorted(path.parent for path in out.glob("*/study.json"))
    found = begun if study is None else [study]
    if not found:
        raise ValueError(f"status: {out} must hold a study, has none; `stability run` makes one")
    for folder in found:
        if not StudyPaths(folder).study.is_file():
            near = studies_near(folder) or "`stability run` begins it"
            raise ValueError(
                f"status: study must be the folder of a study or its YAML file, got {str(folder)!r}"
                f", where no run has begun; {near}"
            )
    return found


def _print_status(study: "StudyStatus", console: "Console") -> None:
    from stability.report.terminal.tables import add_row, ruled_table

    states = [run.state for run in study.runs if run.arm]
    counts = ", ".join(f"{states.count(x)} {x}" for x in dict.fromkeys(states))
    print_line(f"{study.name}: {counts} of {len(states)} runs")
    has_jobs = any(run.job or run.node for run in study.runs)
    table = ruled_table(
        ["arm"], ["seed", "state", "step", *(["job", "node"] if has_jobs else []), "since"]
    )
    for run in study.runs:
        job = [run.job, run.node] if has_jobs else []
        add_row(table, *_named(run), run.state, _step(run), *job, _since(run.since))
    console.print(table)
    for run in study.runs:
        if run.message and run.state not in ("queued", "starting"):
            print_line(f"{run.arm}, seed {run.seed}: {run.message[:SHOWN]}")
    reasons = sorted({run.message for run in study.runs if run.state == "queued" and run.message})
    if reasons:
        print_line(f"queued for: {', '.join(reasons)}")
    if study.trouble:
        print_line(study.trouble)


def _named(run: "RunStatus") -> tuple[str, str]:
    return (run.arm, str(run.seed)) if run.arm else ("(what follows the runs)", "")


def _step(run: "RunStatus") -> str:
    return f"{run.step}/{run.until}" if run.until else ""


def _since(said: str) -> str:
    """Return a time in few letters: without the day if that is today."""
    if not said:
        return ""
    time = datetime.fromisoformat(said)
    return f"{time:%H:%M:%S}" if time.date() == datetime.now().date() else f"{time:%m-%d %H:%M}"
