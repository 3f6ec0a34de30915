"""Starts processes that no run has touched, and calls single functions in them.

They are forked from a server process that has imported torch, Lightning and this package, but no
module of the user's, and has computed nothing. A bare start would cost seconds, a fork costs
hundredths. What a user's module does to its process, such as another number of threads or another
environment variable, ends with it, so nothing of the user's is imported in the process of a
command: the server, and each later run, would inherit it.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

import torch

from stability.callbacks.study_observer import StudyObserver
from stability.config.schema import ArmConfig
from stability.study.assemble import imports_user_modules, quieten_lightning

__all__ = ["Relay", "call_alone", "call_for", "how_it_ended", "received", "start_process"]

T = TypeVar("T")

_READY = "stability.study.preload"
"""What the server imports before it forks; by name, since this process must not import it."""
_PR_SET_PDEATHSIG = 1
"""Of `<sys/prctl.h>`."""


def start_process(target: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
    """Call `target(connection, *args)` in a fresh process; return it and our end of the connection.

    It computes with as many torch threads as this process does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_READY])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_begin, args=(theirs, torch.get_num_threads(), target, args))
    with _waiting_threads_sleep():
        process.start()
    theirs.close()
    return process, ours


def call_alone(
    function: Callable[..., Any], *args: Any, observer: StudyObserver | None = None
) -> Any:
    """Return `function(*args)`, or raise what it raises, as a fresh process computes it.

    With an `observer` the function is given one, as its last argument, that repeats each call to
    it. RuntimeError if the process ends without an answer.
    """
    process, connection = start_process(_answer, function, args, observer is not None)
    try:
        while (message := received(process, connection)) is not None:
            what, *values = message
            if what == "returned":
                return values[0]
            if what == "raised":
                raise values[0]
            getattr(observer, what)(*values)
        raise RuntimeError(
            f"{function.__name__}: its process gave no answer: {how_it_ended(process)}"
        )
    except KeyboardInterrupt:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        raise
    finally:
        connection.close()
        process.join()


def call_for(config: ArmConfig, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called in a fresh process if to assemble `config` it imports users'
    modules; errors as `call_alone`.
    """
    return call_alone(function, *args) if imports_user_modules(config) else function(*args)


def received(process: ForkServerProcess, connection: Connection) -> Any:
    """Wait for the next message of a process; None if it has ended and there will be none.

    Its end of the connection may outlive it, in a process that the user's module has started.
    """
    wait([connection, process.sentinel])
    try:
        return connection.recv() if connection.poll() else None
    except EOFError:
        return None


def how_it_ended(process: ForkServerProcess) -> str:
    """Return how a process ended that has not said so itself."""
    process.join()
    code = process.exitcode or 0
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class Relay:
    """The observer inside a child process: sends each call to the parent, which repeats it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Send it."""
        self._send("run_started", index, total, arm, seed, steps)

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        """Send it."""
        self._send("run_advanced", arm, seed, step, loss)

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Send it."""
        self._send("run_noted", arm, seed, text)

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """Send it."""
        self._send("wandb_failed", arm, seed, text)

    def study_noted(self, text: str) -> None:
        """Send it."""
        self._send("study_noted", text)

    def assays_planned(self, arms: Sequence[str]) -> None:
        """Send it."""
        self._send("assays_planned", arms)

    def assay_advanced(self, arm: str, done: int, most: int, what: str) -> None:
        """Send it."""
        self._send("assay_advanced", arm, done, most, what)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Send it."""
        self._send("run_ended", arm, seed, state, message)

    def disk_full(self, message: str) -> None:
        """Send it."""
        self._send("disk_full", message)

    def _send(self, *message: object) -> None:
        try:
            self._connection.send(message)
        except BrokenPipeError:
            # The parent is gone. An interrupt ends the training, and the run can be resumed.
            raise KeyboardInterrupt from None


def _answer(
    connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], is_observed: bool
) -> None:
    try:
        answer = ("returned", function(*args, *([Relay(connection)] if is_observed else [])))
    except KeyboardInterrupt:
        return
    except (Exception, SystemExit) as error:
        answer = ("raised", _portable(error))
    with suppress(BrokenPipeError):
        connection.send(answer)


def _portable(error: BaseException) -> BaseException:
    """Return an error that the parent can raise: of its type, where that can be pickled."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:
        pass
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(f"{type(error).__name__}: {error}")


def _begin(
    connection: Connection, threads: int, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """Make the process ready; its main function."""
    _die_with_parent()
    # a terminal sends Ctrl-C to its whole process group: only the parent gets it and sends it on,
    # so that a child is not interrupted twice
    os.setpgrp()
    torch.set_num_threads(threads)
    quieten_lightning()
    target(connection, *args)
    others = [x for x in threading.enumerate() if x is not threading.current_thread()]
    if not all(thread.daemon for thread in others):
        # Python would wait for a thread of the user's module, perhaps for ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the server that it was forked from ends.

    The server ends with the process that started it, however that ended. Without this, a run whose
    command was killed would keep its lock until its next step. Elsewhere that is what happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _waiting_threads_sleep() -> Iterator[None]:
    """Inside the context, start children whose idle OpenMP threads sleep instead of spin.

    Two children with spinning threads slow each other down 30-fold. A child reads the variable when
    it starts, so it need not stay set here. It decides how a thread waits and not what it computes,
    so no bit depends on it. A policy that the user has set is left as it is.
    """
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = before or "PASSIVE"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]
