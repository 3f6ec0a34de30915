"""A model in BF16 whose optimizer updates FP32 masters, copied back after each step."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import stability

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--other-start", action="store_true")
asked = flags.parse_args()

torch.manual_seed(asked.seed + asked.other_start)
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
masters = [p.detach().float().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=0.01)
data = torch.Generator().manual_seed(asked.seed)
with stability.record(model, optimizer, optional=True) as recorder:
    for _ in range(6):
        x, y = torch.randn(8, 6, generator=data), torch.randint(0, 4, (8,), generator=data)
        recorder.batch(x, y)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        recorder.step(loss)
