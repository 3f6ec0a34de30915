"""Transformer Engine's attention in a session: beside others, compiled, replaced, or not read."""

import copy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from stability import shadow
from stability.analysis.locate import locate
from stability.analysis.probe_records import read_probe
from tests.stability.intercept.families.planted import FAULTS, Planted
from tests.stability.intercept.test_coverage import CSA, Attention, _by_softmax
from tests.stability.intercept.torch_models import unseen
from tests.stability.intercept.transformer_engine_models import (
    GROUPS,
    HEADS,
    LENGTH,
    PACKED,
    WIDTH,
    Model,
    inputs,
    lengths,
    looked,
    loss_of,
)
from tests.stability.intercept.transformer_engine_stand_in import (
    PLACE,
    FP8GlobalStateManager,
    engine,
)

__all__ = ["engine"]


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("packed", ["qkv_layer", "kv_layer"])
def test_q_k_and_v_may_come_in_one_tensor(engine, packed, dim):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * HEADS * WIDTH)
            self.attend = engine(HEADS, WIDTH)

        def forward(self, x):
            shape = (3, HEADS, WIDTH) if dim == -3 else (HEADS, 3, WIDTH)
            qkv = self.qkv(x).unflatten(-1, shape)
            if packed == "qkv_layer":
                return self.attend(qkv_layer=qkv, qkv_interleave_dim=dim)
            q, kv = qkv.select(dim, 0), qkv.narrow(dim, 1, 2)
            return self.attend(q, kv_layer=kv, qkv_interleave_dim=dim)

    torch.manual_seed(0)
    model = Packed()
    plain = copy.deepcopy(model)
    loss_of(plain(inputs("sbhd"))).backward()
    with shadow(model, "flash:golden") as probe:
        loss_of(model(inputs("sbhd"))).backward()
        probe.step()
    assert torch.equal(plain.qkv.weight.grad, model.qkv.weight.grad)
    assert not probe.findings
    for what in ("out", "dq", "dk", "dv"):
        assert probe.metrics[f"deviation/attend/{what}/golden_baseline_rel_fro"] < 1e-6


def _unsupported(name):
    """Return the settings of a module, the arguments of a call, and what is said of it."""
    settings, call = {}, {}
    if name == "dropout":
        settings, text = {"attention_dropout": 0.1}, "dropout_p 0.1; a shadow would drop other"
    elif name == "context parallelism":
        settings, text = {"cp_group": SimpleNamespace()}, "context parallelism (cp_group): a rank"
    elif name == "pre_scale_bias":
        call, text = {"core_attention_bias_type": name}, "core_attention_bias_type 'pre_scale_bias'"
    elif name == "FP8":
        text = "FP8 attention (a recipe with fp8_dpa or fp8_mha)"
    elif name == "inference_params":
        call, text = {name: object()}, "the argument inference_params of DotProductAttention"
    elif name == "a packed bias":
        settings = {"qkv_format": "thd", "attn_mask_type": "padding"}
        call = {**PACKED, "core_attention_bias_type": "post_scale_bias"}
        text = "core_attention_bias_type 'post_scale_bias' of packed sequences"
    elif name == "ALiBi of other lengths":
        settings = {"attn_mask_type": "padding", "attention_type": "cross"}
        call = {"cu_seqlens_q": lengths(7, 9), "cu_seqlens_kv": lengths(8, 9)}
        call["core_attention_bias_type"] = "alibi"
        text = "ALiBi of more keys than queries in padded sequences"
    else:
        settings = {"attn_mask_type": "arbitrary"}
        call = {"attention_mask": torch.zeros(1, 1, 1, LENGTH, dtype=torch.uint8)}
        text = "an attention_mask that is not bool"
    return settings, call, text


@unseen
@pytest.mark.parametrize(
    "name",
    [
        *("dropout", "context parallelism", "pre_scale_bias", "FP8", "inference_params"),
        *("a packed bias", "ALiBi of other lengths", "a mask of bytes"),
    ],
)
def test_what_cant_be_repeated_is_a_finding_and_changes_nothing(engine, name, monkeypatch):
    settings, call, text = _unsupported(name)
    if name == "FP8":
        recipe = SimpleNamespace(fp8_dpa=True, fp8_mha=False)
        monkeypatch.setattr(FP8GlobalStateManager, "recipe", recipe)
        monkeypatch.setattr(FP8GlobalStateManager, "enabled", True)
    torch.manual_seed(0)
    model = Model(engine(HEADS, WIDTH, GROUPS, **settings), call)
    plain = copy.deepcopy(model)
    x = inputs(settings.get("qkv_format", "sbhd"))
    torch.manual_seed(1)
    expected = plain(x)
    loss_of(expected).backward()
    with shadow(model) as probe:
        torch.manual_seed(1)
        out = model(x)
        loss_of(out).backward()
        probe.step()
    assert torch.equal(expected, out)
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert own.grad is None or torch.equal(own.grad, watched.grad)
    (finding,) = probe.findings
    assert finding[:2] == (0, "attend")
    assert finding[2].startswith(f"not looked at: {text}")
    assert [one.state for one in probe.coverage] == ["seen in part"]
    assert text in probe.coverage[0].why


