"""A W&B run is started by an id that anybody may have written, by a service that may end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

from stability.tracking.wandb_run import start_run, told_in_a_line
from tests.stability.fuzz.offline_wandb import OfflineRun

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "said", [b"", b"*", b"kept/../../../..", b"..", b"a\nb", b"\xff", b"\x1b[2J", b"x" * 65]
)
def test_an_id_that_is_none_deletes_no_folder_and_another_is_drawn(tmp_path, monkeypatch, said):
    """Such an id would stand in the pattern of folders that an offline run deletes."""
    begun = []
    monkeypatch.setattr("wandb.init", lambda **given: begun.append(given["id"]) or OfflineRun())
    directory = tmp_path / "study" / "arm" / "wandb"
    for kept in ("offline-run-1-kept", "offline-run-2-x"):
        (directory / kept).mkdir(parents=True)
    (directory / "id.txt").write_bytes(said)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        start_run("offline", directory, tags=[])
    assert sorted(tmp_path.rglob("*")) == before
    assert re.fullmatch("[0-9a-f]{16}", begun[0])
    assert begun == [begun[0]] * 2


def test_an_id_that_is_one_is_kept(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("wandb.init", lambda **given: begun.append(given["id"]) or OfflineRun())
    directory = tmp_path / "wandb"
    directory.mkdir()
    (directory / "id.txt").write_text("0123456789abcdef\n")
    start_run("offline", directory, tags=[])
    assert begun == ["0123456789abcdef"]


def test_a_relative_folder_is_the_one_of_the_current_directory(tmp_path, monkeypatch):
    """W&B's service keeps the directory it was started in, for all runs of the process."""
    for current in (tmp_path / "first", tmp_path / "second"):
        current.mkdir()
        monkeypatch.chdir(current)
        run, _ = start_run("offline", Path("run/wandb"), tags=[])
        run.log({"loss": 1.0})
        run.finish()
        assert len(list(current.glob("run/wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (wandb.Error("the server\nis on fire"), "the server is on fire"),
        (ConnectionResetError("Connection lost"), "its service has ended"),
        (MailboxClosedError(), "its service has ended"),
        (HandleAbandonedError(), "its service has ended"),
        (WandbServiceConnectionError("Failed to connect"), "its service has ended"),
    ],
)
def test_what_w_and_b_raises_is_one_error_of_one_line(error, said):
    with pytest.raises(ConnectionError, match=f"^{said}$"), told_in_a_line():
        raise error


def test_what_is_not_w_and_bs_is_raised_as_it_is():
    with pytest.raises(KeyError, match="mine"), told_in_a_line():
        raise KeyError("mine")


def test_a_service_that_has_ended_is_replaced_by_one_of_the_process(tmp_path, monkeypatch):
    """The process that started the study has named it to all runs."""
    set_up = []

    def setup(**_: object) -> None:
        if "WANDB_SERVICE" in os.environ:
            raise WandbServiceConnectionError("Failed to connect to service on socket gone")
        set_up.append(True)

    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-gone")
    monkeypatch.setattr("wandb.setup", setup)
    monkeypatch.setattr("wandb.init", lambda **_: OfflineRun())
    start_run("offline", tmp_path / "wandb", tags=[])
    assert set_up == [True]


def test_a_process_that_can_start_no_service_is_told_in_a_line(tmp_path, monkeypatch):
    def setup(**_: object) -> None:
        raise WandbServiceConnectionError("Failed to connect to service on socket gone")

    monkeypatch.setattr("wandb.setup", setup)
    with pytest.raises(ConnectionError, match=r"^its service has ended$"):
        start_run("offline", tmp_path / "wandb", tags=[])


def test_w_and_bs_reader_is_waited_for_no_longer_than_its_server(tmp_path, monkeypatch):
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nexec sleep 2\n")
    stuck.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(stuck))
    directory = tmp_path / "wandb"
    folder = directory / "offline-run-1-kept"
    folder.mkdir(parents=True)
    (folder / "run-kept.wandb.synced").touch()
    (directory / "id.txt").write_text("kept\n")
    with pytest.raises(TimeoutError, match=r"run-kept\.wandb: W&B has not read it in 0\.1 s"):
        start_run("offline", directory, tags=[], patience_s=0.1)


KILLED_SERVICE = """
import os, signal, subprocess, sys
from pathlib import Path
from stability.records.paths import RunPaths
from stability.tracking.history import MirroredLog, open_wandb_run
folder = Path(sys.argv[1])
shown = open_wandb_run("offline", study="s", arm="a", seed=0, axis="none", changes=[], config={},
                       paths=RunPaths(folder))
log = MirroredLog(folder / "metrics.jsonl", shown)
log.append(0, {"train/loss": 1.0})
listed = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())],
                        capture_output=True, text=True).stdout
(service,) = [line.split()[0] for line in listed.splitlines() if "wandb" in line]
os.kill(int(service), signal.SIGKILL)
for step in range(1, 200):
    log.append(step, {"train/loss": 1.0})
log.close()
print(log.end_mirror(failed=False))
"""


def _run_alone(code: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Run a script; the service of this process, which other tests need, is not to be shared."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env=own | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_log_goes_on_when_the_system_has_killed_w_and_bs_service(tmp_path):
    assert _run_alone(KILLED_SERVICE, tmp_path) == (0, "its service has ended\n")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200


ANOTHER_SERVICE = """
import sys
from pathlib import Path
from stability.tracking.environment import check_wandb
from stability.tracking.wandb_run import start_run
check_wandb("offline")
run, _ = start_run("offline", Path(sys.argv[1]) / "wandb", tags=[])
run.log({"loss": 1.0})
run.finish()
"""


@pytest.mark.slow
def test_a_process_that_is_named_a_service_that_has_ended_has_a_run_all_the_same(tmp_path):
    ended = f"3-1-unix-{tmp_path}/gone"
    assert _run_alone(ANOTHER_SERVICE, tmp_path, WANDB_SERVICE=ended) == (0, "")
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
