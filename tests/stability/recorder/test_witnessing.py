"""The witness in a training of anybody's: what an optimizer casts by itself is told apart."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from stability.probe.known_answers import known_answers
from stability.recorder import witnessing
from stability.recorder.inside.witness import InsideWitness
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import WitnessError, Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog
from stability.records.numeric_switches import all_switches, numeric_switches
from stability.records.run_files import RunFiles
from stability.records.witness import Label

LABEL = Label(arm="mine", precision="32-true", implementation="baseline")


class _Module(LightningModule):
    """One linear layer, trained by the optimizer that it is given."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(9, 5, bias=False)
        self._optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.layer(batch.float() / 11).square().mean()

    def configure_optimizers(self):
        return self._optimizer(self.parameters())


def _muon(parameters):
    return torch.optim.Muon(parameters, lr=1e-2)


def _adamw(parameters):
    return torch.optim.AdamW(parameters)


@pytest.fixture
def door(tmp_path):
    """Return a function that makes the door of a module's training, and what bears witness."""
    log = MetricLog(tmp_path / "updates.jsonl")

    def make(module):
        witnessing = Witnessing(module, 4, before=numeric_switches(), label=LABEL)
        writer = RunWriter(RunFiles.unnamed(tmp_path), log)
        return TrainerDoor(writer, module, [], witnessing), witnessing

    yield make
    log.close()


@pytest.fixture
def trained(fit, door, tmp_path):
    """Return a function that trains with an optimizer: the module, and what was witnessed."""

    def train(optimizer, *, witnessed=True, **options):
        module = _Module(optimizer)
        told, witnessing = door(module)
        trainer = fit(tmp_path, module, [told] if witnessed else [], 4, **options)
        if witnessed:
            told.end(trainer)
        return module, witnessing.witness

    return train


@pytest.mark.parametrize("optimizer", [_muon, _adamw])
def test_what_an_optimizer_casts_by_itself_is_recorded_apart(trained, optimizer):
    module, witness = trained(optimizer)
    by_part = {
        part: {dtype for row in witness.rows if row.part == part for dtype in row.operands}
        for part in ("linear", "optimizer")
    }
    assert by_part["linear"] == {"float32"}
    # Muon's Newton-Schulz iteration runs in BF16, AdamW multiplies no matrices
    assert by_part["optimizer"] == ({"float32", "bfloat16"} if optimizer is _muon else set())
    plain, _ = trained(optimizer, witnessed=False)
    assert torch.equal(module.layer.weight, plain.layer.weight)


def test_the_first_micro_batch_alone_is_looked_at_where_gradients_are_accumulated(trained):
    module, witness = trained(_muon, accumulate_grad_batches=2)
    assert witness.all[0].steps == [0, 1, 3]
    assert "optimizer" in {row.part for row in witness.rows}
    assert not module.layer._forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.fixture
def settles_at_first(monkeypatch):
    """Return known answers of a GPU whose first attention puts cuDNN first, as torch does there."""
    order = torch._C._get_sdp_priority_order()

    def answers(device):
        torch._C._set_sdp_priority_order([order[-1], *order[:-1]])
        return known_answers(device)

    yield answers
    torch._C._set_sdp_priority_order(order)


def test_what_torch_settles_at_a_first_call_is_no_change_of_a_switch(
    trained, settles_at_first, monkeypatch
):
    monkeypatch.setattr(witnessing, "known_answers", settles_at_first)
    _, witness = trained(_adamw)
    (stretch,) = witness.all
    assert stretch.switches["at_start"] == stretch.switches["at_end"]


def test_nor_in_the_process_of_a_script(settles_at_first):
    looks = SimpleNamespace(end=lambda: None, unproven="", steps=[], rows=[])
    witness = InsideWitness(looks, all_switches, settles_at_first, {})
    witness.begin({})
    switches = witness.told()["witness"]["switches"]
    assert switches["at_start"] == switches["at_end"]


def test_a_training_that_fails_leaves_no_mode_and_no_hook_behind(fit, door, tmp_path):
    module = _Module(_adamw)
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module, [door(module)[0]], 4)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not module.layer._forward_hooks


def test_a_layer_that_casts_by_itself_contradicts_the_label(fit, door, tmp_path):
    module = _Module(_adamw)
    layer = module.layer.forward

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()

    module.layer.forward = cast
    with pytest.raises(WitnessError, match="labelled 32-true, its linear layers multiplied BF16"):
        fit(tmp_path, module, [door(module)[0]], 4)


def test_a_layer_that_casts_where_a_backward_computes_it_again_contradicts_the_label(
    fit, door, tmp_path
):
    module = _Module(_adamw)
    layer = module.layer.forward

    def cast_again(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_grad_enabled()):
            return layer(x).float()

    module.layer.forward = lambda x: checkpoint(cast_again, x.requires_grad_(), use_reentrant=True)
    said = r"1 of 2 kinds of product in .* multiplied BF16 \(first: layer, backward\)"
    with pytest.raises(WitnessError, match=said):
        fit(tmp_path, module, [door(module)[0]], 4)
