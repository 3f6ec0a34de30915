"""The floating-point environment: what makes an FP32 operation something else, and its guards.

Two ambient switches turn an FP32 `matmul` into a narrower one without a word: `torch.autocast`
(BF16 operands), and the FP32 matmul precision ("high" is TF32 on a GPU, "medium" BF16 on a CPU with
AVX-512; Lightning advises users to set it). Autocast acts on the backward too, when `backward()` is
called inside the context. An attention whose roundings are named must not follow them, so the FP32
products of this package run inside `ieee_arithmetic`.

The first `exp` of a process can be wrong by thousands of ULPs. On a CPU torch hands large tensors
to MKL from several threads, and MKL looks its code up in the first call; another thread may
meanwhile run a version of low accuracy (pytorch issue 188792; 4 of 25 processes with 2 threads,
torch 2.13). One value from one thread, before, settles it: `settle_vector_math`.

Leaves out FP16's reduced-precision accumulation: no product here has FP16 operands, they are
widened before.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["ieee_arithmetic", "settle_vector_math"]

VECTOR_MATH = (
    *("acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "floor"),
    *("log", "log10", "log1p", "log2", "round", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions of torch that may go through MKL's vector library, each looked up on its own."""


@functools.cache
def settle_vector_math() -> None:
    """Call each function of `VECTOR_MATH` once on one value, so that no later call can be a race.

    To be called before a process computes anything that must repeat to the bit; then it is free.
    A user's own attention needs it as well: its first look was once 100 times less exact than the
    others, and the attention accused.
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_MATH:
            getattr(torch, name)(half)


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside the context FP32 products on `device` are FP32; the caller's switches come back after.

    Uses the per-backend switches: torch refuses to read the older global one, even to save it,
    once a caller has set a per-backend one.
    """
    settle_vector_math()
    cuda = torch.backends.cuda.matmul
    # torch adds this attribute at run time, out of pyright's sight.
    mkldnn = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = cuda.fp32_precision, mkldnn.fp32_precision
    # entering autocast's own context takes a while, and mostly there is nothing to switch off
    on = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if on else nullcontext():
        cuda.fp32_precision = mkldnn.fp32_precision = "ieee"
        try:
            yield
        finally:
            cuda.fp32_precision, mkldnn.fp32_precision = before
