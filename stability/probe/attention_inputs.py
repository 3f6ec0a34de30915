"""Attention inputs for the microbenchmark: drawn from a distribution, or read from a file.

They are drawn once in FP64 and rounded to the format under test, so that every implementation gets
inputs on that format's grid, and none is charged with the rounding of its inputs. Leaves out
capturing them from a trained model (`study.capture`).
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels import round_to
from attention_kernels.formats import FORMATS, format_named
from attention_kernels.rounding import INPUT_DTYPES
from attention_kernels.testing import Shape
from stability.records.snapshots import read_snapshot

__all__ = [
    "DISTRIBUTIONS",
    "AttentionInputs",
    "carrier_dtype",
    "draw_inputs",
    "read_inputs",
    "round_inputs",
]

DISTRIBUTIONS = {
    "normal": "N(0, 1)",
    "outliers": "N(0, 1) + N(0, 100) Bernoulli(0.001), the law of FlashAttention-3's table 3",
    "uniform": "U(0, 1): all of one sign, so that errors of one direction add up",
    "large": "N(0, 16): a softmax that is nearly one-hot",
}


class AttentionInputs(NamedTuple):
    """q, k, v as in `scaled_dot_product_attention`, and the gradient of out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def carrier_dtype(format: str) -> torch.dtype:
    """Return the dtype that holds `format`: its own if torch has one, else FP32 or FP64."""
    target = format_named(format)
    for dtype, name in INPUT_DTYPES.items():
        if name == format:
            return dtype
    return torch.float32 if target.fits(FORMATS["fp32"]) else torch.float64


def draw_inputs(
    distribution: str, shape: Shape, format: str, seed: int, device: str = "cpu"
) -> AttentionInputs:
    """Draw inputs on the grid of `format`; ValueError names the nearest known distribution."""
    if distribution not in DISTRIBUTIONS:
        near = difflib.get_close_matches(distribution, DISTRIBUTIONS, n=3, cutoff=0.4)
        raise ValueError(
            f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got "
            f"{distribution!r}; nearest: {', '.join(near or DISTRIBUTIONS)}"
        )
    # drawn on the CPU whatever the device: CUDA's generator gives other numbers for the same seed
    generator = torch.Generator().manual_seed(seed)
    lengths = {
        "q": shape.query_len,
        "k": shape.key_len,
        "v": shape.key_len,
        "dout": shape.query_len,
    }
    # one generator in this order: a tensor put in before another would change what that one draws
    tensors = []
    for name, length in lengths.items():
        heads = shape.heads if name in ("q", "dout") else shape.kv_heads
        value_dim = shape.value_dim or shape.head_dim
        head_dim = value_dim if name in ("v", "dout") else shape.head_dim
        size = (shape.batch, heads, length, head_dim)
        law = "normal" if name == "dout" else distribution
        tensors.append(_draw(law, size, generator).to(device))
    return round_inputs(tensors, format)


def read_inputs(path: Path, format: str, device: str = "cpu") -> AttentionInputs:
    """Read q, k, v (and dout, else N(0, 1)) from a safetensors file and round them to `format`.

    ValueError, which names the file, if it is missing or damaged, or holds no q, k or v that go
    together.
    """
    if not path.is_file():
        raise ValueError(f"qkv must be a safetensors file, got {str(path)!r}; no such file")
    tensors = read_snapshot(path)
    missing = [name for name in ("q", "k", "v") if name not in tensors]
    if missing:
        raise ValueError(
            f"{path}: must hold q, k and v, got "
            f"{', '.join(sorted(tensors)) or 'nothing'}; missing: {', '.join(missing)}"
        )
    q, v = tensors["q"], tensors["v"]
    _check_shapes(path, tensors)
    # a fixed seed: one file has one set of figures
    size, generator = (*q.shape[:3], v.shape[3]), torch.Generator().manual_seed(0)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    found = [q, tensors["k"], tensors["v"], tensors.get("dout", noise)]
    return round_inputs([x.double().to(device) for x in found], format)


def _check_shapes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless q, k, v and dout are numbers, (batch, heads, length, head_dim) each.

    v and dout may have another head_dim than q and k.
    """
    q = tensors["q"].shape
    value_dim = tuple(tensors["v"].shape[3:])
    expected = {
        "q": tuple(q),
        "k": (*q[:1], *q[3:]),
        "v": (*q[:1], *value_dim),
        "dout": (*q[:3], *value_dim),
    }
    for name, shape in expected.items():
        if name not in tensors:
            continue
        found = tensors[name]
        whole = name in ("q", "dout")
        of_heads = tuple(found.shape) if whole else (*found.shape[:1], *found.shape[3:])
        if found.ndim != 4 or not found.is_floating_point() or of_heads != shape:
            raise ValueError(
                f"{path}: must hold q, k, v (batch, heads, length, head_dim) and dout "
                f"like out, numbers with a fraction, got {name} of {tuple(found.shape)}, "
                f"{str(found.dtype).removeprefix('torch.')}, beside q of {tuple(q)}"
            )


def _draw(distribution: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if distribution == "uniform":
        return torch.rand(size, generator=generator, dtype=torch.float64)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    if distribution == "outliers":
        rare = torch.rand(size, generator=generator, dtype=torch.float64) < 0.001
        # N(0, 100) names the variance, so the factor is 10, and 4 for N(0, 16) below
        x += 10 * torch.randn(size, generator=generator, dtype=torch.float64) * rare
    return 4 * x if distribution == "large" else x


def round_inputs(tensors: Iterable[Tensor], format: str) -> AttentionInputs:
    """Return q, k, v and dout, FP64, rounded to `format` in the dtype that carries it."""
    carrier = carrier_dtype(format)
    return AttentionInputs(*(round_to(x, format).to(carrier) for x in tensors))
