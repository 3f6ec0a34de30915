"""Rotates values by random signs times Hadamard matrices, so that an outlier spreads over many.

What FlashAttention-3 calls incoherent processing (arXiv 2407.08608, section 3.3), and the NVFP4
recipe a random Hadamard transform (arXiv 2509.25149). The matrix is orthogonal: two operands that
are rotated by the same one have the same product.
"""

import functools
import math

import torch
from torch import Tensor

from attention_kernels.points import SIGNS_STREAM
from attention_kernels.random_bits import bits_at

__all__ = ["rotation"]


@functools.lru_cache(maxsize=16)
def rotation(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthogonal `(size, size)` matrix: random signs times Hadamard matrices.

    A size that is no power of two is cut into powers of two, each rotated in itself.
    """
    # In FP64 until the end: the matrix is then orthogonal up to one rounding to the work dtype.
    signs = 1 - 2 * (bits_at(seed, SIGNS_STREAM, torch.arange(size)) >> 31)
    blocks, left = [], size
    while left:
        block = 1 << (left.bit_length() - 1)
        # rows of 1 and -1 have norm sqrt(block)
        blocks.append(_hadamard(block) / math.sqrt(block))
        left -= block
    matrix = signs.double()[:, None] * torch.block_diag(*blocks)
    return matrix.to(device, dtype)


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix of a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
