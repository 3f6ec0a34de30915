"""A training as anybody writes it."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--lr", type=float, default=1e-2)
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--data-seed", type=int)
flags.add_argument("--steps", type=int, default=12)
flags.add_argument("--width", type=int, default=16)
flags.add_argument("--blow-up", action="store_true")
asked = flags.parse_args()

torch.manual_seed(asked.seed)
model = nn.Sequential(
    nn.Embedding(50, asked.width), nn.Linear(asked.width, 32), nn.Tanh(), nn.Linear(32, 50)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
data = torch.Generator().manual_seed(asked.seed if asked.data_seed is None else asked.data_seed)
for step in range(asked.steps):
    tokens = torch.randint(0, 50, (8, 10), generator=data)
    with torch.autocast("cpu", enabled=asked.bf16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if asked.blow_up and step > 3:
        loss = loss * float("inf")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
