"""Numbers, events and counts reach the records, W&B, and a user's own W&B logger of Lightning's."""

import math

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from stability.metrics.instability import crossings
from stability.metrics.ulp import ULP_EDGES
from stability.records.events import Event, read_log_and_events
from stability.records.metric_log import MetricLog, read_log, read_metrics
from stability.records.paths import RunPaths
from stability.tracking.history import MirroredLog, open_wandb_run
from stability.tracking.loggers import RecordsLogger, alert_event, emit, log_counts

ALERT = Event(7, "alert", "layer_2", "watch/layer_2/max_logit = 2e+04")
SAME_PLACE = Event(7, "alert", "layer_2", "watch/layer_2/another = 1")
LONG = Event(12, "alert", "blocks." * 30, "watch/rms/... = 3")
FINDING = Event(7, "finding", "layer_1", "the candidate returned NaN")
COUNTS = {"a/ulp_histogram": list(range(len(ULP_EDGES) + 1))}


@pytest.fixture
def log(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    yield log
    log.close()


@pytest.fixture(scope="module", params=["ours", "the user's"])
def records(request, tmp_path_factory, offline_log, read_records):
    """What W&B's reader finds after events and counts went to an offline run."""
    folder = tmp_path_factory.mktemp("run")
    shown = open_wandb_run(
        "offline",
        study="s",
        arm="a",
        seed=0,
        axis="none",
        changes=[],
        config={},
        paths=RunPaths(folder),
    )
    log = MirroredLog(folder / "metrics.jsonl", shown)
    ours, users = RecordsLogger(log), WandbLogger(experiment=shown.run)
    logger = ours if request.param == "ours" else users
    for event in (ALERT, SAME_PLACE, FINDING, LONG):
        emit([logger], event)
    log_counts([logger], COUNTS, step=5)
    log_counts([logger], {}, step=6)
    log.close()
    shown.close()
    return read_records(offline_log(folder / "wandb"))


def test_wandb_gets_alerts_and_no_findings(records):
    alerts = [record["alert"] for record in records if record["type"] == "alert"]
    assert [(alert["title"], alert["text"], alert["level"]) for alert in alerts[:2]] == [
        ("layer_2 at step 7", ALERT.text, "WARN"),
        ("layer_2 at step 7", SAME_PLACE.text, "WARN"),
    ]
    assert len(alerts) == 3
    assert all(int(alert["wait_duration"]) <= 1 for alert in alerts)


def test_a_long_layer_leaves_room_for_the_step_in_the_alerts_title(records):
    title = [record["alert"]["title"] for record in records if record["type"] == "alert"][-1]
    assert len(title) == 63
    assert title.endswith(" at step 12")


def test_wandb_draws_counts_over_the_step_with_open_ends_closed(records):
    (history,) = [record["history"] for record in records if record["type"] == "history"]
    logged = history["item"]
    assert logged["a/ulp_histogram._type"] == "histogram"
    assert logged["a/ulp_histogram.values"] == COUNTS["a/ulp_histogram"]
    first, *inner, last = logged["a/ulp_histogram.bins"]
    assert inner == list(ULP_EDGES)
    assert first == 2 * ULP_EDGES[0] - ULP_EDGES[1]
    assert last == 2 * ULP_EDGES[-1] - ULP_EDGES[-2]
    assert logged["trainer/global_step"] == 5


def test_the_records_take_every_event_and_the_counts_as_they_are(log, tmp_path):
    loggers = [CSVLogger(tmp_path), RecordsLogger(log)]
    for event in (FINDING, ALERT):
        emit(loggers, event)
    log_counts(loggers, COUNTS, step=5)
    log_counts(loggers, {}, step=6)
    assert read_log_and_events(tmp_path / "metrics.jsonl")[1] == [FINDING, ALERT]
    assert read_log(tmp_path / "metrics.jsonl").counts == {
        name: {5: counts} for name, counts in COUNTS.items()
    }
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_counts_that_do_not_fit_their_edges_are_refused_before_they_are_written(log, tmp_path):
    with pytest.raises(ValueError, match=r"x must have \d+ bins, .* got 3; count between"):
        log_counts([RecordsLogger(log)], {"x": [1, 2, 3]}, step=0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_crossing_becomes_an_alert_about_its_layer():
    (crossing,) = crossings({"watch/layer_2/max_logit": 2e4}, {})
    event = alert_event(crossing, 7)
    assert (event.step, event.kind, event.layer) == (7, "alert", "layer_2")
    assert event.text == crossing.text


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
