"""Every way to catch a call is open at once, in one model, with the same figures as alone."""

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from stability import attention_call, shadow
from tests.stability.intercept.test_coverage import CSA, Attention, Llama, Stack, _by_softmax
from tests.stability.intercept.test_library_functions import flash
from tests.stability.intercept.torch_models import train_step, unseen
from tests.stability.intercept.transformer_engine_stand_in import engine

__all__ = ["engine", "flash"]

WIDTH, HEADS = 32, 2
RESULTS = ("out", "dq", "dk", "dv")


def _flex(q, k, v, *, causal, scale=None):
    return flex_attention(q, k, v)


class _TokensFirst(Attention):
    """flash-attn and Transformer Engine take heads behind tokens."""

    def __init__(self, attend):
        super().__init__(WIDTH, HEADS)
        self.attend = attend

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        out = self.attend(q, k, v)
        return self.out(out if out.dim() == 3 else out.flatten(2))


@unseen
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_all_doors_are_open_at_once_and_the_seventh_kind_is_told(flash, engine, monkeypatch):
    # its backward runs on a CPU, too, but is not let
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.manual_seed(0)
    attend = engine(HEADS, WIDTH // HEADS, qkv_format="bshd")
    model = Stack(
        sdpa=Attention(WIDTH, HEADS),
        transformers=Llama(),
        flash_attn=_TokensFirst(lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True)),
        flex=CSA(_flex),
        engine=_TokensFirst(attend),
        wrapped=CSA(attention_call(_by_softmax)),
        by_hand=CSA(_by_softmax),
    )
    plain = copy.deepcopy(model)
    train_step(plain, 0)
    with shadow(model, "flash:golden", layers=["layers.*"]) as probe:
        train_step(model, 0)
        probe.step()
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert (own.grad is None) == (watched.grad is None)
        assert own.grad is None or torch.equal(own.grad, watched.grad)
    states = {one.layer.removeprefix("layers."): one.state for one in probe.coverage}
    assert states == {
        **dict.fromkeys(("sdpa", "flash_attn", "flex", "wrapped", "engine.attend"), "seen"),
        "transformers.inner.layers.0.self_attn": "seen",
        "by_hand": "not seen",
    }
    assert [layer for _, layer, _ in probe.findings] == ["layers.by_hand"]
    for layer in states.keys() - {"by_hand"}:
        for what in RESULTS:
            name = f"deviation/layers.{layer}/{what}/golden_baseline_rel_fro"
            assert 0 < probe.metrics[name] < 1e-6, name
