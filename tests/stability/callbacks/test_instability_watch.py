"""The instability watch: its values are those of a training by hand, its alerts come once."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stability.callbacks.instability_watch import InstabilityWatch
from stability.config.schema import ModelConfig, OptimizerConfig
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.lightning_module import LanguageModel
from stability.records.events import read_log_and_events

OPTIMIZER = OptimizerConfig(lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, warmup_steps=0)
CLIP = 0.2


def _sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _language_model():
    model = GPT(ModelConfig(depth=1, width=16, heads=2, context=8, vocab_size=11), [_sdpa])
    initialise(model, 0)
    return LanguageModel(model, OPTIMIZER, steps=100)


def _by_hand(module, blocks, steps, accumulate):
    """Train with an AdamW of our own in FP64, and return the watched figures of each step."""
    weights, batches = dict(module.model.named_parameters()), iter(blocks)
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    found, (beta1, beta2) = [], OPTIMIZER.betas
    for step in range(steps):
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        log_z = 0.0
        for batch in (next(batches) for _ in range(accumulate)):
            logits = module.model(batch[:, :-1])
            log_z += logits.detach().exp().sum(-1).log().mean() / accumulate
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / accumulate
            for name, g in zip(weights, torch.autograd.grad(loss, weights.values()), strict=True):
                total[name] += g
        norm = torch.cat([g.flatten() for g in total.values()]).norm()
        figures = {
            "watch/grad_norm": norm,
            "watch/log_z": log_z,
        }
        factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 100))
        for name, w in weights.items():
            g = total[name] * min(1.0, CLIP / (norm.item() + 1e-6))  # as torch clips
            m, v = moments[name]
            moments[name] = m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            v_hat = v / (1 - beta2 ** (step + 1))
            figures[f"watch/rms/{name}"] = (g * g / v_hat.clamp(min=1e-16)).mean().sqrt()
            decay = OPTIMIZER.weight_decay if w.dim() >= 2 else 0.0
            update = m / (1 - beta1 ** (step + 1)) / (v_hat.sqrt() + OPTIMIZER.eps)
            with torch.no_grad():
                w.sub_(OPTIMIZER.lr * factor * (update + decay * w))
        figures["watch/rms_max"] = max(x for n, x in figures.items() if n.startswith("watch/rms/"))
        found.append({name: float(value) for name, value in figures.items()})
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_are_those_of_a_training_by_hand(tmp_path, fit, read, blocks, accumulate):
    module = _language_model().double()
    fit(
        tmp_path,
        module,
        [InstabilityWatch(2)],
        steps=5,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=accumulate,
        precision="64-true",
    )
    expected = _by_hand(_language_model().double(), blocks, 5, accumulate)
    assert all(figures["watch/grad_norm"] > 2 * CLIP for figures in expected), "clipping bites"
    found = read(tmp_path)
    assert set(found) == {*expected[0], "watch/nonfinite_gradients", "watch/loss_spike"}
    for name, values in found.items():
        assert list(values) == [0, 2, 4], name
        for step, value in values.items():
            # FP64 sums in other orders, 1e-16 each, through five updates of Adam
            assert value == pytest.approx(expected[step].get(name, 0.0), rel=1e-11), (name, step)


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_watching_changes_no_bit_of_weights_gradients_or_random_state(
    tmp_path, fit, read, precision, accumulate
):
    ends = []
    for folder, callbacks in (("off", []), ("on", [InstabilityWatch(1)])):
        torch.manual_seed(3)
        module = _language_model()
        module.model.final_norm = nn.Sequential(module.model.final_norm, nn.Dropout(0.2))
        fit(
            tmp_path / folder,
            module,
            callbacks,
            steps=4,
            precision=precision,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=CLIP,
        )
        tensors = [x for p in module.parameters() for x in (p.detach(), p.grad)]
        ends.append([*tensors, torch.get_rng_state()])
    assert len(read(tmp_path / "on")["watch/log_z"]) == 4
    assert all(torch.equal(off, on) for off, on in zip(*ends, strict=True))


class Spy(InstabilityWatch):
    """Counts what the watch fetches to the host."""

    def __init__(self, every):
        super().__init__(every)
        self.scalars = 0

    def _count(self, hook, *arguments):
        spy = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                spy.scalars += func is torch.ops.aten._local_scalar_dense.default
                return func(*args, **(kwargs or {}))

        with Mode():
            hook(*arguments)

    def on_before_optimizer_step(self, *arguments):
        self._count(super().on_before_optimizer_step, *arguments)

    def on_train_batch_end(self, *arguments):
        self._count(super().on_train_batch_end, *arguments)

    def _see_output(self, *arguments):
        self._count(super()._see_output, *arguments)


def test_a_due_step_is_fetched_at_once_and_others_fetch_nothing(tmp_path, fit, monkeypatch):
    fetched = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: fetched.append(len(x)) or to_list(x))
    spy, module = Spy(3), _language_model()
    fit(tmp_path, module, [spy], steps=6, accumulate_grad_batches=2)
    figures = 4 + len(list(module.parameters()))  # norm, non-finite, log Z, largest, one a tensor
    assert fetched == [figures + 1, figures + 3], "with the losses of the steps in between"
    assert spy.scalars == 0


def test_the_hook_is_gone_when_training_ends_at_a_due_step(tmp_path, fit):
    module = _language_model()
    fit(tmp_path, module, [InstabilityWatch(2)], steps=1)
    assert len(module.model._forward_hooks) == 0


def test_the_hook_is_there_in_due_steps_alone_and_gone_after_an_error(tmp_path, fit):
    hooks = []

    class Look(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            hooks.append(len(pl_module.model._forward_hooks))
            if trainer.global_step == 4:
                raise KeyError("stop")

    module = _language_model()
    with pytest.raises(KeyError, match="stop"):
        fit(tmp_path, module, [InstabilityWatch(2), Look()], steps=9, accumulate_grad_batches=2)
    assert hooks == [1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert len(module.model._forward_hooks) == 0


@pytest.mark.parametrize("how", ["error", "stop"])
def test_a_fit_broken_off_within_a_due_step_leaves_no_hook_and_the_next_is_watched(
    tmp_path, fit, read, how
):
    class Break(Callback):
        def on_train_batch_end(self, trainer, *others):
            if how == "error":
                raise KeyError("stop")
            trainer.should_stop = True

    module, watch = _language_model(), InstabilityWatch(2)
    with pytest.raises(KeyError) if how == "error" else nullcontext():
        fit(tmp_path / "broken", module, [watch, Break()], steps=3, accumulate_grad_batches=2)
    assert len(module.model._forward_hooks) == 0
    for folder, each in (("next", watch), ("first", InstabilityWatch(2))):
        fit(tmp_path / folder, _language_model(), [each], steps=1, accumulate_grad_batches=2)
    assert read(tmp_path / "next") == read(tmp_path / "first")


def test_a_compiled_model_is_watched_under_the_names_of_the_model_itself(tmp_path, fit, read):
    found = []
    for compiled in (False, True):
        module = _language_model()
        if compiled:
            module.model = torch.compile(module.model, backend="eager")
        fit(tmp_path / str(compiled), module, [InstabilityWatch(1)], steps=2)
        found.append(read(tmp_path / str(compiled)))
    assert found[0].keys() == found[1].keys()
    assert found[1]["watch/log_z"] == found[0]["watch/log_z"]


class Wrapped(LightningModule):
    """A module that is its own model, or holds one beside another part."""

    def __init__(self, model, head, convert=lambda x: x):
        super().__init__()
        if model is not None:
            self.model = model
        self.head, self.convert = head, convert

    def forward(self, x):
        return self.convert(self.head(x))

    def training_step(self, batch, batch_idx):
        out = self(self.model(batch.float()) if hasattr(self, "model") else batch.float())
        return getattr(out, "logits", out).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: SimpleNamespace(logits=x)])
def test_the_logits_of_any_module_are_found(tmp_path, fit, read, blocks, convert):
    torch.manual_seed(0)
    module = Wrapped(None, nn.Linear(9, 5), convert)
    logits = module.head(next(iter(blocks)).float()).detach()
    expected = logits.exp().sum(-1).log().mean().item()
    fit(tmp_path, module, [InstabilityWatch(1)], steps=1)
    assert read(tmp_path)["watch/log_z"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("named", [False, True])
def test_a_module_with_more_than_its_model_keeps_its_names_and_can_be_told_the_logits(
    tmp_path, fit, read, blocks, named
):
    module = Wrapped(nn.Linear(9, 4), nn.Linear(4, 5))
    x = next(iter(blocks)).float()
    hidden = module.model(x)
    logits = module.head(hidden) if named else hidden
    expected = logits.detach().exp().sum(-1).log().mean().item()
    fit(tmp_path, module, [InstabilityWatch(1, module.head if named else None)], steps=1)
    found = read(tmp_path)
    assert found["watch/log_z"][0] == pytest.approx(expected, rel=1e-5)
    assert {"watch/rms/model.weight", "watch/rms/head.weight"} <= set(found)


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
        for event in read_log_and_events(folder / "metrics.jsonl")[1]
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
