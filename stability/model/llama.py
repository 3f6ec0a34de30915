"""A pre-norm decoder in the shape of Llama, which is given an attention function for each layer.

It has rotary positions (RoPE), RMSNorm, a gated MLP (SwiGLU), fewer kv heads where the config says
so, no biases, and an output of its own or tied to the token embedding; optionally a per-head
RMSNorm on q and k before they are rotated, as Qwen3 has it, and dropout of the residual stream's
parts. Weights, names apart, and results are those of `LlamaForCausalLM` of transformers: RoPE turns
dimension i with i + head_dim / 2. Leaves out the attention itself, the initial weights
(`initial_weights`) and the loss (`lightning_module`).

Shapes: B batch, T tokens, W width, H query heads, G kv heads, D head_dim, V vocabulary.
Sources: Touvron et al., arXiv 2302.13971; Su et al., arXiv 2104.09864 (RoPE); Zhang and Sennrich,
arXiv 1910.07467 (RMSNorm); Shazeer, arXiv 2002.05202 (SwiGLU).
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_kernels import AttentionFn
from stability.config.model import ModelConfig
from stability.model.decoder_parts import AttendingDecoder, HeadNorm, dropped, split_heads

__all__ = ["Llama", "LlamaBlock", "mlp_width_of", "rotated"]

_NORM_EPS = 1e-6
_MLP_MULTIPLE = 32


def mlp_width_of(config: ModelConfig) -> int:
    """Return how wide the hidden layer of the MLP is: 8/3 of the width by default, rounded up."""
    given = int(config.option("mlp_width"))
    return given or -(-8 * config.width // (3 * _MLP_MULTIPLE)) * _MLP_MULTIPLE


def rotated(x_BHTD: Tensor, angles_TD: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of each token by its angles `(tokens, D/2)`, which are FP64.

    Computed in FP32, or FP64 for such inputs: a q in BF16 times a cosine in BF16 would be rounded
    three times. The result has the dtype of the input.
    """
    wide = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
    cos, sin = angles_TD.cos().to(wide.dtype), angles_TD.sin().to(wide.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x_BHTD.dtype)


class LlamaBlock(nn.Module):
    """One layer: attention and gated MLP, each normalised before and added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim, hidden = config.width, config.head_dim, mlp_width_of(config)
        self.attention_norm = nn.RMSNorm(width, eps=_NORM_EPS)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, config.kv_width, bias=False)
        self.value = nn.Linear(width, config.kv_width, bias=False)
        self.query_norm = HeadNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.key_norm = HeadNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.attention_residual = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=_NORM_EPS)
        self.mlp_gate = nn.Linear(width, hidden, bias=False)
        self.mlp_up = nn.Linear(width, hidden, bias=False)
        self.mlp_residual = nn.Linear(hidden, width, bias=False)
        self.dropout = config.dropout

    def forward(self, x_BTW: Tensor, angles_TD: Tensor, attention: AttentionFn) -> Tensor:
        """Return the residual stream after this layer, shaped as before."""
        normed = self.attention_norm(x_BTW)
        q_BHTD = rotated(self.query_norm(self._heads(self.query(normed))), angles_TD)
        k_BGTD = rotated(self.key_norm(self._heads(self.key(normed))), angles_TD)
        v_BGTD = self._heads(self.value(normed))
        out_BHTD = attention(q_BHTD, k_BGTD, v_BGTD, causal=True)
        attended = self.attention_residual(out_BHTD.transpose(1, 2).flatten(2))
        x_BTW = x_BTW + self._dropped(attended)
        normed = self.mlp_norm(x_BTW)
        hidden = F.silu(self.mlp_gate(normed)) * self.mlp_up(normed)
        return x_BTW + self._dropped(self.mlp_residual(hidden))

    def _dropped(self, x_BTW: Tensor) -> Tensor:
        return dropped(x_BTW, self.dropout, is_training=self.training)

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)


class Llama(AttendingDecoder):
    """The whole decoder."""

    def __init__(self, config: ModelConfig, attention: Sequence[AttentionFn]) -> None:
        super().__init__(config, attention)
        # PyTorch's layers draw their first weights from the global generator, which is put back
        with torch.random.fork_rng(devices=[]):
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleDict({name: LlamaBlock(config) for name in config.layer_names})
            self.final_norm = nn.RMSNorm(config.width, eps=_NORM_EPS)
            if not config.option("tied"):
                self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, tokens, vocab_size)` for int64 `tokens` `(batch, tokens)`.

        ValueError if there are more tokens than the context holds.
        """
        self._check_length(tokens)
        angles_TD = self._angles(tokens)
        x_BTW = self.token_embedding(tokens)
        x_BTW = dropped(x_BTW, self.config.dropout, is_training=self.training)
        for block, attention in zip(self.blocks.values(), self.attention, strict=True):
            x_BTW = cast("LlamaBlock", block)(x_BTW, angles_TD, attention)
        normed = self.final_norm(x_BTW)
        if self.config.option("tied"):
            return F.linear(normed, self.token_embedding.weight)
        return self.lm_head(normed)

    def _angles(self, tokens: Tensor) -> Tensor:
        """Return by how much each token's pairs turn, `(tokens, D/2)`, in FP64."""
        # made at each pass, not kept: a buffer would be cast with the weights, and an angle in
        # BF16 errs by whole turns at position 1000
        pairs = torch.arange(0, self.config.head_dim, 2, device=tokens.device, dtype=torch.float64)
        rates = self.config.option("rope_theta") ** (-pairs / self.config.head_dim)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float64)
        return positions[:, None] * rates
