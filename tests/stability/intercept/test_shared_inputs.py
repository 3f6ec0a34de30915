"""What an attention is given may be one tensor twice, and be used elsewhere: no bit may change."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability import attention_call, shadow
from tests.sampling import one_in
from tests.stability.intercept.compiled_models import COMPILES, inductor

HEADS, HEAD_DIM, LENGTH, TILE = 2, 16, 32, 8
WIDTH = HEADS * HEAD_DIM


def by_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_hand(q, k, v):
    return torch.softmax(q @ k.mT / HEAD_DIM**0.5, -1) @ v


def in_tiles(q, k, v):
    """Take each of q, k and v many times."""
    outs = []
    for rows in q.split(TILE, dim=2):
        scores = [rows @ keys.mT / HEAD_DIM**0.5 for keys in k.split(TILE, dim=2)]
        weights = torch.cat(scores, -1).softmax(-1)
        parts = [weights[..., j : j + TILE] @ v[:, :, j : j + TILE] for j in range(0, LENGTH, TILE)]
        outs.append(sum(parts[1:], parts[0]))
    return torch.cat(outs, 2)


class Own(torch.autograd.Function):
    """An attention that is one node of the graph."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return by_hand(q, k, v)

    @staticmethod
    def backward(ctx, *grads):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(by_hand(*leaves), leaves, grads[0])


ATTENTIONS = {"sdpa": by_sdpa, "by hand": by_hand, "in tiles": in_tiles, "a node": Own.apply}

USES = {
    "each its own": lambda a, x, q, k, v: a(q, k, v),
    "k is used later": lambda a, x, q, k, v: a(q, k, v) + torch.tanh(k),
    "all are used later": lambda a, x, q, k, v: a(q, k, v) + q.sin() + k.sin() + v.sin(),
    "all are used before": lambda a, x, q, k, v: q.sin() + k.sin() + v.sin() + a(q, k, v),
    "two calls": lambda a, x, q, k, v: a(q, k, v) + a(v, q, k),
    "k is v": lambda a, x, q, k, v: a(q, k, k),
    "k is v, and used later": lambda a, x, q, k, v: a(q, k, k) + torch.tanh(k) + (2 * k).sin(),
    "all are one": lambda a, x, q, k, v: a(q, q, q),
    "all are one, used before and later": lambda a, x, q, k, v: (
        q.sin() + a(q, q, q) + torch.tanh(q)
    ),
    "slices of one": lambda a, x, q, k, v: a(*x.chunk(3, -1)),
    "slices of one that is used later": lambda a, x, q, k, v: (
        a(*x.chunk(3, -1)) + x.sin().unflatten(-1, (3, HEAD_DIM)).sum(-2)
    ),
}


class Sharing(nn.Module):
    """An attention whose inputs come and are used as `use` says."""

    def __init__(self, attend, use):
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.together = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend, self.use = attend, use

    def forward(self, x):
        q, k, v = (self._heads(project(x)) for project in self.projections)
        return self.use(self.attend, self._heads(self.together(x)), q, k, v)

    def _heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gradients(model, own=None):
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return {name: x.grad for name, x in (own or model).named_parameters() if x.grad is not None}


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("use", one_in(3, USES))
def test_a_look_changes_no_bit_whatever_is_shared(use, attend):
    function = ATTENTIONS[attend]
    plain = gradients(Sharing(function, USES[use]))
    watched = Sharing(function if attend == "sdpa" else attention_call(function), USES[use])
    with shadow(watched, "flash:golden", golden=True) as probe:
        found = gradients(watched)
        probe.step()
    assert plain.keys() == found.keys()
    for name, gradient in plain.items():
        assert gradient.equal(found[name]), name
    # what is measured is right, and what is not is told
    told = {text.split(" not measured")[0] for _, _, text in probe.findings}
    shared = {"k is v": "dk, dv", "all are one": "dq, dk, dv"}.get(use.split(",")[0], "")
    assert told == ({shared} if shared and attend != "sdpa" else set())
    for layer in probe.layers:
        for result in {"out", "dq", "dk", "dv"} - {x for y in told for x in y.split(", ")}:
            for whose in ("candidate", "baseline"):
                figure = probe.metrics[f"deviation/{layer}/{result}/golden_{whose}_rel_fro"]
                assert figure < 1e-6, (layer, result, whose)


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
@pytest.mark.parametrize("use", ["all are used later", "k is v, and used later"])
def test_nor_does_a_look_at_a_replaced_attention(use, direction):
    found = []
    for steps in ([0], [1]):
        model = Sharing(attention_call(in_tiles), USES[use])
        replaced = {"replace": ["*"], "direction": direction, "steps": steps}
        with shadow(model, "flash:fa2", golden=True, **replaced) as probe:
            found.append(gradients(model))
            probe.step()
    assert all(gradient.equal(found[1][name]) for name, gradient in found[0].items())


@inductor
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread_and_no_compiled_graphs")
@pytest.mark.parametrize("use", [pytest.param(use, marks=COMPILES[1:]) for use in USES])
def test_nor_a_look_at_a_compiled_model(use):
    models = [Sharing(by_sdpa, USES[use]) for _ in range(2)]
    plain = gradients(torch.compile(models[0]), models[0])
    with shadow(models[1], "flash:golden", golden=True) as probe:
        torch.compiler.reset()
        found = gradients(torch.compile(models[1]), models[1])
        probe.step()
    assert all(gradient.equal(found[name]) for name, gradient in plain.items())
    for result in ("out", "dq", "dk", "dv"):
        assert probe.metrics[f"deviation/model/{result}/golden_baseline_rel_fro"] < 1e-6
