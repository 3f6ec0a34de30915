"""Stands for Transformer Engine, which needs CUDA: `DotProductAttention` by its public interface.

Names, arguments, defaults and what they mean are those of Transformer Engine 2; the arithmetic is
the textbook's, a sequence and a query at a time, in the dtype of its input. Nothing of the project
is imported here, so that in FP64 it is the reference as well.
"""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

PACKAGE = "transformer_engine.pytorch"
PLACE = f"{PACKAGE}.attention.dot_product_attention.dot_product_attention"

PADDING = 7.0
"""What stands in rows of padding: backends leave anything there."""


class FP8GlobalStateManager:
    """Whether a context is on in which layers compute in FP8, and how."""

    enabled = False
    recipe = SimpleNamespace(fp8_dpa=False, fp8_mha=False)

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe


class Backend(nn.Module):
    def __init__(self, softmax_scale):
        super().__init__()
        self.softmax_scale = softmax_scale


class DotProductAttention(nn.Module):
    fault = ()
    """Factors of the scores, by head."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        heads = num_attention_heads
        self.num_attention_heads, self.num_gqa_groups = heads, num_gqa_groups or heads
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type = attn_mask_type.replace(",", "_")
        self.window_size = _window(self.attn_mask_type, window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type, self.cp_group = attention_type, cp_group
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.unfused_attention = Backend(softmax_scale or 1 / math.sqrt(width))
        self.softmax_offset = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads)
        elif softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = nn.Parameter(torch.zeros(heads))

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        num_splits=1,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
    ):
        if qkv_layer is not None:
            query_layer, key_layer, value_layer = qkv_layer.unbind(qkv_interleave_dim)
        elif kv_layer is not None:
            key_layer, value_layer = kv_layer.unbind(qkv_interleave_dim)
        layout = qkv_format or self.qkv_format
        kind = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        window = _window(kind, self.window_size if window_size is None else window_size)
        corner = self.bottom_right_diagonal
        corner = corner if bottom_right_diagonal is None else bottom_right_diagonal
        corner = kind.endswith("right") if "causal" in kind else corner is None or corner
        assert layout != "thd" or "padding" in kind, "thd needs a padding mask"
        rows, columns = _sequences(
            layout,
            kind,
            (query_layer, key_layer),
            attention_mask,
            (cu_seqlens_q, cu_seqlens_kv),
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        )
        dims = {"sbhd": (1, 0, 2, 3), "bshd": (0, 1, 2, 3)}.get(layout)
        q, k, v = (
            x[None] if dims is None else x.permute(dims)
            for x in (query_layer, key_layer, value_layer)
        )
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        factor = torch.ones(q.shape[2], dtype=q.dtype)
        factor[: len(self.fault)] = torch.tensor(self.fault, dtype=q.dtype)
        out = torch.full((*q.shape[:3], v.shape[-1]), PADDING, dtype=q.dtype)
        hides = attention_mask if kind == "arbitrary" else torch.zeros(1, 1, 1, 1)
        hides = hides.bool().expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        for index, (at_q, at_k) in enumerate(zip(rows, columns, strict=True)):
            b = 0 if layout == "thd" else index
            scores = torch.einsum("qhd,khd->hqk", q[b, at_q] * factor[:, None], k[b, at_k])
            query = torch.arange(len(at_q))[:, None] + corner * (len(at_k) - len(at_q))
            ahead = torch.arange(len(at_k)) - query
            bias = core_attention_bias
            if bias is not None:
                bias = bias.expand(q.shape[0], *bias.shape[1:])[b][:, at_q][:, :, at_k]
            elif core_attention_bias_type == "alibi":
                slopes = _slopes(q.shape[2]) if alibi_slopes is None else alibi_slopes
                slopes = slopes.expand(q.shape[0], -1)[b].to(q.dtype)
                bias = -slopes[:, None, None] * ahead.abs().to(q.dtype)
            hidden = hides[b][:, at_q][:, :, at_k] | _outside(ahead, window)
            scores = self._biased(scores, core_attention_bias_type, bias)
            weights = self._softmax(scores, hidden)
            result = torch.einsum("hqk,khd->qhd", weights, v[b, at_k])
            out = out.index_put((torch.tensor(b), at_q), result)
        out = out[0] if dims is None else out.permute(dims)
        flat = out.contiguous().flatten(-2)
        return (flat, q.new_zeros(q.shape[2])) if self.return_max_logit else flat

    def _biased(self, scores, kind, bias):
        scale = self.unfused_attention.softmax_scale
        if kind == "pre_scale_bias":
            return (scores + bias) * scale
        return scores * scale if bias is None else scores * scale + bias.to(scores.dtype)

    def _softmax(self, scores, hidden):
        keys = scores.shape[-1]
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.to(scores.dtype)[:, None, None]
            scores = torch.cat([scores, sink.expand(*scores.shape[:2], 1)], -1)
        blind = hidden.all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        if self.training and self.attention_dropout:
            weights = nn.functional.dropout(weights, self.attention_dropout)
        return weights[..., :keys]


def _outside(ahead, window):
    left, right = (10**6 if side < 0 else side for side in window)
    return (ahead < -left) | (ahead > right)


def _window(kind, window):
    if window is None:
        window = (-1, -1)
    if "causal" in kind:
        return (window[0], 0)
    return (-1, -1) if tuple(window) == (-1, 0) else tuple(window)


def _sequences(layout, kind, tensors, attention_mask, starts, padded):
    """Return where the queries and the keys of each sequence are."""
    found = []
    masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,) * 2
    for x, mask, begin, gaps in zip(tensors, masks, starts, padded, strict=True):
        if layout == "thd":
            lengths = begin.diff().tolist()
            at = (begin if gaps is None else gaps).tolist()
            found.append([torch.arange(a, a + n) for a, n in zip(at, lengths, strict=False)])
            continue
        batch, length = (x.shape[1], x.shape[0]) if layout == "sbhd" else x.shape[:2]
        if "padding" not in kind:
            found.append([torch.arange(length)] * batch)
        elif begin is not None:
            found.append([torch.arange(n) for n in begin.diff().tolist()])
        else:
            found.append([one.reshape(-1).logical_not().nonzero().flatten() for one in mask])
    return found


def _slopes(heads):
    if heads & (heads - 1) == 0:
        return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])
    near = 2 ** int(math.log2(heads))
    return torch.cat([_slopes(near), _slopes(2 * near)[::2][: heads - near]])


@pytest.fixture
def engine(monkeypatch) -> type[DotProductAttention]:
    """Put the stand-in where the library would be imported, and return its class."""
    names = ("transformer_engine", PACKAGE, f"{PACKAGE}.attention", f"{PACKAGE}.fp8", PLACE)
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules[PACKAGE].DotProductAttention = DotProductAttention
    modules[PLACE].DotProductAttention = DotProductAttention
    modules[f"{PACKAGE}.fp8"].FP8GlobalStateManager = FP8GlobalStateManager
    for one in (DotProductAttention, DotProductAttention.forward, Backend, FP8GlobalStateManager):
        monkeypatch.setattr(one, "__module__", PLACE)
    forward = DotProductAttention.forward
    yield DotProductAttention
    assert DotProductAttention.__dict__["forward"] is forward
