"""What every attention implementation is: a callable on q, k, v.

Leaves out how any of them computes. Shapes follow `scaled_dot_product_attention`.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionOutput(NamedTuple):
    """What attention returns when the log-sum-exp is asked for.

    `out` is `(batch, heads, query_len, head_dim)` in q's dtype; `lse` is
    `(batch, heads, query_len)`, natural log, FP32 or FP64.
    """

    out: Tensor
    lse: Tensor


class AttentionFn(Protocol):
    """A differentiable attention: q `(batch, heads, query_len, head_dim)`, k and v
    `(batch, kv_heads, key_len, head_dim)`, out like q. `scale=None` means 1/sqrt(head_dim).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """Attend and return `out`, shaped and typed as q."""
        ...
