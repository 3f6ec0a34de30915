"""Lightning's metrics arrive in the metric log as they are, at the step they belong to."""

import math

import pytest
import torch

from stability.records.metric_log import MetricLog, read_metrics
from stability.tracking.records_logger import RecordsLogger


@pytest.fixture
def log(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    yield log
    log.close()


def test_metrics_are_written_and_the_epoch_is_left_out(log, tmp_path):
    logger = RecordsLogger(log)
    logger.log_metrics({"train/loss": torch.tensor(1.5), "epoch": 0}, step=3)
    logger.log_metrics({"epoch": 0}, step=4)
    logger.log_metrics({"deviation/layer_0/out/rel_fro": math.inf}, step=3)
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert {name: (s.steps, s.values) for name, s in found.items()} == {
        "train/loss": ([3], [1.5]),
        "deviation/layer_0/out/rel_fro": ([3], [math.inf]),
    }
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_metric_without_a_step_is_refused(log):
    with pytest.raises(ValueError, match="step must be given, got None"):
        RecordsLogger(log).log_metrics({"train/loss": 1.0})


def test_lightning_can_name_it(log):
    logger = RecordsLogger(log)
    assert (logger.name, logger.version) == ("records", None)
    logger.log_hyperparams({"lr": 1})
