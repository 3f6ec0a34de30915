"""A training whose samples are made by the workers of a DataLoader."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--workers", type=int, default=0)
flags.add_argument("--start", help="how a worker is started")


class Samples(Dataset[tuple[Tensor, int]]):
    """Samples that are drawn where they are loaded, each from its own seed."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


if __name__ == "__main__":
    asked = flags.parse_args()
    torch.manual_seed(asked.seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(
        Samples(),
        batch_size=6,
        shuffle=True,
        num_workers=asked.workers,
        multiprocessing_context=asked.start if asked.workers else None,
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
