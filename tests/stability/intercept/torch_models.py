"""Small torch models whose attention can be caught, and what a planted error is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_kernels import flash_attention

VOCABULARY = 40

unseen = pytest.mark.filterwarnings("ignore:shadow. of .* attention layers:UserWarning")
"""Marks a test of layers that are not seen, of which shadow warns."""


class Attention(nn.Module):
    """Causal self-attention through SDPA."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A stack of attentions with dropout on the stream, so that random state matters."""

    def __init__(self, depth: int = 3, width: int = 64, heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(layer(self.norm(x.transpose(1, 2)).transpose(1, 2)))
        return self.head(x)


class Recomputed(Decoder):
    """Computes each layer again in the backward pass."""

    reentrant = True

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def tokens(step: int, batch: int = 2, length: int = 24) -> Tensor:
    """Return a batch of random tokens, `(batch, length + 1)`."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)


def train_step(model: nn.Module, step: int, precision: torch.dtype = torch.float32) -> Tensor:
    """Run forward and backward on a batch and return the loss."""
    batch = tokens(step)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    return loss


def drops_a_key(layer_calls: list[int], layer: int, head: int):
    """Return a causal attention that, at its `layer`-th call a step, hides key 0 from one head."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None):
        count = layer_calls[0]
        layer_calls[0] += 1
        mask = None
        if count == layer:
            mask = torch.ones(1, q.shape[1], 1, k.shape[2], dtype=torch.bool)
            mask[:, head, :, 0] = False
        return flash_attention(q, k, v, causal=causal, scale=scale, attn_mask=mask)

    return attend
