"""A model that is given its own state again, and two models that train one another."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--adversaries", action="store_true")
asked = flags.parse_args()

torch.manual_seed(asked.seed)
torch.backends.mkldnn.set_flags(False)  # it has no LSTM in BF16 on a CPU without AVX-512


def recurrent():
    model = nn.LSTM(4, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for _ in range(6):
        x = torch.randn(3, 5, 4)
        with torch.autocast("cpu", enabled=asked.bf16):
            out, state = model(x) if state is None else model(x, state)
        state = tuple(each.detach() for each in state)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


class Generator(nn.Sequential):
    pass


class Critic(nn.Sequential):
    pass


def adversaries():
    generator = Generator(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    critic = Critic(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for _ in range(6):
        real, noise = torch.randn(5, 4), torch.randn(5, 3)
        with torch.autocast("cpu", enabled=asked.bf16):
            fake = generator(noise).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        with torch.autocast("cpu", enabled=asked.bf16):
            loss = F.softplus(-critic(generator(noise))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
    return [generator, critic]


models = adversaries() if asked.adversaries else recurrent()
weights = torch.cat([x.detach().flatten() for model in models for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
