"""A training that saves a checkpoint of all it needs, and goes on from one."""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--lr", type=float, default=0.01)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--steps", type=int, default=6)
flags.add_argument("--save", default="")
flags.add_argument("--resume", default="")
asked = flags.parse_args()

torch.manual_seed(asked.seed)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
start = 0
if asked.resume:
    if Path(asked.resume).is_dir():
        dcp_to_torch_save(asked.resume, f"{asked.resume}.pt")
        asked.resume += ".pt"
    saved = torch.load(asked.resume, weights_only=True)
    # DCP's keys are texts
    saved["optimizer"]["state"] = {int(x): y for x, y in saved["optimizer"]["state"].items()}
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.param_groups[0]["lr"] = asked.lr
    start = saved["step"]
    torch.set_rng_state(saved["random"])
for step in range(start, start + asked.steps):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}")
if asked.save:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": start + asked.steps,
        "random": torch.get_rng_state(),
    }
    torch.save(state, asked.save)
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
