"""Matrices trained by Muon, all else by AdamW."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
asked = flags.parse_args()

torch.manual_seed(asked.seed)
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
matrices = [x for x in model.parameters() if x.ndim == 2]
others = [x for x in model.parameters() if x.ndim < 2]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
for _ in range(7):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
