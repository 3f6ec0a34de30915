"""Trains the model of train.py twice and saves checkpoints: two series for `stability adopt`.

The second series differs in the learning rate. Checkpoints of any training that has their step in
the name will do instead.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def train(folder: Path, lr: float, steps: int = 40) -> None:
    """Train a small network, and save its weights at each tenth step."""
    torch.manual_seed(0)
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
    train(Path("checkpoints/baseline"), lr=1e-3)
    train(Path("checkpoints/lr_x2"), lr=2e-3)
    print("checkpoints/baseline and checkpoints/lr_x2: weights at steps 0 to 40")
