"""A few fixed computations whose bits tell one host, or one numeric switch, from another.

The inputs are exact multiples of 2^-23 made from integers: the same on every device, and drawn from
no generator. What a GEMM, an exp, a sum and an attention make of them depends on everything that
also decides a training's bits: instructions, library versions, threads, matmul precision. Equal
bits are no proof that two hosts train alike; other bits are proof that they may not.

Loaded in the processes of recorded trainings as well (`recorder.inside`), so on Python 3.9 and by
torch and the standard library alone. Leaves out what is concluded (`records.witness`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from typing import Any, Dict

import torch
from torch import Tensor

__all__ = ["known_answers"]

_ROWS, _INNER, _COLUMNS = 192, 320, 256
"""Of the GEMM: no multiple of every tile, and large enough for the code of large ones."""
_CHECKED = 8
"""Rows of it whose errors are measured."""
_LONG = 1 << 16
"""Elements of exp and sum: torch splits work over threads from 32,768 on."""


def known_answers(device: torch.device) -> Dict[str, Any]:
    """Return a hash of each fixed computation on `device`, and the bits that FP32 products keep.

    `fp32_product_bits` is -log2 of the largest error of an FP32 GEMM over sum |a||b|, against FP64:
    23 for FP32 on a CPU with AVX-512, 10 under BF16 autocast, whatever switch or library chose it.
    """
    with torch.no_grad():
        a, b = _fixed(_ROWS, _INNER, device), _fixed(_INNER, _COLUMNS, device)
        # not by `functional`, where another attention may have taken the place
        built_in: Any = torch._C
        attend = built_in._nn.scaled_dot_product_attention
        long, q = _fixed(1, _LONG, device)[0], _fixed(2 * 96, 32, device).view(1, 2, 96, 32)
        product, half = a @ b, q.bfloat16()
        # MKL looks its code up in the first call, in which several threads may race
        # (attention_kernels.fp_environment)
        torch.exp(long[:1])
        answers = {
            "gemm_fp32": product,
            "gemm_bf16": a.bfloat16() @ b.bfloat16(),
            "exp_fp32": torch.exp(8 * long),
            "sum_fp32": torch.stack([long.sum(), (long * long).sum()]),
            "softmax_fp32": torch.softmax(8 * a, dim=-1),
            "attention_fp32": attend(q, q.flip(2), q, is_causal=True),
            "attention_bf16": attend(half, half, half, is_causal=True),
        }
        found: Dict[str, Any] = {name: _hash(x) for name, x in answers.items()}
        return {**found, "fp32_product_bits": _bits_kept(product, a, b)}


@functools.cache
def _fixed(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return FP32 values in [-1, 1) that every device and every version of torch makes alike.

    They are not to be written to: 0.9 MB that a process keeps, since making them takes half the
    time of all the rest.
    """
    index = torch.arange(rows * columns, dtype=torch.int64, device=device)
    # the low 24 bits of a multiplicative sequence (Knuth's constant): an FP32 holds them exactly
    scrambled = (index * 2654435761 + 12345) // 256 % 2**24
    return (scrambled.float() / 2**23 - 1).view(rows, columns)


def _bits_kept(product: Tensor, a: Tensor, b: Tensor) -> float:
    left, right, found = (x.double().cpu() for x in (a[:_CHECKED], b, product[:_CHECKED]))
    terms = left[:, :, None] * right[None]
    # no product of matrices: the first in FP64 loads code for 25 ms that no training needs
    exact, size = terms.sum(1), terms.abs().sum(1)
    worst = float(((found - exact).abs() / size).max())
    return round(-math.log2(worst), 1) if worst else 53.0


def _hash(x: Tensor) -> str:
    raw = x.detach().cpu().contiguous()
    # by its address: there may be no numpy
    content = ctypes.string_at(raw.data_ptr(), raw.numel() * raw.element_size())
    return hashlib.sha256(str(x.dtype).encode() + content).hexdigest()[:16]
