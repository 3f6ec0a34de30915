"""Short trainings with callbacks: their records are the only logger."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from stability.records.metric_log import MetricLog, read_metrics
from stability.tracking.loggers import RecordsLogger


class Blocks(Iterable[torch.Tensor]):
    """Endless batches of tokens, the same at every pass."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        while True:
            yield torch.randint(0, 11, (3, 9), generator=generator)


def run_fit(folder, module, callbacks, steps, checkpoint=None, **keywords):
    log = MetricLog(folder / "metrics.jsonl")
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        max_steps=steps,
        logger=[RecordsLogger(log)],
        callbacks=callbacks,
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **keywords,
    )
    try:
        trainer.fit(module, train_dataloaders=Blocks(), ckpt_path=checkpoint, weights_only=True)
    finally:
        log.close()
    return trainer


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def fit() -> Callable[..., Trainer]:
    """Return a function that trains a module and writes `metrics.jsonl` into a folder."""
    return run_fit


@pytest.fixture
def read() -> Callable[[Path], dict[str, dict[int, float]]]:
    """Return a function that reads such a folder's metrics: name, step, value."""

    def read(folder: Path) -> dict[str, dict[int, float]]:
        return {
            name: dict(zip(series.steps, series.values, strict=True))
            for name, series in read_metrics(folder / "metrics.jsonl").items()
        }

    return read