def test_linear_layers_in_fp8_leave_attention_seen(engine, monkeypatch):
    monkeypatch.setattr(FP8GlobalStateManager, "enabled", True)
    looked(engine(HEADS, WIDTH, GROUPS), {}, inputs("sbhd"))


def test_an_error_of_the_library_is_its_own(engine):
    model = Model(engine(HEADS, WIDTH, GROUPS, qkv_format="thd"), PACKED)
    with pytest.raises(AssertionError, match="thd needs a padding mask"), shadow(model):
        model(inputs("thd"))


def test_a_fault_in_one_head_of_the_library_is_seen_there(engine):
    attend = engine(HEADS, WIDTH, GROUPS)
    torch.manual_seed(0)
    model = Model(attend)
    attend.fault = (1.0, 1.001)
    with shadow(model, "flash:golden", heads=True) as probe:
        loss_of(model(inputs("sbhd"))).backward()
        probe.step()
    for what in ("out", "dq"):
        name = f"deviation/attend/head_{{}}/{what}/rel_fro"
        errors = [probe.metrics[name.format(head)] for head in range(HEADS)]
        assert [error > 1e-5 for error in errors] == [False, True, False, False], what


def test_a_candidate_that_errs_in_one_head_is_named_there(engine, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Beside(engine), Beside(engine))
    candidate = Planted("scale_1.001", FAULTS[torch.float32]["scale_1.001"], head=1)
    with shadow(model, candidate, heads=True, records=tmp_path / "probe") as probe:
        for _ in range(12):
            model(torch.randn(2, LENGTH, 32)).square().sum().backward()
            probe.step()
            candidate.begin_step()
    places = locate(read_probe(tmp_path / "probe").metrics)
    assert {place.place.layer for place in places} == {"1.core"}
    assert {place.place.head for place in places} == {1}
    assert {"out", "dq"} <= {place.what for place in places}


def test_a_candidate_may_compute_in_its_place(engine):
    torch.manual_seed(0)
    model = Model(engine(HEADS, WIDTH, GROUPS, qkv_format="bshd"))
    plain = copy.deepcopy(model)
    expected = plain(inputs("bshd"))
    loss_of(expected).backward()
    with shadow(model, "flash:fa2", replace=["attend"]) as probe:
        out = model(inputs("bshd"))
        loss_of(out).backward()
        probe.step()
    assert out.shape == expected.shape
    assert 0 < (out - expected).norm() / expected.norm() < 1e-2
    own, replaced = plain.q.weight.grad, model.q.weight.grad
    assert 0 < (own - replaced).norm() / own.norm() < 1e-2


class Beside(nn.Module):
    """The library's attention as one layer of several kinds."""

    def __init__(self, engine):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.core = engine(2, 16, qkv_format="bshd")

    def forward(self, x):
        return self.core(*(t.unflatten(-1, (2, -1)) for t in self.qkv(x).chunk(3, -1)))


@unseen
def test_it_is_listed_beside_other_kinds_of_attention(engine):
    torch.manual_seed(0)
    model = nn.Sequential(Beside(engine), Attention(32, 2), CSA(_by_softmax))
    with shadow(model) as probe:
        model(torch.randn(2, LENGTH, 32)).sum().backward()
        probe.step()
    assert {one.layer: one.state for one in probe.coverage} == {
        "0.core": "seen",
        "1": "seen",
        "2": "not seen",
    }
    assert "deviation/0.core/dq/rel_fro" in probe.metrics


def test_nested_shadows_both_see_it_and_a_copy_carries_nothing(engine):
    model = Beside(engine)
    with shadow(model, "sdpa") as outer, shadow(model, "sdpa") as inner:
        twin = copy.deepcopy(model)
        model(torch.randn(2, LENGTH, 32)).sum().backward()
        inner.step()
        outer.step()
    assert inner.layers == outer.layers == ("core",)
    assert inner.metrics == outer.metrics
    assert "forward" not in vars(twin.core)


def test_it_is_seen_where_it_is_imported_after_the_shadow_was_opened(engine, monkeypatch):
    names = [name for name in sys.modules if name.startswith("transformer_engine")]
    modules = {name: sys.modules[name] for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    model = nn.Sequential(Attention(32, 2))
    with shadow(model, steps=[1]) as probe:
        sys.modules |= modules
        model.append(Beside(sys.modules[PLACE].DotProductAttention))
        probe.step()
        model(torch.randn(2, LENGTH, 32)).sum().backward()
        probe.step()
    assert {one.layer: one.state for one in probe.coverage} == {"0": "seen", "1.core": "seen"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("recursive", [True, False])
def test_under_a_compiler_it_is_seen_or_told_and_computes_the_same(engine, recursive):
    def step(model):
        x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def model():
        torch.manual_seed(0)
        torch.compiler.reset()
        return torch.compile(nn.Sequential(Beside(engine)), backend="aot_eager")

    disabled = torch.compiler.disable(engine.forward, recursive=recursive)
    with mock.patch.object(engine, "forward", disabled):
        expected = step(model())
        with shadow(watched := model()) as probe:
            found = step(watched)
            if recursive:
                probe.step()
                assert [one.state for one in probe.coverage] == ["seen"]
            else:
                with pytest.raises(ValueError, match="core: not seen: DotProductAttention did n"):
                    probe.step()
    assert all(torch.equal(own, watched) for own, watched in zip(expected, found, strict=True))
