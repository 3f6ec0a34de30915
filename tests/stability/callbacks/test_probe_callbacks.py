"""`shadow` as a callback of any LightningModule: same bits, same names, every logger, resumable."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader

from stability import ShadowCallback
from stability.callbacks.probe_callbacks import DeviationProbe
from stability.config.schema import ProbeConfig
from stability.metrics.ulp import ULP_EDGES
from stability.probe.attention_probe import AttentionProbe, as_shadows
from stability.probe.attention_registry import resolve_attention
from stability.probe.captured_call import AttentionCall
from stability.probe.measurements import HostTransfer, MeasurementBuffer
from stability.probe.optimizer_update import own_step
from stability.probe.schedule import Schedule
from stability.records.events import read_log_and_events
from stability.records.metric_log import MetricLog, read_log, read_metrics
from stability.tracking.loggers import RecordsLogger
from tests.stability.intercept.torch_models import VOCABULARY, Decoder

pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:.*GPU available but not used",
    "ignore:.*log_every_n_steps",
)


class _Module(LightningModule):
    """Calls a child in its training step: the module itself is never called."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Decoder(depth=2, dropout=dropout)

    def training_step(self, batch, batch_idx):
        logits = self.decoder(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _batches(count=8):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2 * count, 25), generator=generator)
    return DataLoader(tokens, batch_size=2)


def _fit(
    folder,
    callbacks,
    *,
    steps=4,
    accumulate=1,
    precision="bf16-mixed",
    checkpoint=None,
    batches=8,
    dropout=0.1,
    **options,
):
    torch.manual_seed(3)
    log = MetricLog(folder / "metrics.jsonl")
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        max_steps=steps,
        precision=precision,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=[RecordsLogger(log)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    module = _Module(dropout)
    with closing(log):
        trainer.fit(module, _batches(batches), ckpt_path=checkpoint, weights_only=True)
    return module, trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_ends_in_the_same_bits_and_figures_are_logged(tmp_path, accumulate):
    plain, _ = _fit(tmp_path / "plain", [], accumulate=accumulate)
    callback = ShadowCallback("flash:all_bf16", every=2, heads=True, inside=True, inherited=True)
    watched, _ = _fit(tmp_path / "watched", [callback], accumulate=accumulate)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    found = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    for name in (
        "deviation/decoder.layers.1/dq/error_ratio",
        "deviation/decoder.layers.1/head_3/out/rel_fro",
        "deviation/decoder.layers.1/total/rel_fro",
        "watch/decoder.layers.0/max_logit",
    ):
        assert found[name].steps == [0, 2], name
    counts = read_log(tmp_path / "watched" / "metrics.jsonl").counts
    assert len(counts["deviation/decoder.layers.0/dk/ulp_histogram"][2]) == len(ULP_EDGES) + 1
    assert not any(module._forward_hooks for module in watched.modules())


class _Validated(_Module):
    """Is evaluated on other text after each update, and before the first."""

    def val_dataloader(self):
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, VOCABULARY, (6, 25), generator=generator)
        return DataLoader(tokens, batch_size=3)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("micro_batches", ["first", "all"])
