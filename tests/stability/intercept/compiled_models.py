"""Models to compile, their training, and an observer that copies what it is given."""

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stability.intercept.compiled_taps import compiled_taps
from tests.stability.intercept.torch_models import Decoder, train_step

inductor = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU"
)

# torch 2.13 itself uses what it deprecates, once Inductor is imported, and Dynamo reads `grad`.
COMPILES = [
    pytest.mark.usefixtures("one_thread_and_no_compiled_graphs"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ),
]


def decoder(depth=3, heads=4):
    torch.manual_seed(0)
    model = Decoder(depth=depth, heads=heads)
    # BatchNorm costs Inductor seconds, and its backward fails under aot_eager
    model.norm = nn.Identity()
    return model


class Checkpointed(nn.Module):
    """A decoder whose attentions are computed again in the backward pass."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.inner = decoder()
        self.use_reentrant = use_reentrant

    def forward(self, tokens):
        x = self.inner.embedding(tokens)
        for layer in self.inner.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.inner.head(x)


def compile_blocks(model, dynamic=None):
    for layer in getattr(model, "inner", model).layers:
        layer.compile(dynamic=dynamic)
    return model


def compile_forward(model):
    model.forward = torch.compile(model.forward)
    return model


class Seen:
    """What was observed: copies of the calls that train, the others, and what was missed."""

    def __init__(self):
        self.calls, self.passed, self.missed = [], [], []

    def call(self, observed):
        call, gradients = observed.call, observed.gradients
        if not call.trains:
            self.passed.append((call.layer, len(gradients)))
            return
        copies = [x.clone() for x in (call.q, call.k, call.v, observed.out, *gradients)]
        dout = None if observed.dout is None else observed.dout.clone()
        self.calls.append((call.layer, call.mask, copies, dout))

    def miss(self, layer, text):
        self.missed.append((layer, text))

    @property
    def layers(self):
        return [layer for layer, *_ in self.calls]


def train(model, compiled, taps=None, *, steps=4, micro_batches=1, precision=torch.float32):
    """Train; every second step is due."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        with taps.listening() if taps is not None and step % 2 == 0 else nullcontext():
            for micro_batch in range(micro_batches):
                train_step(compiled, 10 * step + micro_batch, precision)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def observe(model, compile_model, train=train, **options):
    """Return the weights of an unobserved run, those of an observed one, and what it saw."""
    twin, seen = copy.deepcopy(model), Seen()
    plain = train(model, compile_model(model), **options)
    torch.compiler.reset()
    with compiled_taps(twin, seen.call, seen.miss) as taps:
        watched = train(twin, compile_model(twin), taps, **options)
    return plain, watched, seen
