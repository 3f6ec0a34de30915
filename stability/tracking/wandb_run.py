"""Starts the W&B run that belongs to a folder, or goes on with it.

The folder `wandb` of a run keeps the id that W&B knows the run by, so a run that is resumed is the
same run to W&B. Offline it needs no account and no network; `wandb sync` uploads the folder later,
and `wandb leet` shows it in the terminal. This file does not say what is logged (`history`).
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.records.atomic_files import make_folders, write_text
from stability.records.plain_files import read_plain
from stability.tracking.environment import WandbMode, added_tags, project, set_up

if TYPE_CHECKING:
    import wandb

__all__ = ["TRAINING_PATIENCE_S", "in_a_line", "start_run", "told_in_a_line", "was_uploaded"]

TRAINING_PATIENCE_S = 30
"""How long a training waits for W&B's server, when it starts and when it ends; what W&B lacks is
sent once the study has ended. W&B itself waits 90 s, and at the end for as long as it takes."""

_ID_FILE = "id.txt"
_ENDED = ("MailboxClosedError", "HandleAbandonedError", "WandbServiceConnectionError")
"""What W&B raises where its service has ended: before a question, before the answer, before all."""


def start_run(
    mode: WandbMode,
    directory: Path,
    *,
    tags: list[str],
    patience_s: float = TRAINING_PATIENCE_S,
    **described: Any,
) -> tuple["wandb.Run", int]:
    """Start the W&B run that belongs to `directory`, or go on with it.

    `described` are further arguments of `wandb.init`: name, group, job_type, config. Returns the
    run and the number of rows that W&B has of it, or will have from folders that stay. W&B can't
    append to an offline folder: one that was never uploaded is deleted, and the new run replaces
    it. Online both the start and `finish` wait `patience_s` seconds for the server; `finish` then
    raises TimeoutError, as the start does where W&B takes as long to read such a folder. Raises
    ValueError unless `directory` is called wandb, which W&B itself insists on, and ConnectionError
    where another process has the run open, or W&B refuses.
    """
    import wandb  # heavy

    if directory.name != "wandb":
        raise ValueError(f"start_run: directory must be called wandb, got {directory}")
    make_folders(directory)
    run_id = _run_id(directory)
    uploaded = _delete_unsent(directory, run_id, patience_s) if mode == "offline" else 0
    online: dict[str, Any] = {
        "init_timeout": patience_s,
        "finish_timeout": patience_s,
        "finish_timeout_raises": True,
    }
    with told_in_a_line():
        set_up(wandb.Settings(silent=True))  # else `init` tells of the account it uses
        run = wandb.init(
            project=project(),
            dir=directory.parent.absolute(),  # its service stays in the directory it began in
            id=run_id,
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
                # the manifest lists the packages; W&B's own list takes ten times as long as all
                # the rest
                x_save_requirements=False,
                # of this process, which is not the one that trained, and with its whole command,
                # passwords too
                x_disable_meta=True,
                **(online if mode == "online" else {}),
            ),
            **described,
        )
    return run, max(run.starting_step, uploaded)


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Raise ConnectionError where W&B, or the service process that it runs, refuses or has ended.

    The service refuses an id that another process has open with it, as it is where that process has
    started it and told its children.
    """
    import wandb  # heavy

    try:
        yield
    except Exception as error:
        # by their names: W&B 0.31 has them in private modules, and below no error of its own
        name, said = type(error).__name__, " ".join(str(error).split())
        if name == "ServerResponseError":
            said = f"its service refuses: {said}"
        elif name in _ENDED or isinstance(error, ConnectionResetError):
            said = "its service has ended"
        elif not isinstance(error, wandb.Error):
            raise
        raise ConnectionError(said) from error


def in_a_line(error: Exception) -> str:
    """Return what an error says, in a line, and its kind unless it is the system's or ours."""
    kind, said = type(error).__name__, " ".join(str(error).split())
    if not said:
        return kind
    return said if isinstance(error, OSError) else f"{kind}: {said}"


def _run_id(directory: Path) -> str:
    """Return the id of the run in `directory`; draw one if it has none, or what can't be one.

    It is drawn and not computed, because a run that is trained anew, perhaps by other code, must be
    another run to W&B.
    """
    path = directory / _ID_FILE
    if path.exists():
        found = read_plain(path).strip()
        # the id becomes a part of names of folders, which are deleted: it must be no path
        if re.fullmatch(rb"[A-Za-z0-9_-]{1,64}", found):
            return found.decode()
    run_id = secrets.token_hex(8)
    write_text(path, run_id + "\n")
    return run_id


def _delete_unsent(directory: Path, run_id: str, patience_s: float) -> int:
    """Delete the run's offline folders that were never uploaded; return the rows in the others."""
    rows = 0
    for folder in directory.glob(f"offline-run-*-{run_id}"):
        if was_uploaded(folder):
            rows = max(rows, _count_rows(folder / f"run-{run_id}.wandb", patience_s))
        else:
            shutil.rmtree(folder)
    return rows


def was_uploaded(folder: Path) -> bool:
    """Whether `wandb sync` has uploaded this offline folder, or has begun to."""
    if any(folder.glob("*.synced")):
        return True
    return any("starting_step" in read_plain(path).decode() for path in folder.glob("*.syncstate"))


def _count_rows(file: Path, patience_s: float) -> int:
    """Return how many rows a file of W&B's holds, as W&B's own reader counts them.

    Raises OSError if the reader can't read it, TimeoutError if not within `patience_s` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(file)],
            env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
            capture_output=True,
            text=True,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{file}: W&B has not read it in {patience_s:g} s") from error
    if done.returncode:
        raise OSError(f"{file}: W&B can't read it: {done.stderr.strip()[-200:]}")
    last_row = json.loads(done.stdout)["step"]
    return 0 if last_row is None else last_row + 1
