"""Every kernel test runs with NaN in uninitialised memory, so that an unwritten value shows.

Each draws from the same seed, so that a draw that fails can be drawn again.
"""

from collections.abc import Iterator

import pytest
import torch

from attention_kernels.testing import nan_filled

try:
    from hypothesis import settings
except ImportError:  # a machine with a GPU may have torch, Triton and pytest alone
    pass
else:
    # as in tests/conftest.py, which is not read where the kernels are tested alone
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

SEED = 1511
"""Of torch's own generator as each test begins; a test that wants another draw seeds its own."""


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory() -> Iterator[None]:
    with nan_filled():
        yield


@pytest.fixture(autouse=True)
def _draws_of_one_seed() -> None:
    torch.manual_seed(SEED)
