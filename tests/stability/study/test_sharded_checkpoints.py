"""A checkpoint that ranks write beside training is listed when it is whole, and not before."""

from concurrent.futures import Future

import pytest
import torch

from stability.records.dcp_files import DcpWrite, write_dcp
from stability.records.run_files import RunFiles
from stability.study.checkpoints import CheckpointFiles
from stability.study.sharded_checkpoints import has_parts


@pytest.fixture
def checkpoints(tmp_path):
    files = RunFiles.unnamed(tmp_path)
    found = CheckpointFiles(files, 1)
    found._lists = True
    return found


def folder_of(checkpoints, step):
    return checkpoints._files.paths.sharded_checkpoint(step)


def test_one_that_is_still_written_is_not_listed_and_nobody_waits(checkpoints):
    checkpoints._write = DcpWrite(folder_of(checkpoints, 2), Future())
    checkpoints.settle()
    assert checkpoints._files.manifest.files == {}


def test_one_that_could_not_be_written_is_told_where_all_ranks_are(checkpoints):
    """In the middle of an update the others would wait for the rank that raises."""
    failed = Future()
    failed.set_exception(OSError("no room"))
    checkpoints._write = DcpWrite(folder_of(checkpoints, 2), failed)
    checkpoints.settle()
    with pytest.raises(OSError, match="no room"):
        checkpoints.settle(wait=True)
    assert checkpoints._files.manifest.files == {}


def test_a_whole_one_is_listed_once_and_the_one_before_it_dropped(checkpoints):
    for step in (2, 4):
        state = {"weight": torch.full((3,), float(step))}
        checkpoints._write = write_dcp(folder_of(checkpoints, step), state)
        checkpoints.settle(wait=True)
        checkpoints.settle()
    assert list(checkpoints._files.manifest.files) == ["checkpoints/step-00000004.dcp"]
    assert not folder_of(checkpoints, 2).exists()


def test_a_checkpoint_that_each_rank_holds_whole_has_no_parts():
    assert not has_parts({"state_dict": {"a": torch.ones(2)}, "loops": [{"n": 1}, (2, "x")]})
