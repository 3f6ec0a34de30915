"""Code that runs beside a training and draws random numbers: the run's own generators stay put.

Leaves out generators that a module or an optimizer keeps (`kept_state`), and what code that runs
beside writes into (`module_call`, `optimizer_update`).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["host_random_state", "isolated"]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state and autocast as they were, and switch autocast off inside."""
    # An attention with dropout or stochastic rounding would advance the generators that the run
    # draws from. By default fork_rng saves the state of every GPU; only this one can be used here.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        before = host_random_state()
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def host_random_state() -> tuple[Any, Any]:
    """Return the states of the generators that Python and NumPy draw from where none is named."""
    return random.getstate(), np.random.get_state(legacy=True)
