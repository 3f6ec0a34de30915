"""A small GPT on Python's own sources, in plain PyTorch: a script that knows nothing of stability.

`stability record` and examples/study.yaml train it as the arms of a study: `stability docs
your_own_training` says how.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT, WIDTH, HEADS, DEPTH = 128, 128, 4, 4


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of `x`, (batch, tokens, width)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, (batch, tokens, 256)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    """Train, and print the loss."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--batch", type=int, default=4)
    flags.add_argument("--lr", type=float, default=5e-4)
    flags.add_argument("--bf16", action="store_true")
    flags.add_argument("--compile", action="store_true")
    flags.add_argument("--optimizer", choices=["AdamW", "RAdam", "SGD"], default="AdamW")
    asked = flags.parse_args()

    torch.manual_seed(asked.seed)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources[:60])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT()
    run = torch.compile(model) if asked.compile else model
    optimizer = getattr(torch.optim, asked.optimizer)(model.parameters(), lr=asked.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for step in range(asked.steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (asked.batch,)).tolist()
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
            logits = run(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
