"""The lock of a run: held by one process, seen by readers, gone with the process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from stability.records import file_operations, run_lock
from stability.records.paths import RunPaths
from stability.records.run_lock import hold, is_held

HOLDER = """
import sys, time
from pathlib import Path
from stability.records.paths import RunPaths
from stability.records.run_lock import hold
with hold(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path / "arm" / "seed-0")


def test_lock_is_held_as_long_as_its_block(run):
    assert not is_held(run)
    with hold(run):
        assert is_held(run)
        assert is_held(run)
    assert not is_held(run)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_process_holds_nothing_and_a_stopped_one_does(run, how):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        assert is_held(run)
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait()
        assert is_held(run) == (how == signal.SIGSTOP)
    finally:
        process.kill()
        process.communicate()


def test_second_holder_is_refused(run, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    with hold(run), pytest.raises(BlockingIOError), hold(run):
        pass


def test_reader_that_asks_at_that_moment_keeps_nobody_from_training(run):
    with hold(run):
        pass
    with run.lock.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, [reader, fcntl.LOCK_UN])
        timer.start()
        with hold(run):
            assert is_held(run)
        timer.join()


def test_pipe_in_its_place_makes_no_reader_wait(run):
    run.root.mkdir(parents=True)
    os.mkfifo(run.lock)
    assert is_held(run) in (True, False)


def test_what_cannot_be_known_counts_as_held(run, monkeypatch):
    with hold(run):
        pass

    def no_locks(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    assert is_held(run)


def test_lock_that_a_server_refuses_for_a_moment_is_waited_for(run, monkeypatch):
    left, lock = [3], file_operations.lock

    def busy(file):
        left[0] -= 1
        if left[0] > 0:
            raise OSError(errno.ENOLCK, "No locks available")
        lock(file)

    monkeypatch.setattr(file_operations, "lock", busy)
    with hold(run):
        (lease,) = run.leases()
        assert lease.name.endswith("-locked")
        assert is_held(run)
    assert not run.leases()


def test_lock_that_the_disk_refuses_is_told_with_its_name(run, monkeypatch):
    def broken(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_operations, "lock", broken)
    with pytest.raises(OSError, match=r"Input/output error: '.*\.lock'"), hold(run):
        pass
