"""A model that is compiled, or its loss with it, or a whole update."""

import argparse
import functools
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--backend", default="aot_eager")
flags.add_argument("--plain", action="store_true", help="compile nothing")
flags.add_argument("--uneven", action="store_true", help="some batches have fewer samples")
flags.add_argument("--whole-step", action="store_true", help="compile the loss with the model")
flags.add_argument("--whole-update", action="store_true", help="the optimizer's step too")
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


def update(x, y):
    step_of(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


if asked.plain:
    pass
elif asked.whole_update:
    update = torch.compile(update, backend=asked.backend)
elif asked.whole_step:
    step_of = torch.compile(step_of, backend=asked.backend, fullgraph=True)
elif asked.in_place:
    plain.compile(backend=asked.backend, fullgraph=True)
else:
    model = torch.compile(plain, backend=asked.backend, fullgraph=True)
    step_of = functools.partial(loss_of, model)
for size in (8, 8, 3, 8, 5, 3) if asked.uneven else (8,) * 6:
    update(torch.randn(size, 6), torch.randint(0, 4, (size,)))
state = [x.detach().float().flatten() for x in plain.state_dict().values()]
print("weights", hashlib.sha256(torch.cat(state).numpy().tobytes()).hexdigest())
