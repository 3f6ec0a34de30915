"""Events and counts reach the records and W&B, read back with W&B's own reader."""

import pytest
from lightning.pytorch.loggers import CSVLogger

from stability.metrics.instability import crossings
from stability.records.events import Event, read_events
from stability.records.metric_log import MetricLog, read_counts
from stability.tracking.alerts import alert_event, emit, log_counts
from stability.tracking.records_logger import RecordsLogger
from stability.tracking.wandb_logger import finish, make_wandb_logger

ALERT = Event(7, "alert", "layer_2", "watch/layer_2/max_logit = 2e+04")
SAME_PLACE = Event(7, "alert", "layer_2", "watch/layer_2/another = 1")
LONG = Event(12, "alert", "blocks." * 30, "watch/rms/... = 3")
FINDING = Event(7, "finding", "layer_1", "the candidate returned NaN")
EDGES = [-1.0, 0.0, 0.5]


@pytest.fixture
def log(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    yield log
    log.close()


@pytest.fixture(scope="module")
def records(tmp_path_factory, offline_log, read_records):
    """What W&B's reader finds after events and counts went to an offline run."""
    directory = tmp_path_factory.mktemp("run") / "wandb"
    logger = make_wandb_logger(
        "offline", study="s", arm="a", seed=0, axis="none", config={}, directory=directory
    )
    for event in (ALERT, SAME_PLACE, FINDING, LONG):
        emit([logger], event)
    log_counts([logger], {"a/ulp_histogram": [1, 2, 3, 4]}, EDGES, step=5)
    log_counts([logger], {}, EDGES, step=6)
    finish(logger)
    return read_records(offline_log(directory))


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
    assert logged["a/ulp_histogram.values"] == [1, 2, 3, 4]
    assert logged["a/ulp_histogram.bins"] == [-2.0, -1.0, 0.0, 0.5, 1.0]
    assert logged["trainer/global_step"] == 5


def test_the_records_take_every_event_and_the_counts_as_they_are(log, tmp_path):
    loggers = [CSVLogger(tmp_path), RecordsLogger(log)]
    for event in (FINDING, ALERT):
        emit(loggers, event)
    log_counts(loggers, {"a/ulp_histogram": [1, 2, 3, 4]}, EDGES, step=5)
    log_counts(loggers, {}, EDGES, step=6)
    assert read_events(tmp_path / "metrics.jsonl") == [FINDING, ALERT]
    assert read_counts(tmp_path / "metrics.jsonl") == {"a/ulp_histogram": {5: [1, 2, 3, 4]}}
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("counts", "edges", "message"),
    [
        ([1, 2, 3], EDGES, "one fewer than the 3 bins of x, got 3; pass the inner bounds"),
        ([1, 2], [0.0], "edges must be at least 2 and .* got 1; pass the inner bounds"),
    ],
)
def test_counts_that_do_not_fit_their_edges_are_refused(log, tmp_path, counts, edges, message):
    with pytest.raises(ValueError, match=message):
        log_counts([RecordsLogger(log)], {"x": counts}, edges, step=0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_crossing_becomes_an_alert_about_its_layer():
    (crossing,) = crossings({"watch/layer_2/max_logit": 2e4}, {})
    event = alert_event(crossing, 7)
    assert (event.step, event.kind, event.layer) == (7, "alert", "layer_2")
    assert event.text == crossing.text
