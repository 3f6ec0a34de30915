"""A model of one's own for a study: adding one is a file with one function.

Try it, from the folder that holds this file, on the demo's study:

    stability run ../configs/quickstart.yaml --model.builder own_model:build
"""

from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a small MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = self.attention(q, k, v, causal=True)  # (batch, heads, tokens, head_dim)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu()


class Model(nn.Module):
    """Embedding, blocks, and an output of its own."""

    def __init__(self, config, attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, one) for one in attention)
        self.head = nn.Linear(
            config.width, config.vocab_size, bias=config.options.get("bias", False)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, tokens, vocab_size)`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(config, attention) -> nn.Module:
    """Return a decoder of `config`'s shape whose layer i attends by `attention[i]`."""
    return Model(config, attention)
