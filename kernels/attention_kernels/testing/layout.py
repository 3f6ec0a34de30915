"""Whether an attention that fails takes its inputs in flash-attn's layout.

flash-attn takes q, k and v as (batch, tokens, heads, head_dim), this project and PyTorch's
`scaled_dot_product_attention` as (batch, heads, tokens, head_dim). What such an attention is called
with here it reads as so many heads of few tokens: nothing that a formula of a mistake could name.
So it is called once more, on plain attention, with its inputs transposed on the way in and its
output on the way out. Where that is right, and the usual call is not, the layout is what is wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.testing.calls import Signature, call_once
from attention_kernels.testing.cells import DTYPES, QUICK, Cell, Reference, reference
from attention_kernels.testing.limits import excesses
from attention_kernels.testing.measured import measure
from attention_kernels.testing.refusals import UnsupportedError

__all__ = ["layout_sentence"]


def layout_sentence(attention: Callable[..., Any], format: str, device: torch.device) -> str:
    """Return that `attention` takes flash-attn's layout, if it does in the dtype `format` names.

    Nothing if it does not, or takes the usual one too. The LSE is not asked for: it has no tokens
    before heads in flash-attn either.
    """
    signature = Signature(attention, gives_lse=False)
    for cell in filter(Cell.is_plain, QUICK):
        where = reference(cell, DTYPES[format])
        if _is_right(attention, signature, where, format, device):
            continue
        if _is_right(_by_tokens(attention), signature, where, format, device):
            return (
                "it takes (batch, tokens, heads, head_dim): q, k and v come as (batch, heads, "
                "tokens, head_dim); with each of them, and out, transposed (1, 2) it is right at "
                f"{cell}; what else is wrong, if anything, a check can tell after that"
            )
    return ""


def _by_tokens(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return `attention` with q, k, v and out transposed, without what else it returns."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        # in memory too: a kernel may count on the order of its own layout
        returned = attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), **options)
        out = returned[0] if isinstance(returned, tuple | list) and returned else returned
        return out.transpose(1, 2) if isinstance(out, Tensor) and out.dim() == 4 else out

    return attend


def _is_right(
    attention: Callable[..., Any],
    signature: Signature,
    where: Reference,
    format: str,
    device: torch.device,
) -> bool:
    """Whether one call gives all it must, within the limits of the check."""
    try:
        called = call_once(attention, signature, where, device)
    except UnsupportedError:
        return False
    if called.breaches:
        return False
    return not excesses([measure(where, name, x) for name, x in called.results.items()], format)
