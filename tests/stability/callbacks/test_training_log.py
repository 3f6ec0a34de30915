"""The logged loss of a step is the mean over its micro-batches."""

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from stability.callbacks.training_loss import TrainingLog
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
