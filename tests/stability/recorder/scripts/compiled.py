"""A model that is compiled, or a whole step that is."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--backend", default="aot_eager")
flags.add_argument("--whole-step", action="store_true")
flags.add_argument("--in-place", action="store_true")
asked = flags.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


torch.manual_seed(asked.seed)
plain = Model()
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)


def loss_of(model, x, y):
    with torch.autocast("cpu", enabled=asked.bf16):
        return F.cross_entropy(model(x), y)


def step_of(x, y):
    return loss_of(plain, x, y)


if asked.whole_step:
    step_of = torch.compile(step_of, backend=asked.backend, fullgraph=True)
elif asked.in_place:
    plain.compile(backend=asked.backend, fullgraph=True)
else:
    model = torch.compile(plain, backend=asked.backend, fullgraph=True)
for _ in range(6):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    loss = step_of(x, y) if asked.whole_step or asked.in_place else loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = [x.detach().float().flatten() for x in plain.state_dict().values()]
print("weights", hashlib.sha256(torch.cat(state).numpy().tobytes()).hexdigest())
