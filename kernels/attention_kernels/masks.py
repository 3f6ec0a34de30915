"""Which query may attend which key, and what is added to its score: shared by every implementation.

`MaskArguments` is what a user passes, `Mask` what an implementation reads, tile by tile.

Positions are aligned bottom-right, as in flash-attn 2.1 and later: query i stands at key
i + key_len - query_len, so the last query stands at the last key. PyTorch's SDPA aligns `is_causal`
to the top left instead, so the two agree only where lengths do. `causal` lets a query attend keys
up to where it stands, a window (left, right) those at most `left` before and `right` after, and
ALiBi (arXiv 2108.12409) subtracts slope * distance. A row that attends nothing is no error: it
gives 0. How a masked score is represented and how the softcap is computed is left to each
implementation, so that golden, baseline and twin share no arithmetic.

Shape suffixes: B batch, H query heads, I some query rows, J some keys, Q query_len, K key_len.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from attention_kernels.dropout import keep_tile, keep_word, scale_of_kept
from attention_kernels.mask_mod import MaskFunction, MaskMod

__all__ = ["Mask", "MaskArguments", "Sequence", "mask_fields"]


class MaskArguments(TypedDict, total=False):
    """What every attention takes beside q, k and v; all of it is optional.

    A query stands at the key that is as far from the last key as it is from the last query
    (bottom-right). `causal`: it attends keys up to there. `scale`: of q k^T, None is
    1/sqrt(head_dim of q). `window` (left, right): so many keys before and after, None is no bound.
    `softcap`: scores become softcap * tanh(score / softcap). `key_padding`, bool
    `(batch, key_len)`: true where a key may be attended. `attn_mask`, broadcastable to
    `(batch, heads, query_len, key_len)`: bool, true where it may be attended, or floating, added to
    the scores after the softcap. A floating one that requires grad gets it: the sum of dS over the
    axes along which it is broadcast (T5's trained position bias). `mask_mod`: a function of (batch,
    query head, query, key), integer tensors that broadcast, that returns bool, true where it may be
    attended (FlexAttention's). It is evaluated tile by tile, again in the backward, and never for
    the whole mask but in the baseline; packed sequences and torch.compile do not take it.
    `alibi_slopes`, `(heads,)` or `(batch, heads)`: subtract slope * distance; they get no
    gradient. `sinks`, `(heads,)`: a logit of each head that joins the softmax's denominator and
    has no value (GPT-OSS); neither scaled, capped nor masked, it gets a gradient, and the LSE
    includes it. `cu_seqlens_q`, `cu_seqlens_k`, int32: where each packed sequence starts and,
    last, how many tokens there are; then q is `(total_tokens, heads, head_dim)`, k and v
    likewise. `dropout_p`: the probability that a weight of the softmax is dropped; those kept
    are divided by 1 - dropout_p, the denominator and the LSE stay. Which are dropped is a
    function of `dropout_seed`, which must be given then, and `dropout_offset` (integers below
    2**63; take other ones at each step and layer) and of where the weight lies (`dropout`); no
    generator of torch is read or advanced.
    """

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float
    key_padding: Tensor | None
    attn_mask: Tensor | None
    mask_mod: MaskFunction | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    dropout_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """The mask of one attention call; tensors are on the device of q.

    With `cu_seqlens_q` and `cu_seqlens_k` (int32, one more than there are sequences) the batch axis
    is 1, sequences are packed along the rows, and `sequences` takes them apart.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    """How many keys to the left and right of where a query stands; None is no bound."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap) before anything is added; 0 is off."""
    key_padding: Tensor | None = None
    """bool (batch, key_len): true where the key may be attended."""
    visible: Tensor | None = None
    """bool, broadcastable to (batch, heads, query_len, key_len): true where it may be attended."""
    bias: Tensor | None = None
    """Floating, shaped as `visible`: added to the scores; -inf hides the key. Differentiable."""
    mask_mod: MaskMod | None = None
    """Which keys may be attended as a function of positions, for the batch and heads of q."""
    alibi_slopes: Tensor | None = None
    """FP32, or FP64 where given so, (batch or 1, heads)."""
    sinks: Tensor | None = None
    """Floating (heads,): a logit that joins each row's sum and has no value; differentiable."""
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_p: float = 0.0
    """The probability that a weight is dropped, after the softmax; see `dropout`."""
    dropout_seed: int = 0
    dropout_offset: int = 0
    first_batch: int = 0
    """Of a part of a call: where it begins in the batch, and which head is its first."""
    first_head: int = 0

    def offsets(self) -> tuple[int | None, int | None]:
        """Return how far left and right of its place a query sees; None is no bound."""
        left, right = self.window
        if self.causal:
            # both hold, so the narrower one decides
            right = 0 if right is None else min(right, 0)
        return left, right

    def sequences(self, query_len: int, key_len: int) -> Iterator["Sequence"]:
        """Yield the sequences of the batch: one, or each of the packed ones that is not empty."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            yield Sequence(0, range(query_len), range(key_len), self)
            return
        queries, keys = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for index in range(len(queries) - 1):
            rows = range(queries[index], queries[index + 1])
            columns = range(keys[index], keys[index + 1])
            if rows and columns:
                slopes = self.alibi_slopes
                if slopes is not None and len(slopes) > 1:
                    slopes = slopes[index : index + 1]
                alone = replace(
                    self,
                    cu_seqlens_q=None,
                    cu_seqlens_k=None,
                    alibi_slopes=slopes,
                    first_batch=index,
                )
                yield Sequence(index, rows, columns, alone)

    def part(self, batch: slice, heads: slice) -> "Mask":
        """Return the mask of some of the batch, and of some query heads, alone."""
        padding, slopes = self.key_padding, self.alibi_slopes
        return replace(
            self,
            key_padding=None if padding is None else padding[batch],
            visible=_part(self.visible, batch, heads),
            bias=_part(self.bias, batch, heads),
            mask_mod=None if self.mask_mod is None else self.mask_mod.part(batch, heads),
            alibi_slopes=_part(slopes, batch, heads),
            sinks=None if self.sinks is None else self.sinks[heads],
            first_batch=self.first_batch + (batch.start or 0),
            first_head=self.first_head + (heads.start or 0),
        )

    def key_range(self, rows: range, query_len: int, key_len: int) -> range:
        """Return the keys that positions allow to any of `rows`; tensors may hide more."""
        left, right = self.offsets()
        offset = key_len - query_len
        start = 0 if left is None else max(0, rows.start + offset - left)
        stop = key_len if right is None else min(key_len, rows.stop + offset + right)
        # a window that lies beyond the keys is an empty range, never one that runs backwards
        return range(min(start, key_len), max(stop, min(start, key_len)))

    def hidden(
        self, rows: range, keys: range, query_len: int, key_len: int, device: torch.device
    ) -> Tensor | None:
        """Return a bool tensor, true where the query may not attend the key; None if it always may.

        It broadcasts to (B, H, I, J): rank 2 if positions alone decide, else rank 4.
        """
        hidden = self._hidden_by_position(rows, keys, query_len, key_len, device)
        if self.key_padding is not None:
            hidden = _either(hidden, ~self.key_padding[:, None, None, keys.start : keys.stop])
        if self.visible is not None:
            hidden = _either(hidden, ~_tile(self.visible, rows, keys))
        if self.mask_mod is not None:
            hidden = _either(hidden, ~self.mask_mod.visible(rows, keys, device))
        return hidden

    def _hidden_by_position(
        self, rows: range, keys: range, query_len: int, key_len: int, device: torch.device
    ) -> Tensor | None:
        left, right = self.offsets()
        offset = key_len - query_len
        # Most tiles lie wholly on one side of the diagonal: those need no comparison of positions.
        beyond = right is not None and keys.stop - 1 > rows.start + offset + right
        before = left is not None and keys.start < rows.stop - 1 + offset - left
        if not (beyond or before):
            return None
        ahead_IJ = _ahead(rows, keys, offset, device)
        hidden_IJ = torch.zeros_like(ahead_IJ, dtype=torch.bool)
        if right is not None:
            hidden_IJ |= ahead_IJ > right
        if left is not None:
            hidden_IJ |= ahead_IJ < -left
        return hidden_IJ

    def added(
        self,
        rows: range,
        keys: range,
        query_len: int,
        key_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """Return what is added to the scores, in `dtype`, broadcastable to (B, H, I, J), or None.

        The bias comes as it is; ALiBi is -slope * |distance|, computed in `dtype`.
        """
        added = None if self.bias is None else _tile(self.bias, rows, keys).to(dtype)
        if self.alibi_slopes is not None:
            distance_IJ = _ahead(rows, keys, key_len - query_len, device).abs().to(dtype)
            alibi_BHIJ = -self.alibi_slopes.to(dtype)[:, :, None, None] * distance_IJ
            added = alibi_BHIJ if added is None else added + alibi_BHIJ
        return added

    def kept(
        self, rows: range, keys: range, batches: int, heads: int, device: torch.device
    ) -> Tensor | None:
        """Return a bool tile (B, H, I, J), true where dropout keeps the weight; None without it.

        `batches` and `heads`, those of q, are how many there are in this part of the call.
        """
        if self.dropout_p == 0:
            return None
        batch = range(self.first_batch, self.first_batch + batches)
        head = range(self.first_head, self.first_head + heads)
        word = keep_word(self.dropout_seed, self.dropout_offset)
        return keep_tile(self.dropout_p, word, batch, head, rows, keys, device)

    def kept_scale(self) -> float:
        """Return what the kept weights are multiplied with; 1 without dropout."""
        return scale_of_kept(self.dropout_p)


def mask_fields(
    arguments: MaskArguments, batch: int = 1, heads: int = 1, function: str = "attention"
) -> dict[str, Any]:
    """Return the fields of `Mask` that checked arguments mean, by name.

    `batch` and `heads` are those of q, which a mask_mod is asked about, in the name of `function`.
    """
    mod = arguments.get("mask_mod")
    attn_mask, slopes = arguments.get("attn_mask"), arguments.get("alibi_slopes")
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    if slopes is not None:
        # FP64 slopes stay whole for the golden; engines convert them to their work format
        slopes = slopes.detach().to(torch.promote_types(slopes.dtype, torch.float32))
        slopes = slopes.reshape(-1, slopes.shape[-1])
    left, right = arguments.get("window") or (None, None)
    seed = arguments.get("dropout_seed")
    return {
        "causal": bool(arguments.get("causal", False)),
        "window": (left, right),
        "softcap": float(arguments.get("softcap", 0.0)),
        "key_padding": arguments.get("key_padding"),
        "visible": None if is_bias else attn_mask,
        "bias": attn_mask if is_bias else None,
        "mask_mod": None if mod is None else MaskMod(mod, range(batch), range(heads), function),
        "alibi_slopes": slopes,
        "sinks": arguments.get("sinks"),
        "cu_seqlens_q": arguments.get("cu_seqlens_q"),
        "cu_seqlens_k": arguments.get("cu_seqlens_k"),
        "dropout_p": float(arguments.get("dropout_p", 0.0)),
        "dropout_seed": 0 if seed is None else seed,
        "dropout_offset": arguments.get("dropout_offset", 0),
    }


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: its place in the batch, its rows of q, its rows of k and v, its own mask."""

    index: int
    queries: range
    keys: range
    mask: Mask


def _ahead(rows: range, keys: range, offset: int, device: torch.device) -> Tensor:
    """Return how far each key is ahead of where each query stands, (I, J)."""
    row = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(keys.start, keys.stop, device=device)
    return key - (row.unsqueeze(1) + offset)


def _part(x: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """Return the part of a tensor that broadcasts to (B, H, ...); axes of length 1 stay."""
    if x is None:
        return None
    if x.shape[0] != 1:
        x = x[batch]
    return x[:, heads] if x.shape[1] != 1 else x


def _tile(x: Tensor, rows: range, keys: range) -> Tensor:
    """Return a tile of a broadcastable rank-4 tensor; axes of length 1 stay."""
    if x.shape[2] != 1:
        x = x[:, :, rows.start : rows.stop]
    if x.shape[3] != 1:
        x = x[..., keys.start : keys.stop]
    return x


def _either(hidden: Tensor | None, other: Tensor) -> Tensor:
    return other if hidden is None else hidden | other
