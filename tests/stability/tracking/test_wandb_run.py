"""The id that W&B knows a run by comes from a file that anybody may have written."""

import re
from pathlib import Path

import pytest

from stability.tracking.wandb_run import start_run
from tests.stability.fuzz.offline_wandb import OfflineRun


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
