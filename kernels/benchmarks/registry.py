"""What is timed, by name: shapes, dials of the numerics, and masks. `measure` says how."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels.points import FIELDS
from attention_kernels.profiles import PROFILES
from attention_kernels.testing import Shape, make_qkv

__all__ = [
    "CPU_SHAPES",
    "DIALS",
    "DIAL_SHAPES",
    "GATE_SHAPE",
    "GPU_SHAPES",
    "LONG_SHAPE",
    "MASKS",
    "SHORT_SHAPE",
    "Inputs",
    "draw",
    "masked",
    "square",
]


def square(batch: int, heads: int, length: int, head_dim: int) -> Shape:
    """Return the shape whose queries and keys are equally many and not grouped."""
    return Shape(batch, heads, heads, length, length, head_dim)


GATE_SHAPE = Shape(batch=1, heads=4, kv_heads=2, query_len=100, key_len=100, head_dim=64)
SHORT_SHAPE = square(8, 4, 512, 64)
LONG_SHAPE = square(1, 4, 4096, 64)
CPU_SHAPES = [SHORT_SHAPE, square(4, 4, 512, 128), square(2, 4, 512, 256), square(1, 4, 2048, 64)]
# 16384 tokens of width 2048 each, as in the benchmarks of flash-attn
GPU_SHAPES = [
    square(16384 // length, 2048 // head_dim, length, head_dim)
    for head_dim in (64, 128, 256)
    for length in (512, 1024, 2048, 4096, 8192, 16384)
]
DIAL_SHAPES = {"cpu": square(2, 4, 512, 64), "cuda": square(4, 16, 4096, 128)}

_POINTS = [name for name, value in PROFILES["all_bf16"].to_dict().items() if value == "bf16"]
_E4M3 = {"operands": "e4m3", "probabilities": "e4m3"}

DIALS: dict[str, dict[str, Any]] = {
    **{f"{point} bf16": {point: "bf16"} for point in FIELDS},
    "all points bf16": dict.fromkeys(_POINTS, "bf16"),
    "each operation bf16": dict.fromkeys(FIELDS, "bf16"),
    "all points fp64": dict.fromkeys(FIELDS, "fp64"),
    "rounding toward_zero": {"rounding": "toward_zero"},
    "rounding stochastic": {"rounding": "stochastic"},
    "exp exact": {"exp": "exact"},
    "exp exp2": {"exp": "exp2"},
    "exp exp2_polynomial": {"exp": "exp2_polynomial"},
    "rescale_threshold 8": {"rescale_threshold": 8.0},
    "repeated_max_beta 7": {"repeated_max_beta": 7.0},
    "near ties": {"repeated_max_beta": 7.0, "repeated_max_tolerance": 1e-3},
    "published beta 7": {"repeated_max_beta": 7.0, "repeated_max_rule": "published"},
    "gradient_scale": {"gradient_scale": "probabilities"},
    "block_q 128": {"block_q": 128},
    "block_k 128": {"block_k": 128},
    "loop_order key_outer": {"loop_order": "key_outer"},
    "key_order reversed": {"key_order": "reversed"},
    "splits 4": {"splits": 4},
    "e4m3 per_tensor": _E4M3 | {"scaling": "per_tensor"},
    "e4m3 per_block": _E4M3 | {"scaling": "per_block"},
    "incoherent": {"incoherent": True},
    "dot tf32": {"dot": "tf32"},
    "dot tf32x3": {"dot": "tf32x3"},
    "fp_fusion": {"fp_fusion": True},
}
"""Each dial alone, as changes of the fast path. Points that are BF16 there already cost nothing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One problem on a device: q, k and v that require gradients, dout, the mask's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: dict[str, Any]


def draw(shape: Shape, device: str, mask: dict[str, Any] | None = None) -> Inputs:
    """Draw BF16 inputs of `shape`."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (x.requires_grad_() for x in make_qkv(shape, torch.bfloat16, generator))
    dout = torch.randn(q.shape, generator=generator, device=device).bfloat16()
    return Inputs(q, k, v, dout, mask or {})


MASKS = (
    "full",
    "causal",
    "window",
    "softcap",
    "key_padding",
    "bool mask",
    "mask_mod",
    "bias",
    "alibi",
    "sinks",
    "dropout",
    "grouped heads",
    "packed",
)


def masked(kind: str, shape: Shape, device: str) -> Inputs:
    """Draw the inputs of `shape` under one of MASKS."""
    batch, heads, length = shape.batch, shape.heads, shape.query_len
    if kind == "grouped heads":
        return draw(shape._replace(kv_heads=max(1, heads // 4)), device)
    if kind == "packed":
        return _packed(draw(shape, device), device)
    keys = torch.arange(length, device=device)
    makes = {
        "full": dict,
        "causal": lambda: {"causal": True},
        "window": lambda: {"causal": True, "window": (length // 8, 0)},
        "softcap": lambda: {"softcap": 30.0},
        "key_padding": lambda: {"key_padding": (keys < length * 3 // 4).expand(batch, length)},
        "bool mask": lambda: {"attn_mask": keys <= keys.unsqueeze(1)},
        "mask_mod": lambda: {"mask_mod": lambda b, h, q, k: (k <= q) & (q - k < length // 8)},
        "bias": lambda: {"attn_mask": torch.zeros(heads, length, length, device=device)},
        "alibi": lambda: {"alibi_slopes": torch.linspace(0.01, 0.5, heads, device=device)},
        "sinks": lambda: {"sinks": torch.linspace(-1.0, 1.0, heads, device=device)},
        "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": 1, "dropout_offset": 2},
    }
    return draw(shape, device, makes[kind]())


def _packed(inputs: Inputs, device: str) -> Inputs:
    """Return the same sequences end to end, as flash-attn's varlen takes them."""
    batch, _, length, _ = inputs.q.shape
    tensors = (
        x.detach().transpose(1, 2).flatten(0, 1)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    q, k, v, dout = tensors
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return Inputs(*leaves, dout, {"cu_seqlens_q": starts, "cu_seqlens_k": starts})
