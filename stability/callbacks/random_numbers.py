"""Begins each update with random numbers that its seed and its step alone decide.

An attention with dropout, or one that rounds stochastically, draws from the global generators of
torch, NumPy or Python. Seeded once a run, they would stand elsewhere after a resume, after one more
call of the candidate's, or beside an instrument that draws: a run that goes on would not end in the
same bits, and the two runs of a pair would differ in what they drew. Seeded at each update, both
draw the same numbers for the same batch, and no state has to be kept.
"""

import hashlib
import random

import numpy as np
import torch
from lightning.pytorch import Trainer

from stability.callbacks.each_update import UpdateCallback

__all__ = ["RandomNumbers"]


class RandomNumbers(UpdateCallback):
    """Seed every global generator at the begin of an update, from the run's `seed` and the step.

    A `rank` that is not the first draws others: its samples are others.
    """

    def __init__(self, seed: int, rank: int = 0) -> None:
        self._seed = f"{seed}" if rank == 0 else f"{seed} rank {rank}"

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Seed them; torch's seed is that of its generators on every device."""
        digest = hashlib.sha256(f"{self._seed} {step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        np.random.seed(int.from_bytes(digest[8:12], "little"))
        random.seed(digest[12:20])
