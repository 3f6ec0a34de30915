"""Where a file system has no locks, a lease keeps a run to one process, and ends with it."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stability.records import file_operations, run_lease, run_lock
from stability.records.atomic_files import write_text
from stability.records.metric_log import MetricLog
from stability.records.paths import RunPaths, strange_files
from stability.records.run_lease import LeaseLostError
from stability.records.run_lock import hold, is_held

ROOT = Path(__file__).parents[3]
LOCKING = """
import sys, time
from pathlib import Path
from stability.records.paths import RunPaths
from stability.records.run_lock import hold

with hold(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""
HOLDER = """
import errno, fcntl, sys, time
from pathlib import Path
from stability.records.paths import RunPaths
from stability.records.run_lock import hold

def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = flock
with hold(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run on a file system without locks, where nobody has much time."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    monkeypatch.setattr(run_lease, "PAUSE_S", 0.01)
    monkeypatch.setattr(run_lease, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lease, "TRUSTED_S", 0.2)
    monkeypatch.setattr(run_lease, "WATCH_S", 0.4)
    return RunPaths(tmp_path / "arm" / "seed-0")


@pytest.fixture
def other(run):
    """Another process that holds the run."""
    yield from _process(run, HOLDER)


@pytest.fixture
def locking(run):
    """Another process, which holds the run by its lock."""
    yield from _process(run, LOCKING)


def _process(run, program):
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run.root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def _as_from_another_machine(run, **said):
    """Let the one lease of the run look as if it were not of this machine."""
    (path,) = run.leases()
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content | {"kernel": "another", "host": "another"} | said))
    return path


@pytest.mark.parametrize("code", run_lock.NO_LOCKS)
def test_run_is_held_as_long_as_its_block_whatever_the_system_calls_it(run, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    assert not is_held(run)
    with hold(run):
        assert is_held(run)
        (path,) = run.leases()
        said = json.loads(path.read_bytes())
        assert said["process"] == os.getpid()
        assert said["host"]
        assert strange_files(run) == []
    assert run.leases() == []
    assert not is_held(run)


def test_second_holder_of_the_same_process_is_refused(run):
    with hold(run), pytest.raises(BlockingIOError, match=r"\.lease-"), hold(run):
        pass


@pytest.mark.parametrize("how", [None, signal.SIGSTOP])
def test_another_process_that_lives_or_is_stopped_keeps_the_run(run, other, how):
    if how:
        other.send_signal(how)
    assert is_held(run)
    before = run.leases()
    with pytest.raises(BlockingIOError), hold(run):
        pass
    assert run.leases() == before


def test_dead_owner_is_followed_at_once_and_its_lease_is_cleared(run, other):
    other.kill()  # not waited for: a zombie holds nothing
    (left,) = run.leases()
    deadline = time.monotonic() + 10
    while is_held(run):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with hold(run):
        assert left not in run.leases()
        assert len(run.leases()) == 1


def test_number_of_a_process_that_another_one_has_now_is_no_owner(run):
    with hold(run):
        (path,) = run.leases()
        said = json.loads(path.read_bytes())
    path.write_text(json.dumps(said | {"started": str(int(said["started"]) - 1)}))
    assert not is_held(run)
    with hold(run):
        assert not path.exists()


def test_lease_of_another_machine_that_beats_is_respected(run):
    with hold(run):
        path = _as_from_another_machine(run)
        assert is_held(run)
        with pytest.raises(BlockingIOError), hold(run):
            pass
        assert run.leases() == [path]


@pytest.mark.parametrize("jump", [-3600, 0, 3600], ids=["behind", "equal", "ahead"])
def test_lease_of_another_machine_that_stands_still_has_expired_whatever_the_clocks(run, jump):
    with hold(run):
        path = _as_from_another_machine(run)
        content = path.read_bytes()
    path.write_bytes(content)
    now = time.time()
    os.utime(path, (now + jump, now + jump))
    assert is_held(run) == (jump >= 0)  # a reader has no time to watch
    with hold(run):
        assert not path.exists()


def test_clock_that_jumps_under_a_beating_lease_takes_nobodys_run(run):
    with hold(run):
        path = _as_from_another_machine(run)
        for jump in (-86400, 86400):
            os.utime(path, (time.time() + jump,) * 2)
            with pytest.raises(BlockingIOError), hold(run):
                pass
        assert run.leases() == [path]


def test_torn_lease_after_a_power_cut_expires(run):
    run.root.mkdir(parents=True)
    (run.root / ".lease-0123456789abcdef").write_bytes(b"")
    with hold(run):
        assert len(run.leases()) == 1
    assert run.leases() == []


def test_owner_that_stood_still_changes_no_file_once_its_run_is_taken_over(run, monkeypatch):
    log = MetricLog(run.metrics)
    with hold(run):
        log.append(1, {"x": 1.0})
        monkeypatch.setattr(run_lease, "BEAT_S", 60.0)
        (path,) = run.leases()
        path.unlink()  # as whoever takes it over
        time.sleep(run_lease.TRUSTED_S + 0.05)
        for change in (
            lambda: log.append(2, {"x": 2.0}),
            lambda: write_text(run.manifest, "{}"),
            lambda: file_operations.unlink(run.metrics),
            lambda: log.truncate_to(0),
        ):
            with pytest.raises(LeaseLostError, match="another process has taken over this run"):
                change()
        log.close()
    assert run.metrics.read_bytes().count(b"\n") == 1
    assert not run.manifest.exists()
    log.append(2, {"x": 2.0})  # outside of the block nobody asks
    log.close()


def test_of_many_that_come_at_once_no_two_hold_the_run(run, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 5.0)
    inside, most, done = [0], [0], []

    def train():
        with hold(run):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1
        done.append(True)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(done) == 4


def test_lock_beside_a_lease_is_refused(run, other, monkeypatch):
    monkeypatch.undo()  # this machine has locks, the other process had none
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    assert is_held(run)
    with pytest.raises(BlockingIOError), hold(run):
        pass


def test_who_has_no_locks_sees_a_process_that_has_the_lock(run, locking):
    assert is_held(run)
    with pytest.raises(BlockingIOError, match="-locked: is the lease"), hold(run):
        pass
    locking.kill()
    locking.wait()
    assert not is_held(run)
    with hold(run):
        assert not [path for path in run.leases() if path.name.endswith("-locked")]


@pytest.mark.parametrize("content", [None, b"", b"{"], ids=["whole", "empty", "torn"])
def test_lease_that_a_killed_process_with_the_lock_has_left_keeps_nobody_who_has_it(
    run, locking, monkeypatch, content
):
    locking.kill()
    locking.wait()
    path = _as_from_another_machine(run)  # that no process is to be looked up, or watched
    if content is not None:
        path.write_bytes(content)
    monkeypatch.undo()  # this machine has locks
    monkeypatch.setattr(run_lease, "_stands_still", lambda _: pytest.fail("it is waited for"))
    assert not is_held(run)
    with hold(run):
        assert path not in run.leases()


def test_process_with_the_lock_changes_no_file_once_another_without_has_taken_over(
    run, monkeypatch
):
    monkeypatch.undo()
    monkeypatch.setattr(run_lease, "BEAT_S", 60.0)
    monkeypatch.setattr(run_lease, "TRUSTED_S", 0.1)
    with hold(run):
        (path,) = run.leases()
        path.unlink()  # as whoever watched it for long enough, and saw no beat
        time.sleep(0.15)
        with pytest.raises(LeaseLostError, match="another process has taken over this run"):
            write_text(run.manifest, "{}")
