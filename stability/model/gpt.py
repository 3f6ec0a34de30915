"""A pre-norm decoder in the shape of GPT-2, which is given an attention function for each layer.

It has learned positions, LayerNorm, GELU, biases (except for the keys) and an output tied to the
token embedding; optionally fewer kv heads, a per-head RMSNorm on q and k, and dropout of the
residual stream's parts. Leaves out the attention itself, the initial weights (`initial_weights`)
and the loss (`lightning_module`).

Shapes: B batch, T tokens, W width, H query heads, G kv heads, D head_dim, V vocabulary.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; qk-norm as in
arXiv 2309.14322.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_kernels import AttentionFn
from stability.config.schema import ModelConfig
from stability.model.decoder_parts import AttendingDecoder, HeadNorm, dropped, split_heads

__all__ = ["GPT", "Block"]


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.width // config.heads
        kv_width = (config.kv_heads or config.heads) * self.head_dim
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        # A key bias shifts all scores of a query alike, and softmax is blind to that: the bias's
        # gradient would be rounding noise, which Adam would scale up to whole steps.
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width)
        self.query_norm = HeadNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.key_norm = HeadNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.attention_residual = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_residual = nn.Linear(4 * width, width)
        self.dropout = config.dropout

    def forward(self, x_BTW: Tensor, attention: AttentionFn) -> Tensor:
        """Return the residual stream after this layer, shaped as before."""
        normed = self.attention_norm(x_BTW)
        q_BHTD = self.query_norm(self._heads(self.query(normed)))
        k_BGTD = self.key_norm(self._heads(self.key(normed)))
        v_BGTD = self._heads(self.value(normed))
        out_BHTD = attention(q_BHTD, k_BGTD, v_BGTD, causal=True)
        attended = self.attention_residual(out_BHTD.transpose(1, 2).flatten(2))
        x_BTW = x_BTW + self._dropped(attended)
        hidden = F.gelu(self.mlp_up(self.mlp_norm(x_BTW)), approximate="tanh")
        return x_BTW + self._dropped(self.mlp_residual(hidden))

    def _dropped(self, x_BTW: Tensor) -> Tensor:
        return dropped(x_BTW, self.dropout, is_training=self.training)

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)


class GPT(AttendingDecoder):
    """The whole decoder."""

    def __init__(self, config: ModelConfig, attention: Sequence[AttentionFn]) -> None:
        super().__init__(config, attention)
        # PyTorch's layers draw their first weights from the global generator, which is put back
        with torch.random.fork_rng(devices=[]):
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleDict({f"layer_{i}": Block(config) for i in range(config.depth)})
            self.final_norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, tokens, vocab_size)` for int64 `tokens` `(batch, tokens)`.

        ValueError if there are more tokens than the context holds.
        """
        self._check_length(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_BTW = self.token_embedding(tokens) + self.position_embedding(positions)
        x_BTW = dropped(x_BTW, self.config.dropout, is_training=self.training)
        for block, attention in zip(self.blocks.values(), self.attention, strict=True):
            x_BTW = cast("Block", block)(x_BTW, attention)
        return F.linear(self.final_norm(x_BTW), self.token_embedding.weight)
