"""Folders that two ranks have written once, for all tests of this room."""

from pathlib import Path

import pytest
from torch import multiprocessing

from stability.records.dcp_files import write_dcp
from tests.stability.records import dcp_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory) -> Path:
    """Return the folder of what `dcp_ranks.rank` has written on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    write_dcp(folder / "ours_alone", dcp_ranks.plain_state()).wait()
    multiprocessing.spawn(dcp_ranks.rank, (str(folder),), nprocs=2)
    return folder
