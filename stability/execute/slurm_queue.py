"""What Slurm's queue says of jobs, by `squeue`: no accounting database is needed.

Leaves out jobs that have ended, which the queue forgets: their runs' manifests say how.
"""

import subprocess
from collections.abc import Collection
from shutil import which

from stability.execute.standing import Standing

__all__ = ["QueueError", "cancel", "check_slurm", "queued"]

_FORMAT = "%i|%j|%T|%N|%S|%V|%r"
_NEVER = "DependencyNeverSatisfied"
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
TIMEOUT_S = 60


class QueueError(ValueError):
    """Slurm can't be asked now."""


def check_slurm() -> None:
    """ValueError if Slurm's commands are not here."""
    for command in ("sbatch", "squeue"):
        if which(command) is None:
            raise ValueError(
                f"--executor slurm needs {command}, which is not on PATH; run this on a host that "
                "submits jobs, or start `stability run STUDY --only ARM --seed N` by other means"
            )


def queued(names: Collection[str]) -> dict[str, dict[str, Standing]]:
    """Return the jobs of these names that have not ended: by name, then id (`17`, or `17_3`).

    QueueError if the controller gives no answer.
    """
    found: dict[str, dict[str, Standing]] = {name: {} for name in names}
    if not names:
        return found
    said = _said(
        "squeue", "--noheader", "--array", f"--name={','.join(names)}", f"--format={_FORMAT}"
    )
    for line in said.splitlines():
        id, name, state, node, began, submitted, reason = line.strip().split("|", 6)
        if name not in found or reason == _NEVER:
            continue
        waits = state in _WAITING
        found[name][id] = Standing(
            id=id,
            state="queued" if waits else "running",
            node=node,
            since=_time(submitted if waits else began),
            reason=reason if waits else "",
        )
    return found


def cancel(id: str) -> None:
    """Take a job out of the queue, if it is there."""
    _said("scancel", "--quiet", id)


def _time(said: str) -> str:
    return said if said[:1].isdigit() else ""


def _said(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueError(f"{words[0]}: {error}") from error
    if done.returncode:
        raise QueueError(f"{words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
