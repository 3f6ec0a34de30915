"""A lease on a run: who trains it, for those who can't lock its folder.

Each process that wants a run first writes a file of its own into the run's folder,
`.lease-<owner>`, and only then looks for those of others: of two that come at once, each sees the
other, so at least one gives way. Who holds the lock writes one too, `.lease-<owner>-locked`, since
one file system may have locks on one machine and none on another; whoever gets the lock knows that
such an owner has lost it. The owner's heart beats: every BEAT_S a thread sets the file's
time. A process of this machine is looked up by its number; a lease from another machine is watched,
and if its time stands still for WATCH_S it has expired and is deleted by whoever takes the run
over. No clock is compared with another, and one that jumps takes nobody's run.

An owner that stood still (a stopped process, a machine asleep) may have been taken for dead. So
before it changes a file, and if its last beat is older than TRUSTED_S, it beats again, which fails
where its lease is gone. Between that and the change itself it may be stopped once more: this gap a
file system without locks can't close.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stability.records import file_operations
from stability.records.atomic_files import naming, remove
from stability.records.paths import RunPaths
from stability.records.plain_files import read_plain
from stability.records.sealed_json import parse_json

__all__ = ["LeaseLostError", "holder", "is_leased", "lease"]

BEAT_S = 2.0
TRUSTED_S = 8.0
"""How long after its last beat an owner may write without another: less than WATCH_S."""
WATCH_S = 12.0
"""Several beats: a file server may be slow."""
FRESH_S = 60.0
"""A reader, who can't wait, takes a lease of another machine for one in use until it is so old."""
PAUSE_S = 0.1
LOCKED = "-locked"
"""Ends the name of a lease whose owner holds the lock as well: the content may be torn."""


class LeaseLostError(RuntimeError):
    """Another process has taken the run over, since this one stood still for too long."""


@contextmanager
def lease(paths: RunPaths, *, has_lock: bool) -> Iterator[None]:
    """Hold the run by a lease of this process; BlockingIOError if another one holds it.

    `has_lock` says whether it holds the lock, too. Inside, every change of a file raises
    LeaseLostError once the lease is lost.
    """
    name = f".lease-{secrets.token_hex(8)}"
    held = _Lease(paths.root / (name + LOCKED if has_lock else name))
    with held.beating():
        _take_over(paths, held.path, has_lock=has_lock)
        with file_operations.allowed_by(held.check):
            yield


def is_leased(paths: RunPaths, *, could_lock: bool) -> bool:
    """Return whether somebody seems to hold a lease on the run; never waits.

    `could_lock` says whether the lock was free, so that those who held it are gone.
    """
    return any(_seems_held(path) for path in paths.leases() if not (could_lock and _is_void(path)))


def holder(paths: RunPaths) -> tuple[str, float]:
    """Return the host whose process holds the run, and since when, in seconds of its clock.

    Empty and 0 where no lease tells.
    """
    for path in paths.leases():
        said = _read(path)
        host, since = said.get("host"), said.get("since")
        if isinstance(host, str) and isinstance(since, float) and _seems_held(path):
            return host, since
    return "", 0.0


class _Lease:
    """The lease of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_beat = _now()
        self._is_lost = False

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Keep the file and its beat as long as the block lasts."""
        content = json.dumps({**_this_process(), "since": time.time()}).encode()
        with naming(self.path):
            file_operations.fill(self.path, lambda temporary: temporary.write_bytes(content))
        ended = threading.Event()
        heart = threading.Thread(target=self._beat_until, args=(ended,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join()
            # one that stays is of a process that is gone: it has expired
            with contextlib.suppress(OSError):
                remove(self.path)

    def check(self) -> None:
        """LeaseLostError unless the run is still this process's."""
        if not self._is_lost and _now() - self._last_beat > TRUSTED_S:
            self._beat()
        if self._is_lost:
            raise LeaseLostError(
                f"{self.path.parent}: another process has taken over this run, since this one "
                f"stood still for over {WATCH_S:.0f} s; it goes on there"
            )

    def _beat_until(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S) and not self._is_lost:
            # an error leaves the last beat as old as it is: `check` meets the error itself
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        before = _now()
        try:
            file_operations.touch(self.path)
            self._last_beat = before
        except FileNotFoundError:
            self._is_lost = True


def _is_void(path: Path) -> bool:
    """Whether the owner of a lease is gone if the lock is not its own."""
    return path.name.endswith(LOCKED)


def _take_over(paths: RunPaths, own: Path, *, has_lock: bool) -> None:
    """Delete the leases that have expired; BlockingIOError if one has not."""
    others = [path for path in paths.leases() if path != own]
    for path in others:
        if not (has_lock and _is_void(path)) and not _has_expired(path):
            raise BlockingIOError(f"{path}: is the lease of a process that trains the run")
    for path in others:
        remove(path)


def _has_expired(path: Path) -> bool:
    runs = _runs_here(_read(path))
    return not runs if runs is not None else _stands_still(path)


def _stands_still(path: Path) -> bool:
    """Watch a lease; return whether its time is the same for WATCH_S, or it is gone."""
    first, end = _time_of(path), time.monotonic() + WATCH_S
    while first is not None and time.monotonic() < end:
        time.sleep(PAUSE_S)
        now = _time_of(path)
        if now is None:
            return True
        if now != first:
            return False
    return True


def _seems_held(path: Path) -> bool:
    runs, written = _runs_here(_read(path)), _time_of(path)
    if runs is not None or written is None:
        return bool(runs)
    return time.time() - written / 1e9 < FRESH_S


def _time_of(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path) -> Mapping[str, Any]:
    """Return what a lease says; nothing if it is gone or torn."""
    try:
        content = parse_json(read_plain(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _runs_here(said: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a lease runs; None if it can't be seen from here."""
    here = _this_process()
    # names of machines are not unique; a kernel's start is, and a container has its own numbers
    if not here["kernel"] or any(said.get(key) != here[key] for key in ("kernel", "numbers")):
        return None
    number, started = said.get("process"), said.get("started")
    return type(number) is int and bool(started) and _start_of(number) == started


def _this_process() -> dict[str, Any]:
    number = os.getpid()
    return {
        "host": socket.gethostname(),
        "process": number,
        "started": _start_of(number),
        "kernel": _content("/proc/sys/kernel/random/boot_id"),
        "numbers": _numbers(),
    }


def _start_of(process: int) -> str:
    """Return when a process started, in ticks since the machine did; empty if it has ended."""
    fields = _content(f"/proc/{process}/stat").rpartition(")")[2].split()
    # a dead one that nobody has asked for yet is Z; 22nd and 3rd in proc(5), after pid and name
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _numbers() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # no such process, or no Linux
        return ""


def _now() -> float:
    """Return seconds on a clock that goes on while the process, or the machine, stands still."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
