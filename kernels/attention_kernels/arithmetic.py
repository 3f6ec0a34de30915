"""Matrix products that are what their dtype says, whatever the caller has switched on.

Two ambient switches turn an FP32 `matmul` into a narrower one without a word: `torch.autocast`
(BF16 operands) and the FP32 matmul precision ("high" is TF32 on a GPU, "medium" BF16 on a CPU with
AVX-512; Lightning advises users to set it). The first acts on the backward too, when `backward()`
is called inside the context. Leaves out FP16's reduced-precision accumulation: no product here has
FP16 operands, they are widened before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ieee_arithmetic"]


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside the context FP32 products on `device` are FP32; the caller's switches come back after.

    Uses the per-backend switches: torch refuses to read the older global one, even to save it,
    once a caller has set a per-backend one.
    """
    cuda = torch.backends.cuda.matmul
    # torch adds this attribute at run time, out of pyright's sight.
    mkldnn = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = cuda.fp32_precision, mkldnn.fp32_precision
    with torch.autocast(device.type, enabled=False):
        cuda.fp32_precision = mkldnn.fp32_precision = "ieee"
        try:
            yield
        finally:
            cuda.fp32_precision, mkldnn.fp32_precision = before
