"""Every kernel test runs with NaN in uninitialised memory, so that an unwritten value shows."""

from collections.abc import Iterator

import pytest

from attention_kernels.testing import nan_filled


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory() -> Iterator[None]:
    with nan_filled():
        yield
