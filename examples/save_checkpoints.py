"""Trains the model of train.py twice and saves checkpoints: two series for `stability adopt`.

The second series differs in the learning rate. Checkpoints of any training that has their step in
the name will do instead.

    python save_checkpoints.py          # checkpoints/baseline and checkpoints/lr_x2, of seed 0
    python save_checkpoints.py 1        # checkpoints/seed-1/..., of seed 1
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def train(folder: Path, lr: float, seed: int, steps: int = 40) -> None:
    """Train a small network, and save its weights at each tenth step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(steps + 1):
        if step % 10 == 0:
            torch.save(model.state_dict(), folder / f"step-{step}.pt")
        inputs, targets = torch.randn(16, 32), torch.randint(10, (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    place = Path("checkpoints") / f"seed-{seed}" if seed else Path("checkpoints")
    train(place / "baseline", lr=1e-3, seed=seed)
    train(place / "lr_x2", lr=2e-3, seed=seed)
    print(f"{place}/baseline and {place}/lr_x2: weights at steps 0 to 40")
