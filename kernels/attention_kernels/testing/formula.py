"""Attention and its gradients as formulas in FP64, each of whose parts can be got wrong on purpose.

The golden says what is right; this says what a *given mistake* would have computed, so that a wrong
result can be compared with it. The backward is written out, because a mistake in it can only be
made where it is. Without a mistake it equals the golden to 1e-12 (a test). It holds the whole score
matrix, so it serves the small cells of a check only.

Shape suffixes: B batch, H query heads, G kv heads, Q query_len, K key_len, D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_kernels.testing.laws import Inputs

__all__ = ["RESULTS", "Formula", "Intermediates"]

RESULTS = ("out", "lse", "dq", "dk", "dv")
"""The results of an attention, in the order in which they are computed and named."""


@dataclass(frozen=True, kw_only=True)
class Intermediates:
    """What the forward knows: weights and the LSE, and v by query head."""

    weights: Tensor
    """`(B, H, Q, K)`."""
    lse: Tensor
    """`(B, H, Q)`."""
    out: Tensor
    k: Tensor
    """`(B, H, K, D)`, as is v."""
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Attention of these inputs, with the mistakes that its fields make; by default none."""

    inputs: Inputs
    visible: Tensor
    """Bool, broadcastable to `(B, H, Q, K)`: which key a query attends."""
    scale: float
    kv_heads: tuple[int, ...] = ()
    """The kv head that each query head reads; empty is the right one."""
    sums_right: bool = False
    """Whether dk and dv are summed as is right, whatever `kv_heads` says."""
    count: Tensor | None = None
    """How often each key counts, `(K,)` or broadcastable to `(B, H, Q, K)`."""
    gradient_scale: float | None = None
    """What dS is multiplied with; the scale of the scores if None."""
    backward_scale: float | None = None
    """The scale with which the backward computes scores again."""
    backward_visible: Tensor | None = None
    """The mask that the backward computes them with."""
    delta: float | Tensor = 1.0
    """The factor on delta, or for each key its own, `(K,)`."""
    source: Tensor | None = None
    """The key whose k and v are read in place of each, `(K,)`."""
    sources: tuple[str, ...] = ("k", "v")
    """Which of k and v `source` holds for."""
    padding: int = 0
    """Keys of zeros beyond the last that count in the softmax of each row."""
    dq_keys: Tensor | None = None
    """Bool `(K,)` or `(Q, K)`: the keys that dq's sum takes."""
    dkv_queries: Tensor | None = None
    """Bool `(Q,)`: the queries that the sums of dk and dv take."""
    group: tuple[float, ...] = ()
    """The weight of each query head in the sums of dk and dv."""
    change: Callable[[Intermediates], tuple[Tensor, Tensor]] | None = None
    """What turns the forward's intermediates into another out and LSE, which the backward reads."""

    def with_(self, **changes: object) -> "Formula":
        """Return this formula with other fields."""
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def results(self) -> dict[str, Tensor]:
        """Return out, lse `(B, H, Q, 1)`, dq, dk and dv in FP64, shaped as the attention's own."""
        q_BHQD, _, _, dout_BHQD = (x.double() for x in self.inputs)
        k_BHKD, v_BHKD = self._keys()
        weights_BHQK, lse_BHQ = self._weights(q_BHQD, k_BHKD, self.scale, self.visible)
        known_lse_BHQ, out_BHQD = lse_BHQ, weights_BHQK @ v_BHKD
        if self.change is not None:
            known = Intermediates(
                weights=weights_BHQK,
                lse=lse_BHQ,
                out=out_BHQD,
                k=k_BHKD,
                v=v_BHKD,
            )
            out_BHQD, lse_BHQ = self.change(known)
        if lse_BHQ is not known_lse_BHQ or self._backward_differs():
            weights_BHQK = self._weights_again(q_BHQD, k_BHKD, lse_BHQ)
        delta_BHQ1 = self.delta * (dout_BHQD * out_BHQD).sum(-1, keepdim=True)
        scale = self.scale if self.gradient_scale is None else self.gradient_scale
        ds_BHQK = scale * weights_BHQK * (dout_BHQD @ v_BHKD.mT - delta_BHQ1)
        for_dq_BHQK = ds_BHQK if self.dq_keys is None else ds_BHQK * self.dq_keys
        if self.dkv_queries is not None:
            q_BHQD, dout_BHQD = (x * self.dkv_queries[:, None] for x in (q_BHQD, dout_BHQD))
        return {
            "out": out_BHQD,
            "lse": lse_BHQ.unsqueeze(-1),
            "dq": for_dq_BHQK @ k_BHKD,
            "dk": self._to_keys(ds_BHQK.mT @ q_BHQD, "k"),
            "dv": self._to_keys(weights_BHQK.mT @ dout_BHQD, "v"),
        }

    def _backward_differs(self) -> bool:
        return self.backward_scale is not None or self.backward_visible is not None

    def _keys(self) -> tuple[Tensor, Tensor]:
        """Return k and v by query head, as they are read."""
        index = torch.tensor(self._kv_index())
        read = {"k": self.inputs.k.double()[:, index], "v": self.inputs.v.double()[:, index]}
        for name in self.sources if self.source is not None else ():
            read[name] = read[name][:, :, self.source]
        return read["k"], read["v"]

    def values(self) -> Tensor:
        """Return v by query head, as it is read, `(B, H, K, D)`."""
        return self._keys()[1]

    def weights(self) -> Tensor:
        """Return softmax(scores), `(B, H, Q, K)`; 0 in a row that attends nothing."""
        q_BHQD, k_BGKD, _, _ = (x.double() for x in self.inputs)
        k_BHKD = k_BGKD[:, torch.tensor(self._kv_index())]
        return self._weights(q_BHQD, k_BHKD, self.scale, self.visible)[0]

    def scores(self) -> Tensor:
        """Return scale q k^T, -inf where hidden, `(B, H, Q, K)`."""
        scores_BHQK = self.scale * self.inputs.q.double() @ self._keys()[0].mT
        return scores_BHQK.masked_fill(~self.visible, -torch.inf)

    def _kv_index(self, wrongly: bool = True) -> tuple[int, ...]:
        heads, kv_heads = self.inputs.q.shape[1], self.inputs.k.shape[1]
        right = tuple(h * kv_heads // heads for h in range(heads))
        return self.kv_heads if self.kv_heads and wrongly else right

    def _weights(
        self, q_BHQD: Tensor, k_BHKD: Tensor, scale: float, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores_BHQK = (scale * q_BHQD @ k_BHKD.mT).masked_fill(~visible, -torch.inf)
        if self.count is not None:
            scores_BHQK = scores_BHQK + self.count.double().log()
        lse_BHQ = scores_BHQK.logsumexp(-1)
        if self.padding:
            lse_BHQ = torch.logaddexp(lse_BHQ, lse_BHQ.new_tensor(self.padding).log())
        shift_BHQ1 = lse_BHQ.masked_fill(lse_BHQ == -torch.inf, 0.0).unsqueeze(-1)
        return (scores_BHQK - shift_BHQ1).exp(), lse_BHQ

    def _weights_again(self, q_BHQD: Tensor, k_BHKD: Tensor, lse_BHQ: Tensor) -> Tensor:
        """Return the weights as a backward computes them: exp(scores - lse) of the forward."""
        scale = self.scale if self.backward_scale is None else self.backward_scale
        visible = self.visible if self.backward_visible is None else self.backward_visible
        scores_BHQK = (scale * q_BHQD @ k_BHKD.mT).masked_fill(~visible, -torch.inf)
        shift_BHQ1 = lse_BHQ.masked_fill(lse_BHQ == -torch.inf, 0.0).unsqueeze(-1)
        return (scores_BHQK - shift_BHQ1).clamp(max=80).exp()

    def _to_keys(self, by_head_BHKD: Tensor, name: str) -> Tensor:
        """Add what each query head has to the key that it was read from."""
        if self.source is not None and name in self.sources:
            moved = torch.zeros_like(by_head_BHKD)
            by_head_BHKD = moved.index_add_(2, self.source, by_head_BHKD)
        if self.group:
            by_head_BHKD = by_head_BHKD * by_head_BHKD.new_tensor(self.group)[:, None, None]
        like = self.inputs.k if name == "k" else self.inputs.v
        total_BGKD = torch.zeros(like.shape, dtype=torch.float64)
        index = torch.tensor(self._kv_index(wrongly=not self.sums_right))
        return total_BGKD.index_add_(1, index, by_head_BHKD)
