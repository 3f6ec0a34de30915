"""Blocks whose activations are computed a second time, in the backward pass."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--reentrant", action="store_true")
asked = flags.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=asked.reentrant)
        return self.last(x)


torch.manual_seed(asked.seed)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(6):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
