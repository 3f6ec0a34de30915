"""The training loss: logged as the mean of an update's micro-batches, and stopped at divergence."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from stability.callbacks.training_loss import PATIENCE, Divergence, TrainingLog
from stability.records.metric_log import MetricLog, read_metrics
from stability.tracking.loggers import RecordsLogger

pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:.*log_every_n_steps",
)


class _Identity(LightningModule):
    """Its loss is the batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return batch.sum() + 0 * self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("accumulate", "every", "steps", "values"),
    [
        (1, 1, [0, 1, 2, 3], [1, 2, 3, 4]),
        (1, 2, [0, 2], [1, 3]),
        (2, 1, [0, 1, 2, 3], [1.5, 3.5, 5.5, 7.5]),
    ],
)
def test_loss_is_the_mean_of_the_micro_batches(tmp_path, accumulate, every, steps, values):
    log = MetricLog(tmp_path / "metrics.jsonl")
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        max_steps=4,
        accumulate_grad_batches=accumulate,
        callbacks=[TrainingLog(every)],
        logger=[RecordsLogger(log)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(_Identity(), DataLoader(torch.arange(1.0, 9.0)))
    log.close()
    found = read_metrics(tmp_path / "metrics.jsonl")["train/loss"]
    assert (found.steps, found.values) == (steps, values)


def _told(callback, losses, start=0):
    trainer = SimpleNamespace(global_step=start, should_stop=False)
    callback.setup(trainer, None, "fit")
    for loss in losses:
        callback.on_train_batch_start(trainer, None, None, 0)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(loss)}, None, 0)
    return trainer


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_it_stops_after_five_in_a_row_and_names_the_first(bad):
    callback = Divergence()
    assert not _told(callback, [1.0, 1.0, *[bad] * (PATIENCE - 1)]).should_stop
    assert callback.step is None
    callback = Divergence()
    assert _told(callback, [1.0, 1.0, *[bad] * PATIENCE]).should_stop
    assert callback.step == 2


def test_a_finite_loss_in_between_starts_the_count_anew():
    callback = Divergence()
    assert not _told(callback, [*[math.nan] * 4, 1.0, *[math.nan] * 4]).should_stop
    assert callback.step is None


class _Losses(LightningModule):
    """Its loss is the next of a list, whatever the batch."""

    def __init__(self, losses):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.losses = losses

    def training_step(self, batch, batch_idx):
        return self.losses[batch_idx] + 0 * self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_updates_are_counted_not_their_micro_batches(tmp_path, fit):
    """One bad micro-batch makes the update bad, whichever it is, and counts once."""
    bad = [[math.nan, 1.0, 1.0], [1.0, math.inf, 1.0], [math.nan] * 3, [1.0, 1.0, math.nan]]
    for updates, stopped_at in (
        ([[1.0] * 3, *bad, [1.0] * 3, [1.0] * 3], None),
        ([[1.0] * 3, *bad, bad[2], [1.0] * 3], 6),
    ):
        callback, losses = Divergence(), [loss for update in updates for loss in update]
        trainer = fit(
            tmp_path, _Losses(losses), [callback], steps=len(updates), accumulate_grad_batches=3
        )
        assert callback.step == (None if stopped_at is None else 1)
        assert trainer.global_step == (stopped_at or len(updates))


def test_the_count_survives_a_checkpoint():
    first, second = Divergence(), Divergence()
    _told(first, [1.0, math.nan, math.nan, math.nan])
    second.load_state_dict(first.state_dict())
    assert _told(second, [math.nan, math.nan], start=4).should_stop
    assert second.step == 1


def test_a_checkpoint_of_the_last_step_is_gone_on_from_nowhere():
    first, second = Divergence(), Divergence()
    _told(first, [1.0, *[math.nan] * PATIENCE])
    second.load_state_dict(first.state_dict())
    trainer = SimpleNamespace(should_stop=False)
    second.on_train_start(trainer, None)
    assert (trainer.should_stop, second.step) == (True, 1)
