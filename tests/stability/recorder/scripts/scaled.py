"""Micro-batches that are added up, and a loss scaler that skips a step."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--micro", type=int, default=2)
asked = flags.parse_args()

torch.manual_seed(asked.seed)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(6):
    x = torch.randn(8, 6)
    for part in x.chunk(asked.micro):
        with torch.autocast("cpu", enabled=asked.bf16):
            loss = F.mse_loss(model(part).float(), part.sum(1, keepdim=True)) / asked.micro
        scaler.scale(loss * float("inf") if step == 3 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
