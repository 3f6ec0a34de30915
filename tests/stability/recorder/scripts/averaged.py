"""A moving average of the weights, and evaluation between the steps."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--evaluate-every", type=int, default=2)
asked = flags.parse_args()

torch.manual_seed(asked.seed)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
held_out = torch.ones(5, 6)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    if step % asked.evaluate_every == 0:
        model.eval()
        with torch.no_grad():
            print("held out", model(held_out).sum().item(), average(held_out).sum().item())
        model.train()
both = [*model.state_dict().values(), *average.module.state_dict().values()]
state = [x.detach().float().flatten() for x in both]
print("weights", hashlib.sha256(torch.cat(state).numpy().tobytes()).hexdigest())
