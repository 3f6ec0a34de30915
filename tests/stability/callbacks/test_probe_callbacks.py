"""`shadow` as a callback of any LightningModule: same bits, same names, every logger, resumable."""

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from stability import ShadowCallback
from stability.metrics.ulp import ULP_EDGES
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
    )
    module = _Module(dropout)
    trainer.fit(module, _batches(batches), ckpt_path=checkpoint, weights_only=True)
    log.close()
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


def test_bad_options_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="got 'fa9'; nearest: fa"):
        _fit(tmp_path, [ShadowCallback("flash:fa9")])
