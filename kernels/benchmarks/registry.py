"""What is timed: shapes and attentions, by name. Leaves out how (`run`)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_kernels import PROFILES, baseline_attention, flash_attention
from attention_kernels.testing import Shape

__all__ = ["ATTENTIONS", "CPU_SHAPE", "GOLDEN_SHAPE", "GPU_SHAPES", "INTERPRETER_SHAPE"]

Attention = Callable[..., Tensor]


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


ATTENTIONS: dict[str, Attention] = {
    "baseline": baseline_attention,
    "twin:fa2": partial(flash_attention, engine="twin"),
    "twin:all_bf16": partial(flash_attention, engine="twin", numerics=PROFILES["all_bf16"]),
    "triton:fa2": partial(flash_attention, engine="triton"),
    "triton:all_bf16": partial(flash_attention, engine="triton", numerics=PROFILES["all_bf16"]),
    "sdpa:flash": _sdpa_flash,
}

CPU_SHAPE = Shape(batch=8, heads=4, kv_heads=4, query_len=512, key_len=512, head_dim=64)
INTERPRETER_SHAPE = CPU_SHAPE
GOLDEN_SHAPE = Shape(batch=1, heads=8, kv_heads=8, query_len=8192, key_len=8192, head_dim=128)
GPU_SHAPES = [
    Shape(
        batch=16384 // length,
        heads=2048 // head_dim,
        kv_heads=2048 // head_dim,
        query_len=length,
        key_len=length,
        head_dim=head_dim,
    )
    for head_dim in (64, 128, 256)
    for length in (512, 2048, 8192)
]
