"""Attentions that are wrong, each by one mistake that a kernel's author really makes.

Each is the flash attention written by hand with one step written wrongly. `noun` is what its author
would look for in the sentence that tells of it: a pattern, of which one alternative must occur,
whatever the case. Beside the factors, masks and tails stand mistakes that show rarely: in one head,
in one batch element, in one row of 64, in every third call, in a call that races.
"""

from functools import partial

import torch

from attention_kernels import PROFILES, flash_attention
from tests.zoo import wrong_places, wrong_sums  # noqa: F401 -- each puts its kernels on the table
from tests.zoo.right import ALL
from tests.zoo.table import TABLE, Wrong

__all__ = ["WRONG", "Wrong"]

WRONG: tuple[Wrong, ...] = (
    *TABLE,
    Wrong(
        "flash:fa4 in FP32",
        partial(flash_attention, numerics=PROFILES["fa4"]),
        "err|exp|out",
        (torch.float32,),
    ),
    Wrong(
        "flash:fa3_fp8",
        partial(flash_attention, numerics=PROFILES["fa3_fp8"]),
        "err|out|P",
        ALL,
    ),
)
