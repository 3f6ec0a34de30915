"""A small GPT on Python's own sources that returns its loss, as nanoGPT does, and is evaluated.

examples/verdict.yaml puts another attention into it and judges that; `stability docs
your_own_training` says how.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--lr", type=float, default=1e-3)
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--steps", type=int, default=30)
flags.add_argument("--depth", type=int, default=2)
asked = flags.parse_args()
CONTEXT, HEADS = 64, 4


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of `x`, (batch, tokens, width)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Return the logits of each next byte, and with targets `y` the loss beside them."""
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits = self.head(self.norm(self.blocks(h)))
        if y is None:
            return logits
        return logits, F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def loss_of(tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each next byte."""
    with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
        return model(tokens[:, :-1], tokens[:, 1:])[1]


torch.manual_seed(asked.seed)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources[:40]).lower()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
# bytes that are seen too rarely to be learned: Adam moves such a row of the embedding by noise
data[data.bincount(minlength=256)[data] < 2000] = ord(" ")
held_out, data = data[: 16 * (CONTEXT + 1)].view(16, -1), data[16 * (CONTEXT + 1) :]
model = GPT(64, asked.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=20)
for step in range(asked.steps):
    starts = torch.randint(0, len(data) - CONTEXT - 1, (8,)).tolist()
    loss = loss_of(torch.stack([data[start : start + CONTEXT + 1] for start in starts]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    if (step + 1) % 15 == 0:
        model.eval()
        with torch.no_grad():
            print("held out", step + 1, loss_of(held_out).item())
        model.train()
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
