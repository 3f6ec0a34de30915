"""What recording a training costs, on this machine: a GPT of 12 million weights in plain PyTorch.

    PYTHONPATH=.:kernels python benchmarks/recorder.py

Updates are timed in turn with the recorder's hooks in the process and without: what the model was
given is hashed, losses are kept, and rows are written as in any run. No state falls due. Printed
are the median update of each, and the median of the ratios of neighbours; then what an update costs
whose products are looked at for the witness, a few of a training. Exit code 1 where the recorder
costs more than 3 % of an update that is not looked at.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.probe.executed import Executed
from stability.recorder.inside.evaluations import Evaluations
from stability.recorder.inside.hooks import install
from stability.recorder.inside.looks import Looks
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training

LIMIT = 0.03
DEPTH, WIDTH, HEADS, CONTEXT = 6, 384, 6, 256
"""As of nanoGPT's character model: 10.7 million weights in the blocks."""


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of `x`, (batch, tokens, width)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def model(vocabulary: int) -> nn.Module:
    """Return a language model without positions, which cost nothing to leave out here."""
    blocks = [Block() for _ in range(DEPTH)]
    return nn.Sequential(
        nn.Embedding(vocabulary, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
    )


def main() -> int:
    """Time both, and print the ratio."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--pairs", type=int, default=40)
    flags.add_argument("--looks", type=int, default=10)
    flags.add_argument("--batch", type=int, default=2)
    asked = flags.parse_args()
    torch.manual_seed(0)
    gpt = model(1536)
    optimizer = torch.optim.AdamW(gpt.parameters())
    count = sum(weight.numel() for weight in gpt.parameters())

    def update() -> None:
        tokens = torch.randint(0, 1536, (asked.batch, CONTEXT + 1))
        logits = gpt(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        training = Training(Spool(folder, 0), due=lambda step: False, evaluations=Evaluations())
        training.add_optimizer(optimizer)
        for _ in range(4):
            update()
        recorded(training, update)  # its first update also takes the start state
        pairs = [
            (timed(lambda: recorded(training, update)), timed(update)) for _ in range(asked.pairs)
        ]
        looks = [
            timed(lambda: recorded(training, update, is_looked_at=True)) for _ in range(asked.looks)
        ]
        training.end("exit")
        hashed = training.step
    cost = statistics.median(on / off for on, off in pairs) - 1
    on, off = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{count / 1e6:.1f} M weights, {asked.batch} x {CONTEXT} tokens, {torch.get_num_threads()} "
        f"threads, {hashed} updates recorded"
    )
    print(f"an update: {off * 1e3:.1f} ms, recorded {on * 1e3:.1f} ms: {cost:+.2%}")
    look = statistics.median(looks)
    print(f"looked at: {look * 1e3:.1f} ms: {look / off - 1:+.2%}")
    return int(cost > LIMIT)


def recorded(training: Training, update: Callable[[], None], *, is_looked_at: bool = False) -> None:
    """Make an update with the hooks in place."""
    uninstall = install(training)
    looks = Looks(training, Executed, lambda step: is_looked_at)
    looks.begin()
    try:
        update()
    finally:
        looks.end()
        uninstall()


def timed(call: Callable[[], None]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
