"""How `shadow` ends: in any way, nothing stays behind and nothing goes unsaid or out of order."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability import shadow
from stability.intercept import session
from stability.intercept.forgotten_step import FORGOTTEN
from stability.probe.probe_recorder import ProbeRecorder
from tests.stability.intercept.torch_models import Decoder, tokens, train_step

LIBRARY = F.scaled_dot_product_attention


def _nothing_is_left(model):
    train_step(model, 0)
    hooks = torch.nn.modules.module._global_forward_hooks
    return F.scaled_dot_product_attention is LIBRARY and not hooks


@pytest.mark.parametrize("replace", [(), ("layers.1",)], ids=["beside", "in its place"])
def test_a_sink_that_raises_at_the_end_leaves_nothing_open(replace):
    model = Decoder()

    def sink(step, measured):
        raise OSError("no space left")

    with (
        pytest.raises(OSError, match="no space left"),
        shadow(model, replace=replace, sinks=[sink]),
    ):
        train_step(model, 0)
    assert _nothing_is_left(model)
    with shadow(model) as probe:  # and another session sees what it would
        train_step(model, 0)
        probe.step()
        assert probe.coverage[1].state == "seen"


def test_a_sink_that_raises_at_the_end_lets_the_record_be_ended(tmp_path):
    model = Decoder()

    def sink(step, measured):
        raise OSError("no space left")

    with (
        pytest.raises(OSError, match="no space left"),
        shadow(model, records=tmp_path, sinks=[sink]),
    ):
        train_step(model, 0)
    (described,) = tmp_path.glob("*.json")
    assert json.loads(described.read_text())["layers"] == ["layers.0", "layers.1", "layers.2"]


def test_a_record_that_cannot_be_begun_leaves_nothing_open(tmp_path, monkeypatch):
    def describe(*arguments):
        raise OSError("read-only")

    monkeypatch.setattr(ProbeRecorder, "describe", describe)
    model = Decoder()
    with pytest.raises(OSError, match="read-only"), shadow(model, records=tmp_path):
        pass
    assert _nothing_is_left(model)


def test_a_session_that_cannot_begin_leaves_nothing_open(monkeypatch):
    def catch(*arguments, **keywords):
        raise RuntimeError("another mode is on")

    monkeypatch.setattr(session, "catch_attention", catch)
    model = Decoder()
    with pytest.raises(RuntimeError, match="another mode"), shadow(model):
        pass
    assert _nothing_is_left(model)


class _Diverged(Decoder):
    """Has weights that are not numbers from step `since` on."""

    def __init__(self, since):
        super().__init__()
        self.since, self.step = since, 0

    def forward(self, x):
        if self.step >= self.since:
            with torch.no_grad():
                for parameter in self.layers.parameters():
                    parameter.fill_(torch.nan)
        return super().forward(x)


def test_what_measurements_tell_is_of_the_step_they_are_of():
    model, told = _Diverged(since=2), []
    with shadow(model, every=2, sinks=[lambda *one: told.append(one)]) as probe:
        for step in range(6):
            model.step = step
            train_step(model, step)
            probe.step()
    of_values = {step for step, _, text in probe.findings if "model's own out" in text}
    assert of_values == {2}
    assert {step for step, _ in told} == {0, 2, 4}


def test_sinks_are_given_all_in_the_order_of_steps():
    """A step of evaluation alone is told of while the step before is still on its way."""
    model, order = Decoder(), []
    with shadow(model, sinks=[lambda step, _: order.append(step)]) as probe:
        for step in range(3):
            model.train(step != 1)
            train_step(model, step)
            probe.step()
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}
    assert any("evaluation" in text for step, _, text in probe.findings if step == 1)


class _ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 8**0.5).softmax(-1) @ v


def _loop_without_step(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shadow(model, **options) as probe:
        model(torch.randn(2, 5, 8)).sum().backward()
        optimizer.step()
    return probe


@pytest.mark.filterwarnings("ignore:shadow. the weights were updated:UserWarning")
def test_a_loop_that_never_calls_step_is_told_of_what_is_not_seen():
    with pytest.raises(ValueError, match="no attention of _ByHand is seen"):
        _loop_without_step(_ByHand())
    modules = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"modules.*'3\*'"):
        _loop_without_step(modules, modules={"3*": "emulated:e4m3"})


@pytest.mark.filterwarnings("ignore:shadow. the weights were updated:UserWarning")
def test_a_module_that_one_step_never_called_is_told_of_at_the_end():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    probe = _loop_without_step(Branch(), modules={"*used": "emulated:e4m3"})
    assert [layer for _, layer, text in probe.findings if "it was not called" in text] == ["unused"]


def test_evaluation_alone_is_refused_at_the_end():
    model = Decoder().eval()
    with pytest.raises(ValueError, match="evaluation=True"), shadow(model):
        model(tokens(0))


def test_an_evaluation_after_the_last_step_is_nothing_to_tell_of():
    model = Decoder()
    with shadow(model) as probe:
        train_step(model, 0)
        probe.step()
        model.eval()
        with torch.no_grad():
            model(tokens(0))
    assert not probe.findings


def test_an_error_of_the_training_is_not_hidden():
    def train():
        with shadow(model):
            model(tokens(0))
            raise RuntimeError("out of memory")

    model = Decoder().eval()
    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    assert _nothing_is_left(model)


@pytest.mark.filterwarnings("ignore:shadow. the weights were updated:UserWarning")
def test_a_step_that_is_not_due_is_not_missed_at_the_end():
    findings = _loop_without_step(_ByHand(), steps=[100]).findings
    assert [text for _, _, text in findings] == [FORGOTTEN]
