"""What torchao makes of one tensor in blocks, for the tests of `block_scaling`.

`data/torchao_blocks.npz` holds what version 0.18.0 made of it, so that a test without torchao can
be held against it. torchao is no requirement of the tests: it takes seconds to import, and prints
what it could not load. In an environment of your own, `pip install --no-deps torchao==0.18.0`; then
`python -m tests.kernels.torchao_blocks` writes the stored results, and
`pytest tests/kernels/test_block_scaling.py -k torchao` compares those of today, and a million
values a recipe.

torchao divides amax by the largest element, and values by that scale, in `PerRow`, `PerTensor` and
`PerBlock`: these are the functions called here. Its FP8 training (`float8`,
`blockwise_fp8_training`) is another scale mode, which no recipe here has: it multiplies by
448 / amax, rounded to FP32, and gives the reciprocal of that as the scale. Of 128,000 values drawn
here 30 % of the scales differ by it, by 1.2e-7 at most, and one element.
"""

from pathlib import Path

import numpy as np
import torch

__all__ = ["RECIPES", "STORED", "computed", "drawn", "taken"]

STORED = Path(__file__).parent / "data" / "torchao_blocks.npz"
MX = {"mxfp8": "e4m3", "mxfp8-e5m2": "e5m2", "mxfp6-e2m3": "e2m3", "mxfp6-e3m2": "e3m2"}
MX |= {"mxfp4": "e2m1"}
RULES = ("floor", "ceil", "rceil", "even")
FP8 = {
    "fp8_per_row": ("e4m3", (1, -1)),
    "fp8_per_row-e5m2": ("e5m2", (1, -1)),
    "fp8_per_tensor": ("e4m3", (-1, -1)),
    "fp8_per_tensor-e5m2": ("e5m2", (-1, -1)),
    "deepseek_1x128": ("e4m3", (1, 128)),
    "deepseek_128x128": ("e4m3", (128, 128)),
}
"""Of each recipe with FP32 scales: its elements, and its block, -1 being the whole axis."""
RECIPES = [name if rule == "floor" else f"{name}-{rule}" for name in MX for rule in RULES]
RECIPES += ["nvfp4", *FP8]


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


def taken(x, recipe):
    """Return what of the drawn `x`, or what made of it, a recipe quantizes."""
    near = x[len(x) // 2 :]
    if recipe == "nvfp4":
        return near.contiguous()
    if recipe == "deepseek_1x128":
        return near.reshape(-1, 256)  # two blocks a row
    if recipe == "deepseek_128x128":
        # rows for two blocks or more; copies are turned, and of another size, so that amax differs
        copies = -(-256 // len(near))
        rows = [near.roll(i, dims=1) * (1 + i / 8) for i in range(copies)]
        return torch.cat(rows)[: len(near) * copies // 128 * 128]
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
    near = taken(x, "nvfp4")
    tensor_scale = per_tensor_amax_to_scale(near.abs().amax())
    scales, data = nvfp4_quantize(near, 16, tensor_scale)
    found["nvfp4"] = (
        _values(data, "e2m1").reshape(near.shape),
        scales.float().reshape(len(near), -1),
    )
    for name, (format, block) in FP8.items():
        values = taken(x, name)
        pairs = zip(block, values.shape, strict=True)
        sizes = [length if size < 0 else size for size, length in pairs]
        scales = _choose_scale_float8(values, sizes, _dtype(format))
        found[name] = _quantize_affine_float8(values, scales, _dtype(format)).float(), scales
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
