"""W&B as a Lightning logger: offline unless asked, silent, one run for each arm and seed.

Offline it needs no account and no network; `wandb sync` uploads the folder later, `wandb leet`
shows it in the terminal. A run of W&B is a view of our metric log: its row n is the n-th line that
holds numbers or counts, so a run that goes on can send again what W&B does not have (`replay`).
Leaves out what is logged: every logger gets the same metrics.
"""

import json
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger

from stability.records.atomic_files import write_text
from stability.records.metric_names import STEP_AXIS
from stability.tracking.wandb_environment import WandbMode, added_tags, project, resolve_mode
from stability.tracking.wandb_metrics import MetricRules, summary_of

__all__ = ["RowLogger", "WandbError", "finish", "make_wandb_logger", "start_run"]

WandbError = wandb.Error
"""What W&B itself raises."""

_ID_FILE = "id.txt"


class RowLogger(WandbLogger):
    """Logs to one run of W&B, row by row; the first `first` rows are there already."""

    def __init__(self, run: wandb.Run, first: int) -> None:
        super().__init__(experiment=run)
        self._run = run
        self._rules = MetricRules(run)
        self._first = first
        self._row = 0
        self._seen: dict[str, list[float]] = {}

    @property
    def is_new(self) -> bool:
        """Whether the next row is one that W&B does not have yet."""
        return self._row >= self._first

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row of numbers at `step`; Lightning's "epoch" is left out, as in our records.

        ValueError without a step.
        """
        if step is None:
            raise ValueError("RowLogger.log_metrics: step must be given, got None")
        kept = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if kept:
            self.log_row(kept, step)

    def log_row(self, values: Mapping[str, Any], step: int) -> None:
        """Log a row of numbers and whatever else W&B shows."""
        if self.is_new:
            for name in values:
                self._rules.see(name)
            # whole at once: an open row would be written after the summary, and replace it
            self._run.log({**values, STEP_AXIS: step}, step=self._row, commit=True)
        if self._first:
            for name, value in values.items():
                if isinstance(value, float):
                    self._seen.setdefault(name, []).append(value)
        self._row += 1

    def complete_summary(self) -> None:
        """Sum up every row where W&B would only have summed up the new ones."""
        for name, values in self._seen.items():
            numbers = [value for value in values if not math.isnan(value)] or values
            known = {"last": values[-1], "min": min(numbers), "max": max(numbers)}
            kinds = [kind for kind in summary_of(name).split(",") if kind]
            self._run.summary[name] = {kind: known[kind] for kind in kinds} or values[-1]


def make_wandb_logger(
    mode: WandbMode,
    *,
    study: str,
    arm: str,
    seed: int,
    axis: str,
    config: Mapping[str, Any],
    directory: Path,
) -> RowLogger | None:
    """Start a W&B run, grouped by study, and return its logger; None if `mode` is `disabled`.

    `config` is the arm's resolved config, JSON-able; W&B has the seed itself under `seed`.
    `directory` gets W&B's files and must be called `wandb`, as W&B itself insists. It also keeps
    the run's id: a run that goes on there has the same, and offline it replaces what was there.
    ValueError for another directory or an unknown WANDB_MODE.
    """
    mode = resolve_mode(mode)
    if mode == "disabled":
        return None
    run, first = start_run(
        mode,
        directory,
        name=f"{arm}-seed{seed}",
        group=study,
        job_type=arm,
        tags=[axis, f"seed-{seed}"],
        config={
            **{("seeds" if name == "seed" else name): value for name, value in config.items()},
            **{"study": study, "arm": arm, "seed": seed, "axis": axis},
        },
    )
    return RowLogger(run, first)


def start_run(
    mode: WandbMode, directory: Path, *, tags: list[str], **described: Any
) -> tuple[wandb.Run, int]:
    """Start the run that belongs to `directory`, or go on with it; `described` is W&B's own.

    Returns the run and how many rows of it W&B has, or will get from folders that stay: W&B can't
    add to an offline folder, so one that was never uploaded is deleted and replaced by this run's.
    """
    if directory.name != "wandb":
        raise ValueError(f"start_run: directory must be called wandb, got {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    name = _run_id(directory)
    kept = _replace(directory, name) if mode == "offline" else 0
    run = wandb.init(
        project=project(),
        dir=directory.parent,
        id=name,
        tags=[*tags, *added_tags()],
        mode=mode,
        resume="allow",  # offline too: `wandb sync` then adds to a run that the server has
        reinit="create_new",
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=mode == "offline",
            x_save_requirements=False,  # in the manifest; listing them takes ten times the rest
        ),
        **described,
    )
    return run, max(run.starting_step, kept)


def finish(logger: RowLogger, *, failed: bool = False) -> None:
    """Write out and close the run of `logger`; W&B shows a failed one as failed."""
    logger.experiment.finish(exit_code=1 if failed else 0)


def _run_id(directory: Path) -> str:
    """Return the id that the run in `directory` has, or give it one.

    Drawn, not computed: a run trained anew, perhaps by other code, is another run to W&B.
    """
    path = directory / _ID_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    name = secrets.token_hex(8)
    write_text(path, name + "\n")
    return name


def _replace(directory: Path, name: str) -> int:
    """Delete the run's offline folders that were never uploaded; return the rows in the others."""
    rows = 0
    for folder in directory.glob(f"offline-run-*-{name}"):
        if _was_uploaded(folder):
            rows = max(rows, _count_rows(folder / f"run-{name}.wandb"))
        else:
            shutil.rmtree(folder)
    return rows


def _was_uploaded(folder: Path) -> bool:
    """Whether `wandb sync` has sent this folder, or has begun to."""
    if any(folder.glob("*.synced")):
        return True
    return any("starting_step" in path.read_text() for path in folder.glob("*.syncstate"))


def _count_rows(log: Path) -> int:
    """Return the number after that of the last row in a file of W&B's, as its own reader sees it.

    OSError if it can't be read.
    """
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(log)],
        env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise OSError(f"{log}: W&B can't read it: {done.stderr.strip()[-200:]}")
    step = json.loads(done.stdout)["step"]
    return 0 if step is None else step + 1
