"""The numeric switches of a process that a run's config sets, and that are put back after it.

Leaves out the deterministic algorithms, which the Trainer sets for each run (`assemble`), and how
switches are told (`records.numeric_switches`).
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from stability.config.schema import DEFAULT_MATMUL, TrainConfig

__all__ = ["switched"]


@contextmanager
def switched(train: TrainConfig) -> Generator[None, None, None]:
    """Multiply FP32 as `train.matmul_precision` says, whatever the process did before."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # a backend's own switch was turned: that is on record, and stays
        before = DEFAULT_MATMUL
    if before == train.matmul_precision:
        yield
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
