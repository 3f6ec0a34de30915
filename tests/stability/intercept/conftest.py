"""What tests that compile need."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def one_thread_and_no_compiled_graphs():
    """Inductor adds the rows of an embedding's gradient atomically where there are more threads.

    Then two runs that nobody observes end in other bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    torch.set_num_threads(threads)
