"""A small flash attention as a kernel's author writes one: tiles, running statistics, a backward.

`Flash` is right. Each of its methods is one step of a kernel, so that a wrong attention is a
subclass with one step written wrongly (`wrong`). It shares no code with the library. Statistics,
products and accumulators are FP32; P and dS are rounded to the dtype of q before a product, as on
tensor cores; out and the gradients are rounded once, as they are stored.

Shape suffixes: B batch, H query heads, G kv heads, Q query_len, K key_len, D head_dim, I the rows
of a tile, J its keys.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Flash"]


class Flash:
    """Flash attention in PyTorch: call it as `function(q, k, v, *, causal, scale=None)`."""

    block_q = 32
    block_k = 32

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        out, lse = _Run.apply(self, q, k, v, causal, self.scale(q, scale))
        return (out, lse) if return_lse else out

    def scale(self, q: Tensor, scale: float | None) -> float:
        """Return the scale of the scores."""
        return 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    # what is read

    def load(self, x: Tensor, rows: range) -> Tensor:
        """Return some rows of q or dout, `(batch, heads, rows, head_dim)`, in FP32."""
        return x[:, :, rows.start : rows.stop].float()

    def load_keys(self, x: Tensor, keys: range, heads: int) -> Tensor:
        """Return some rows of k or v for each query head, `(batch, heads, keys, head_dim)`."""
        return self.expand(x, heads)[:, :, keys.start : keys.stop].float()

    load_values = load_keys

    def expand(self, x: Tensor, heads: int) -> Tensor:
        """Return k or v with the kv head that each query head reads."""
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def row_blocks(self, query_len: int) -> Iterator[range]:
        """Yield the tiles of queries."""
        for start in range(0, query_len, self.block_q):
            yield range(start, min(start + self.block_q, query_len))

    def key_blocks(self, key_len: int) -> Iterator[range]:
        """Yield the tiles of keys."""
        for start in range(0, key_len, self.block_k):
            yield range(start, min(start + self.block_k, key_len))

    # the scores

    def hidden(
        self, rows: range, keys: range, query_len: int, key_len: int, causal: bool
    ) -> Tensor:
        """Return true where a row may not attend a key, `(rows, keys)`."""
        row_I1 = torch.arange(rows.start, rows.stop)[:, None] + key_len - query_len
        key_J = torch.arange(keys.start, keys.stop)
        return self.after(row_I1, key_J) if causal else torch.zeros(len(rows), len(keys)).bool()

    def after(self, row_I1: Tensor, key_J: Tensor) -> Tensor:
        """Return true where a key lies after the row that asks."""
        return key_J > row_I1

    def backward_hidden(self, *arguments: Any) -> Tensor:
        """Return the mask of the backward."""
        return self.hidden(*arguments)

    # the forward

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype and the natural LSE in FP32."""
        query_len, key_len, heads = q.shape[2], k.shape[2], q.shape[1]
        out = q.new_empty(*q.shape[:3], v.shape[-1])  # v may have a head_dim of its own
        lse = torch.empty(q.shape[:3], dtype=torch.float32)
        for rows in self.row_blocks(query_len):
            q_BHID = self.load(q, rows)
            m_BHI1 = q_BHID.new_full((*q_BHID.shape[:3], 1), -torch.inf)
            l_BHI1 = torch.zeros_like(m_BHI1)
            acc_BHID = q_BHID.new_zeros(*q_BHID.shape[:3], v.shape[-1])
            for keys in self.key_blocks(key_len):
                hidden = self.hidden(rows, keys, query_len, key_len, causal)
                if hidden.all():
                    continue
                k_BHJD = self.load_keys(k, keys, heads)
                v_BHJD = self.load_values(v, keys, heads)
                s_BHIJ = (scale * q_BHID @ k_BHJD.mT).masked_fill(hidden, -torch.inf)
                m_BHI1, l_BHI1, acc_BHID = self.step(
                    s_BHIJ, v_BHJD, m_BHI1, l_BHI1, acc_BHID, q.dtype
                )
            self.store(out, lse, rows, m_BHI1, l_BHI1, acc_BHID)
        return out, lse

    def step(
        self, s: Tensor, v: Tensor, m: Tensor, l: Tensor, acc: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the running maximum, sum and accumulator after one more tile of keys."""
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p, alpha = torch.exp(s - shift), torch.exp(m - shift)
        return m_new, alpha * l + p.sum(-1, keepdim=True), alpha * acc + p.to(dtype).float() @ v

    def store(
        self, out: Tensor, lse: Tensor, rows: range, m: Tensor, l: Tensor, acc: Tensor
    ) -> None:
        """Write the rows of out and the LSE; a row that attends nothing gives 0 and -inf."""
        at = slice(rows.start, rows.stop)
        out[:, :, at] = torch.where(l > 0, acc / l, 0.0).to(out.dtype)
        lse[:, :, at] = (m + l.log()).squeeze(-1)

    def lse_to_return(self, lse: Tensor) -> Tensor:
        """Return the LSE as the caller gets it."""
        return lse

    # the backward

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return rowsum(dO * O), `(batch, heads, query_len, 1)`."""
        return (dout.float() * out.float()).sum(-1, keepdim=True)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv in the dtypes of q, k and v."""
        query_len, key_len, heads = q.shape[2], k.shape[2], q.shape[1]
        delta_BHQ1 = self.delta(dout, out)
        dq_BHQD = torch.zeros(q.shape)
        dk_BHKD = torch.zeros(*q.shape[:2], key_len, q.shape[-1])
        dv_BHKD = torch.zeros(*q.shape[:2], key_len, v.shape[-1])
        for keys in self.key_blocks(key_len):
            k_BHJD, v_BHJD = self.load_keys(k, keys, heads), self.load_values(v, keys, heads)
            for rows in self.row_blocks(query_len):
                hidden = self.backward_hidden(rows, keys, query_len, key_len, causal)
                if hidden.all():
                    continue
                at = slice(rows.start, rows.stop)
                q_BHID, do_BHID = self.load(q, rows), self.load(dout, rows)
                s_BHIJ = (scale * q_BHID @ k_BHJD.mT).masked_fill(hidden, -torch.inf)
                p_BHIJ = torch.exp(s_BHIJ - self.finite(lse[:, :, at]).unsqueeze(-1))
                dp_BHIJ = do_BHID @ v_BHJD.mT
                ds_BHIJ = (p_BHIJ * (dp_BHIJ - delta_BHQ1[:, :, at])).to(q.dtype).float()
                p_BHIJ = p_BHIJ.to(q.dtype).float()
                self.add_dq(dq_BHQD, rows, keys, scale * ds_BHIJ @ k_BHJD)
                self.add_dk(dk_BHKD, rows, keys, scale * ds_BHIJ.mT @ q_BHID)
                self.add_dv(dv_BHKD, rows, keys, p_BHIJ.mT @ do_BHID)
        return self.gradients(dq_BHQD, dk_BHKD, dv_BHKD, k.shape[1], q.dtype)

    def finite(self, lse: Tensor) -> Tensor:
        """Return the LSE with 0 for rows that attend nothing, whose weights are 0 anyway."""
        return lse.masked_fill(lse == -torch.inf, 0.0)

    def add_dq(self, dq: Tensor, rows: range, keys: range, part: Tensor) -> None:
        """Add one tile's part to dq."""
        dq[:, :, rows.start : rows.stop] += part

    def add_dk(self, dk: Tensor, rows: range, keys: range, part: Tensor) -> None:
        """Add one tile's part to dk."""
        dk[:, :, keys.start : keys.stop] += part

    def add_dv(self, dv: Tensor, rows: range, keys: range, part: Tensor) -> None:
        """Add one tile's part to dv."""
        dv[:, :, keys.start : keys.stop] += part

    def gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients as they are stored."""
        return dq.to(dtype), self.fold(dk, kv_heads).to(dtype), self.fold(dv, kv_heads).to(dtype)

    def fold(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return the sum over the query heads that share a kv head."""
        return x.unflatten(1, (kv_heads, -1)).sum(2)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Flash, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.causal, ctx.scale = kernel, causal, scale
        returned = kernel.lse_to_return(lse).clone()
        ctx.mark_non_differentiable(returned)
        return out, returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.kernel.backward(grads[0], q, k, v, out, lse, ctx.causal, ctx.scale)
        return None, *gradients, None, None
