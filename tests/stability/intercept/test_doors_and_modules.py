"""Modules are looked at in a model whose attention comes through any door, and nothing stays held.

The two instruments of one session must not meet: each sees its own calls.
"""

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from stability import attention_call, shadow
from tests.sampling import others_long

HEADS, HEAD_DIM, LENGTH = 2, 16, 24
SLOW = pytest.mark.slow
WIDTH = HEADS * HEAD_DIM

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
]


def by_hand(q, k, v):
    return torch.softmax(q @ k.mT / HEAD_DIM**0.5, -1) @ v


DOORS = {
    "sdpa": F.scaled_dot_product_attention,
    "flex_attention": flex_attention,
    "attention_call": attention_call(by_hand),
}


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.attend = attend
        self.outs = []

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        out = self.attend(*qkv)
        self.outs.append(weakref.ref(out))
        return self.mlp(out.transpose(1, 2).flatten(2)).square().sum()


def llama(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
    )
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("candidate", [None, "flash:golden"])
@pytest.mark.parametrize("door", DOORS)
def test_modules_are_seen_beside_each_door(door, candidate):
    model, x = Model(DOORS[door]), torch.randn(2, LENGTH, WIDTH)
    trains = door != "flex_attention"  # which has no backward on a CPU
    looked = {"modules": {"mlp": "emulated:bf16"}, "evaluation": True, "golden": True}
    with shadow(model, candidate, **looked) as probe, torch.set_grad_enabled(trains):
        loss = model(x)
        if trains:
            loss.backward()
        probe.step()
    seen = {name.split("/out/")[0] for name in probe.metrics if name.endswith("out/rel_fro")}
    both = {"deviation/mlp/emulated_bf16", "deviation/model/flash_golden"}
    assert seen == (both if candidate else {"deviation/mlp"})
    assert not probe.findings


@pytest.mark.parametrize("candidate", [None, "flash:golden"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_modules_are_seen_in_a_model_of_transformers(implementation, candidate):
    model, ids = llama(implementation), torch.arange(2 * LENGTH).view(2, LENGTH) % 40
    with shadow(model, candidate, modules={"*.mlp": "emulated:bf16"}) as probe:
        model(input_ids=ids, labels=ids).loss.backward()
        probe.step()
    seen = {name.split("/out/")[0] for name in probe.metrics if name.endswith("out/rel_fro")}
    layers = [f"deviation/model.layers.{layer}" for layer in range(2)]
    both = {f"{x}.mlp/emulated_bf16" for x in layers} | {
        f"{x}.self_attn/flash_golden" for x in layers
    }
    assert seen == (both if candidate else {f"{x}.mlp" for x in layers})
    assert not probe.findings


LOOKS = {
    "plain": {},
    "replaced": {"replace": ["*"]},
    "replaced in the backward": {"replace": ["*"], "direction": "backward"},
    "inherited": {"inherited": True},
    "forward alone": {"backward": False},
    "modules": {"modules": {"*mlp": "emulated:bf16"}},
}
SAMPLE = ("replaced", "inherited")
"""What CI runs."""


@SLOW
@pytest.mark.parametrize("look", others_long(LOOKS, slow=SAMPLE))
@pytest.mark.parametrize("door", ["sdpa", "attention_call"])
def test_no_result_of_an_attention_is_held_after_its_step(door, look):
    model, x = Model(DOORS[door]), torch.randn(2, LENGTH, WIDTH)
    with shadow(model, "flash:golden", golden=True, **LOOKS[look]) as probe:
        for _ in range(2):
            model(x).backward()
            probe.step()
            gc.collect()
            assert not [out for out in model.outs if out() is not None]


@SLOW
@pytest.mark.parametrize("look", others_long(LOOKS, slow=SAMPLE))
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_nor_of_an_attention_of_transformers(implementation, look):
    model, ids = llama(implementation), torch.arange(2 * LENGTH).view(2, LENGTH) % 40
    counts = []
    with shadow(model, "flash:golden", golden=True, **LOOKS[look]) as probe:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            probe.step()
            gc.collect()
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert counts[1] == counts[2]


@pytest.mark.parametrize("direction", ["both", "backward"])
def test_a_replaced_attention_of_transformers_has_no_weights_at_any_step(direction):
    """Those of the model's own, made on the side at a due step, would be another attention's."""
    model, ids, seen = llama("eager"), torch.arange(LENGTH)[None] % 40, []
    model.model.layers[0].self_attn.register_forward_hook(lambda *given: seen.append(given[2][1]))
    options = {"replace": ["*"], "direction": direction, "every": 2}
    with shadow(model, "flash:golden", **options) as probe:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            probe.step()
    assert seen == [None, None]
