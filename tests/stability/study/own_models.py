"""Models of a user's own, for studies in tests: one that is right, and some that are wrong."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.heads, self.attention = config.heads, attention
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        )
        out = self.attention(q, k, v, causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)).relu()


class Small(nn.Module):
    """Tied output, no positions, and an option of its own."""

    def __init__(self, config, attention):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.width)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(config, one) for one in attention)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.gain = config.options.get("gain", 1.0)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain


def build(config, attention):
    return Small(config, attention)


def deaf(config, attention):
    """Attend by its own means."""

    def own(q, k, v, causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Small(config, [own] * len(attention))


def half_deaf(config, attention):
    return Small(config, [attention[0]] * len(attention))


def looking_ahead(config, attention):
    class Mixed(Small):
        def forward(self, tokens):
            return super().forward(tokens) + self.embed(tokens).mean()

    return Mixed(config, attention)


def unmasked(config, attention):
    return Small(config, [lambda q, k, v, causal, one=one: one(q, k, v) for one in attention])


def wide(config, attention):
    class Wide(Small):
        def forward(self, tokens):
            return super().forward(tokens).repeat(1, 1, 2)

    return Wide(config, attention)


def infinite(config, attention):
    model = Small(config, attention)
    model.gain = torch.inf
    return model


def raising(config, attention):
    raise RuntimeError("no such luck")


def failing(config, attention):
    class Failing(Small):
        def forward(self, tokens):
            raise RuntimeError("out of order")

    return Failing(config, attention)


def nothing(config, attention):
    return None


def measured(config, attention):
    model = Small(config, attention)
    model.gain = 1.0 / (1.0 + model.embed.weight.abs().max().item())
    return model