def test_validation_between_the_updates_is_not_what_is_measured(
    tmp_path, monkeypatch, micro_batches
):
    def fitted(name, module, callbacks):
        monkeypatch.setattr(f"{__name__}._Module", module)
        return _fit(tmp_path / name, callbacks, dropout=0.0, val_check_interval=1)[0]

    plain, validated = _Module, _Validated
    callback = ShadowCallback("flash:all_bf16", micro_batches=micro_batches)
    watched = fitted("watched", validated, [callback])
    for name, value in fitted("unwatched", validated, []).state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    fitted("alone", plain, [ShadowCallback("flash:all_bf16", micro_batches=micro_batches)])
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("watched", "alone")]
    assert logs[0] == logs[1]
    assert logs[0]["deviation/decoder.layers.1/dq/error_ratio"].steps == [0, 1, 2, 3]
    events = read_log_and_events(tmp_path / "watched" / "metrics.jsonl")[1]
    assert not [event for event in events if event.kind == "finding"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_modules_and_the_optimizer_are_looked_at_in_lightning(tmp_path, accumulate):
    """Lightning trains inside the closure that it gives to the optimizer's step."""
    modules = {"*.qkv": "emulated:e4m3", "loss": "emulated:bf16", "optimizer": own_step}
    plain, _ = _fit(tmp_path / "plain", [], accumulate=accumulate)
    callback = ShadowCallback(modules=modules, every=2)
    watched, _ = _fit(tmp_path / "watched", [callback], accumulate=accumulate)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    found = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    name = "deviation/optimizer/own_step/update_0/rel_fro"
    assert found[name].steps == [0, 2]
    assert set(found[name].values) == {0.0}
    assert found["deviation/decoder.layers.1.qkv/emulated_e4m3/dx/gain"].steps == [0, 2]
    assert found["deviation/loss/emulated_bf16/out/gain"].steps == [0, 2]
    events = read_log_and_events(tmp_path / "watched" / "metrics.jsonl")[1]
    assert not [event for event in events if event.kind == "finding"]


def test_a_resumed_run_goes_on_with_its_sums_and_reports_nothing_twice(tmp_path):
    def bad(q, k, v, *, causal, scale=None):
        return q[..., :-1]

    def callbacks():
        return [ShadowCallback(["flash:all_bf16", bad], inside=True)]

    _fit(tmp_path / "whole", callbacks(), steps=4, batches=1, dropout=0.0)
    _, first = _fit(tmp_path / "parts", callbacks(), steps=2, batches=1, dropout=0.0)
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    _fit(tmp_path / "parts", callbacks(), steps=4, checkpoint=path, batches=1, dropout=0.0)
    logs = [tmp_path / name / "metrics.jsonl" for name in ("whole", "parts")]
    name = "watch/decoder.layers.1/delta_gap_sum"
    sums = [read_metrics(log)[name].values for log in logs]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 4
    events = [read_log_and_events(log)[1] for log in logs]
    assert events[0] == events[1]
    assert {event.layer for event in events[0]} == {"decoder.layers.0", "decoder.layers.1"}
    assert len(events[0]) == 2


def test_a_second_fit_starts_its_sums_anew_and_not_from_the_old_checkpoint(tmp_path):
    _, first = _fit(tmp_path, [ShadowCallback(inside=True)], steps=2, batches=1, dropout=0.0)
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    callback = ShadowCallback(inside=True)
    _fit(tmp_path / "resumed", [callback], steps=3, checkpoint=path, batches=1, dropout=0.0)
    _fit(tmp_path / "again", [callback], steps=1, batches=1, dropout=0.0)
    name = "watch/decoder.layers.1/delta_gap_sum"
    sums = [
        read_metrics(tmp_path / where / "metrics.jsonl")[name].values for where in (".", "again")
    ]
    assert sums[0][0] == sums[1][0]


def test_an_exception_in_a_probed_step_leaves_no_hook_and_loses_no_figure(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    probe = AttentionProbe(
        ProbeConfig(every=1, inherited=True),
        as_shadows([resolve_attention("flash:fa2", torch.device("cpu"))]),
        shadow_is_candidate=True,
    )
    callback = DeviationProbe(probe, Schedule(every=1), model, inherited=True)
    log = MetricLog(tmp_path / "metrics.jsonl")
    trainer: Any = SimpleNamespace(loggers=[RecordsLogger(log)])
    # a copy that is still under way, as on CUDA
    pending = MeasurementBuffer()
    pending.add(["watch/x/max_logit"], torch.ones(1))
    callback._transfer = (3, cast("HostTransfer", pending.transfer(())))
    callback.before_update(trainer, 4)
    assert probe.is_armed
    assert any(module._forward_hooks for module in model.modules())
    q = torch.randn(1, 1, 4, 8)
    probe.attend(AttentionCall(layer="x", q=q, k=q, v=q), lambda q, k, v: (q, None))
    callback.on_exception(trainer, cast("Any", model), RuntimeError("out of memory"))
    log.close()
    assert not probe.is_armed
    assert not any(module._forward_hooks for module in model.modules())
    assert read_metrics(tmp_path / "metrics.jsonl")["watch/x/max_logit"].steps == [3]
    # the broken step's calls are forgotten: the same layer is looked at in the next fit
    assert probe.collect().metrics == {}


def test_a_threshold_that_is_crossed_is_one_alert(tmp_path):
    class Sharp(_Module):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.decoder.layers[0].qkv.weight.mul_(400)

    log = MetricLog(tmp_path / "metrics.jsonl")
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        max_steps=3,
        callbacks=[ShadowCallback(inside=True, golden=False, backward=False)],
        logger=[RecordsLogger(log)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Sharp(), _batches())
    log.close()
    alerts = [
        event
        for event in read_log_and_events(tmp_path / "metrics.jsonl")[1]
        if event.kind == "alert"
    ]
    assert [(event.step, event.layer) for event in alerts] == [(0, "decoder.layers.0")]
    assert "2309.14322" in alerts[0].text


def test_an_error_of_the_first_step_is_not_hidden_by_what_shadow_would_say(tmp_path, monkeypatch):
    """No attention has trained in it: at the end of a step that would be an error as well."""

    def evaluate_and_fail(self, batch, index):
        self.eval().decoder(batch)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_Module, "training_step", evaluate_and_fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        _fit(tmp_path, [ShadowCallback("flash:fa2")])
    assert not torch_module._has_any_global_hook()


def test_bad_options_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="got 'fa9'; nearest: fa"):
        _fit(tmp_path, [ShadowCallback("flash:fa9")])
