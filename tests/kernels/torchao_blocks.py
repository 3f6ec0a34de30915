"""What torchao makes of one tensor in blocks, for the tests of `block_scaling`.

`data/torchao_blocks.npz` holds what version 0.18.0 made of it, so that a test without torchao can
be held against it; `python -m tests.kernels.torchao_blocks`, with torchao installed, writes it.
"""

from pathlib import Path

import numpy as np
import torch

__all__ = ["RECIPES", "STORED", "computed", "drawn"]

STORED = Path(__file__).parent / "data" / "torchao_blocks.npz"
MX = {"mxfp8": "e4m3", "mxfp8-e5m2": "e5m2", "mxfp6-e2m3": "e2m3", "mxfp6-e3m2": "e3m2"}
MX |= {"mxfp4": "e2m1"}
RULES = ("floor", "ceil", "rceil", "even")
RECIPES = [name if rule == "floor" else f"{name}-{rule}" for name in MX for rule in RULES]
RECIPES += ["nvfp4", "fp8_per_row", "fp8_per_tensor"]


def drawn(rows=24, seed=0):
    """Return FP32 `(rows, 128)`: blocks far apart in size, every third row of 4 bits, so of ties.

    The last rows stay within 2**6 of one another, as the scales of NVFP4 need.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 128, generator=generator)
    sizes = torch.exp2(torch.randint(-30, 30, (rows, 4), generator=generator).float())
    sizes[rows // 2 :] = 1.0
    x = x * sizes.repeat_interleave(32, dim=1)
    # 4 significant bits: cut by Veltkamp's splitting
    cut = x[::3] * (2**20 + 1)
    x[::3] = cut - (cut - x[::3])
    return x


def computed(x):
    """Return arrays by name: of each recipe its elements, as values, and its scales."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    found = {}
    for name, format in MX.items():
        for rule in RULES:
            scales, data = to_mx(x, _dtype(format), 32, ScaleCalculationMode(rule))
            label = name if rule == "floor" else f"{name}-{rule}"
            found[label] = _values(data, format).reshape(x.shape), get_fp_scale(scales)
    near = x[len(x) // 2 :].contiguous()
    tensor_scale = per_tensor_amax_to_scale(near.abs().amax())
    scales, data = nvfp4_quantize(near, 16, tensor_scale)
    found["nvfp4"] = (
        _values(data, "e2m1").reshape(near.shape),
        scales.float().reshape(len(near), -1),
    )
    for name, block in (("fp8_per_row", (1, 128)), ("fp8_per_tensor", tuple(x.shape))):
        scales = _choose_scale_float8(x, list(block))
        found[name] = _quantize_affine_float8(x, scales).float(), scales
    found = {k: tuple(t.numpy().astype(np.float32) for t in pair) for k, pair in found.items()}
    arrays = {f"{k}/elements": pair[0] for k, pair in found.items()}
    return arrays | {f"{k}/scales": pair[1] for k, pair in found.items()}


def _dtype(format):
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    dtypes |= {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2", "e2m1": torch.float4_e2m1fn_x2}
    return dtypes[format]


def _values(data, format):
    from torchao.prototype.mx_formats import kernels

    if format == "e2m1":
        return kernels.f4_unpacked_to_f32(kernels.unpack_uint4(data))
    if format in ("e2m3", "e3m2"):
        return getattr(kernels, f"f6_{format}_unpacked_to_f32")(data)
    return data.float()


if __name__ == "__main__":
    x = drawn()
    np.savez_compressed(STORED, x=x.numpy(), **computed(x))
