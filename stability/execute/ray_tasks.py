"""Trains the runs of a study as tasks of Ray, on whatever nodes a running cluster has.

A detached actor, the keeper, owns the tasks, so they outlive this command; it starts them all when
it is made, and again if its own node dies: what has ended by then ends at once. A candidate's task
takes the result of its baseline's, so Ray starts it afterwards. A task whose node or worker dies is
retried elsewhere and goes on from the run's checkpoint. Each task runs the command line `stability
run STUDY --only ARM --seed N` as a process of its own, since Ray's workers serve many tasks.
"""

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stability.callbacks.study_observer import StudyObserver
from stability.execute.attached import wait_for, with_jobs_left
from stability.execute.executor import PROGRAM, PlannedRun, StudyCommand, needed
from stability.execute.job_record import submitting
from stability.execute.standing import FINISH, Key, Standing
from stability.records.identity import VARIABLES_LISTED
from stability.records.paths import StudyPaths
from stability.records.sealed_json import read_record, write_sealed

__all__ = ["RayTasks", "ray_jobs"]

NAMESPACE = "stability"
DEFAULTS = {"num_cpus": 1, "max_retries": 10}
"""Of a task. Ray's own 3 retries would be used up by a day of preemptions."""
_PR_SET_PDEATHSIG = 1
"""Of `<sys/prctl.h>`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One process to be started on some node."""

    key: Key
    words: list[str]
    """After `stability`."""
    after: Key | None
    """The task that must have ended well before; None for none."""
    log: str
    """The file that gets what it prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RayJobs:
    """What is on disk of a study's tasks."""

    address: str
    keeper: str
    """The name of the actor that owns them."""


class RayTasks:
    """The executor that trains by tasks of Ray: see `executor.Executor`."""

    def __init__(self, command: StudyCommand, options: Mapping[str, str]) -> None:
        """Take options of a Ray task, with dashes or underscores, and `address`; starts nothing.

        ValueError where Ray is not installed, and for an option that is no number.
        """
        self._ray = needed("ray", "ray")
        given = {name.replace("-", "_"): text for name, text in options.items()}
        self._address = given.pop("address", "auto")
        self._options = DEFAULTS | {name: _number(name, text) for name, text in given.items()}
        self._command = command

    def train(self, runs: Sequence[PlannedRun], observer: StudyObserver) -> None:
        """Start a task for each run that has not ended, or find those that run, and wait for them.

        ValueError if there is no cluster at the address.
        """
        left = with_jobs_left(runs, observer)
        if not left:
            return
        _connect(self._ray, self._address)
        with submitting(self._command.folder):
            keeper, is_new = self._find_or_start(left)
        what = "started on Ray" if is_new else "found on Ray"
        observer.study_noted(
            f"{len(left) + 1} tasks {what}; Ctrl-C leaves them there, and `stability status` "
            "shows them"
        )
        wait_for(left, observer, lambda: _look(self._ray, keeper), self._printed)
        self._ray.kill(keeper)

    def _find_or_start(self, runs: Sequence[PlannedRun]) -> tuple[Any, bool]:
        """Return the keeper, and whether it is a new one."""
        folder = self._command.folder
        known = _read(folder)
        keeper = known and _keeper(self._ray, known.keeper)
        if keeper:
            # None: it can't be asked now, and may have tasks in training
            if _look(self._ray, keeper) != {}:
                return keeper, False
            self._ray.kill(keeper)  # what it had has ended, not all of it well
        name = f"{self._command.name}.{datetime.now():%Y%m%d-%H%M%S-%f}"
        write_sealed(_path(folder), asdict(_RayJobs(address=self._address, keeper=name)))
        variables = {x: y for x, y in os.environ.items() if _goes_along(x)}
        tasks = [self._task(run) for run in runs]
        arguments = (tasks, self._finishing(), self._options, variables, str(Path.cwd()))
        keeper = self._ray.remote(Keeper).options(
            name=name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1
        )
        return keeper.remote(*arguments), True

    def _task(self, run: PlannedRun) -> Task:
        key, after = (run.arm.name, run.seed), run.baseline and (run.baseline.arm, run.seed)
        return Task(key=key, words=self._command.one(*key), after=after, log=self._log(key))

    def _finishing(self) -> Task:
        return Task(key=FINISH, words=self._command.finish(), after=None, log=self._log(FINISH))

    def _log(self, key: Key) -> str:
        name = "finish" if key == FINISH else f"{key[0]}.seed-{key[1]}"
        return str(StudyPaths(self._command.folder).jobs / "ray" / f"{name}.log")

    def _printed(self, key: Key) -> str:
        return f"what it printed is in {self._log(key)}"


