"""Finding a bug in a kernel of one's own, with no change to this repository.

Claim: shadowing a model with the kernel in `own_kernel/` names the head whose last keys it skips,
in every layer, and says nothing of the same kernel without the bug.
Varies: the kernel, right or with one head that skips a short last block of keys.
Measured: error ratio against FP64 of out, dq, dk and dv, for each layer and head, in training.
Refuted if: the bug is not named, is named elsewhere, or the right kernel is accused.

    python experiments/find_own_kernel.py      # about 10 s on 2 CPU cores
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability import shadow
from stability.analysis.locate import Located, locate, sentences
from stability.records.metric_columns import Series

sys.path.insert(0, str(Path(__file__).parent / "own_kernel"))

LAYERS, WIDTH, HEADS, LENGTH, STEPS = 3, 64, 4, 80, 3


class Layer(nn.Module):
    """Causal self-attention, as anybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and add to the stream."""
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def look_at(kernel: str) -> list[Located]:
    """Train a small model beside `kernel` and return where it stands out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, WIDTH), *(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    series: dict[str, Series] = {}

    def keep(step: int, measured) -> None:
        for name, value in measured.metrics.items():
            found = series.setdefault(name, Series())
            found.steps.append(step)
            found.values.append(value)

    with shadow(model, kernel, heads=True, sinks=[keep]) as probe:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randint(0, 64, (4, LENGTH))).square().mean().backward()
            optimizer.step()
            probe.step()
        assert not probe.findings, probe.findings
    return locate(series)


def main() -> int:
    """Print what is found in each kernel; 0 if the bug is named and nothing else is."""
    right, wrong = look_at("own_kernel:attend"), look_at("own_kernel:attend_without_tail")
    for name, found in (("attend", right), ("attend_without_tail", wrong)):
        sys.stdout.write(f"{name}\n")
        for line in sentences(found) or ["no layer or head stands out"]:
            sys.stdout.write(f"  {line}\n")
    named = {str(each.place) for each in wrong}
    expected = {f"{index + 1}, head 1" for index in range(LAYERS)}
    return 0 if not right and named == expected else 1


if __name__ == "__main__":
    sys.exit(main())
