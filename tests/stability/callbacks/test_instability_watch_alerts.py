"""Alerts of the instability watch: once for each crossing, none missed, the same after a resume."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from stability.callbacks.instability_watch import InstabilityWatch
from stability.records.events import read_events


class Driven(LightningModule):
    """One weight whose gradient, and loss, at each step are what `scale` says."""

    def __init__(self, scale, optimizer=torch.optim.AdamW):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale, self.optimizer = scale, optimizer

    def training_step(self, batch, batch_idx):
        scale = self.scale(self.global_step)
        return scale * (self.weight - self.weight.detach()).sum() + abs(scale)

    def configure_optimizers(self):
        keywords = {"betas": (0.9, 0.95)} if self.optimizer is torch.optim.AdamW else {}
        return self.optimizer(self.parameters(), lr=1e-3, **keywords)


class Foreign(torch.optim.SGD):
    """Keeps something under Adam's name, without Adam's betas."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(exp_avg_sq=torch.ones(3), step=1)
        return loss


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Foreign])
def test_an_optimizer_without_second_moments_has_no_rms(tmp_path, fit, read, optimizer):
    fit(tmp_path, Driven(lambda step: 2.0, optimizer), [InstabilityWatch(1)], steps=2)
    found = read(tmp_path)
    assert set(found) == {"watch/grad_norm", "watch/nonfinite_gradients", "watch/loss_spike"}
    assert found["watch/grad_norm"][1] == pytest.approx(2 * math.sqrt(3))


def _alerts(folder):
    return [
        (event.step, event.layer, event.text.split(" = ")[0])
        for event in read_events(folder / "metrics.jsonl")
    ]


def _bumps(step):
    """Losses and gradients of 1, with two bumps, of two steps and of one, and a NaN at the end."""
    return {70: 100.0, 71: 100.0, 80: 1000.0, 84: math.nan}.get(step, 1.0)


def test_a_threshold_is_reported_once_for_each_time_it_is_crossed(tmp_path, fit, read):
    fit(tmp_path, Driven(_bumps), [InstabilityWatch(1)], steps=85)
    found = read(tmp_path)
    spiked = [step for step, value in found["watch/loss_spike"].items() if value]
    assert spiked == [70, 71, 80, 84]
    assert found["watch/nonfinite_gradients"][84] == 3
    assert _alerts(tmp_path) == [
        (70, "", "watch/loss_spike"),
        (80, "", "watch/loss_spike"),
        (84, "", "watch/loss_spike"),
        (84, "", "watch/nonfinite_gradients"),
    ]


def test_a_spike_between_due_steps_is_not_missed(tmp_path, fit, read):
    fit(tmp_path, Driven(_bumps), [InstabilityWatch(25)], steps=77)
    assert read(tmp_path)["watch/loss_spike"] == {0: 0.0, 25: 0.0, 50: 0.0, 75: 1.0}
    assert _alerts(tmp_path) == [(75, "", "watch/loss_spike")]


@pytest.mark.parametrize("stop", [60, 71, 72, 82])
def test_a_resumed_run_logs_what_it_would_have(tmp_path, fit, stop):
    fit(tmp_path / "whole", Driven(_bumps), [InstabilityWatch(5)], steps=85)
    part = tmp_path / "part"
    trainer = fit(part, Driven(_bumps), [InstabilityWatch(5)], steps=stop)
    trainer.save_checkpoint(part / "stop.ckpt")
    fit(part, Driven(_bumps), [InstabilityWatch(5)], steps=85, checkpoint=part / "stop.ckpt")
    whole = (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert '"event": "alert"' in whole
    assert (part / "metrics.jsonl").read_text() == whole


def test_a_spike_in_any_micro_batch_counts(tmp_path, fit, read):
    class First(Driven):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + 50 if batch_idx == 2 * 60 else loss

    fit(tmp_path, First(_bumps), [InstabilityWatch(1)], steps=65, accumulate_grad_batches=2)
    spiked = [step for step, value in read(tmp_path)["watch/loss_spike"].items() if value]
    assert spiked == [60]


def test_a_watch_that_is_never_due_is_refused():
    with pytest.raises(ValueError, match="every must be >= 1, got 0; leave the watch out"):
        InstabilityWatch(0)


def test_two_optimizers_are_refused_before_training(tmp_path, fit):
    class Two(Driven):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters()) for _ in range(2)]

    with pytest.raises(ValueError, match="must have one optimizer, got 2; leave the watch out"):
        fit(tmp_path, Two(_bumps), [InstabilityWatch(1)], steps=1)