class Keeper:
    """The actor that owns a study's tasks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        finishing: Task,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        """Start all tasks; those that wait for another one are started by Ray."""
        self._ray = needed("ray", "ray")
        self._begun: dict[Key, tuple[str, str]] = {}
        self._refs: dict[Key, Any] = {}
        own = self._ray.get_runtime_context().current_actor
        start = self._ray.remote(run_task).options(**options)
        for task in tasks:
            after = self._refs.get(task.after) if task.after else None
            self._refs[task.key] = start.remote(own, task, variables, folder, after)
        all_of_them = list(self._refs.values())
        self._refs[FINISH] = start.remote(own, finishing, variables, folder, None, *all_of_them)

    def begun(self, key: Key, node: str) -> None:
        """Take note that a task has begun, on which node."""
        self._begun[key] = node, datetime.now().isoformat(timespec="seconds")

    def look(self) -> dict[Key, Standing]:
        """Return the tasks that have not ended."""
        refs = list(self._refs.values())
        ended = set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        return {
            key: Standing(
                id=ref.task_id().hex()[:8],
                state="running" if key in self._begun else "queued",
                node=self._begun.get(key, ("", ""))[0],
                since=self._begun.get(key, ("", ""))[1],
            )
            for key, ref in self._refs.items()
            if ref not in ended
        }


def run_task(
    keeper: Any,
    task: Task,
    variables: Mapping[str, str],
    folder: str,
    after: int | None,
    *others: int | None,
) -> int:
    """Run a task's command line and return its exit code; -1 if its baseline has failed.

    `after` and `others` are the exit codes of the tasks before it, for which Ray waits.
    """
    if after:
        return -1
    keeper.begun.remote(task.key, os.uname().nodename)
    log = Path(task.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*PROGRAM, *task.words]
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(words)}\n".encode())
        file.flush()
        done = subprocess.run(
            words,
            env={**os.environ, **variables},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_worker,
        )
    return done.returncode


def _die_with_worker() -> None:
    """Ask Linux to kill this process with the worker: a task retried elsewhere needs the run."""
    if hasattr(signal, "SIGKILL") and os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ray_jobs(study: Path) -> dict[Key, Standing] | None:
    """Return the tasks of the study in a folder that have not ended; None if they can't be asked.

    Empty where the study has none.
    """
    known = _read(study)
    if known is None:
        return {}
    try:
        ray = needed("ray", "ray")
        _connect(ray, known.address)
    except ValueError:
        return None
    keeper = _keeper(ray, known.keeper)
    return _look(ray, keeper) if keeper else {}


def _look(ray: Any, keeper: Any) -> dict[Key, Standing] | None:
    try:
        return ray.get(keeper.look.remote(), timeout=30)
    except ray.exceptions.ActorDiedError:
        return {}
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None  # its node has died, and it begins anew on another one


def _keeper(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _connect(ray: Any, address: str) -> None:
    """ValueError if there is no cluster."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"--ray.address must be that of a running cluster, got {address!r}: {said}; `ray start "
            "--head` starts one"
        ) from error


def _goes_along(variable: str) -> bool:
    """Whether a variable of this process goes along: bits depend on it, or what is imported."""
    return bool(VARIABLES_LISTED.match(variable)) or variable in ("PYTHONPATH", "OMP_WAIT_POLICY")


def _number(name: str, text: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(
            f"--ray.{name.replace('_', '-')} must be a number, got {text!r}; options are those of "
            "a Ray task: num-cpus, num-gpus, memory, max-retries"
        ) from None
    return int(value) if value.is_integer() else value


def _read(study: Path) -> _RayJobs | None:
    path = _path(study)
    if not path.exists():
        return None
    return read_record(path, _RayJobs, writer="`stability run --executor ray`")


def _path(study: Path) -> Path:
    return StudyPaths(study).jobs / "ray.json"
