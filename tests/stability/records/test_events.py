"""Events: any number a step, in the log's order, cut with it, and refused when damaged."""

import pytest

from stability.records.events import Event, log_event, read_log_and_events
from stability.records.metric_log import MetricLog, read_metrics, read_text
from tests.stability.sealing import seal

FIRST = Event(3, "finding", "layer_2", "the candidate returned NaN")
SECOND = Event(3, "alert", "layer_2", "watch/layer_2/max_logit is 1.2e+04")
THIRD = Event(1, "alert", "", 'a "quoted" text, in ünicode\nand two lines')


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(path):
    log = MetricLog(path)
    yield log
    log.close()


def test_several_events_of_a_step_come_back_in_the_order_they_were_written(log, path):
    for event in (FIRST, SECOND, THIRD, FIRST):
        log_event(log, event)
    assert read_log_and_events(path)[1] == [FIRST, SECOND, THIRD, FIRST]


def test_events_stand_beside_metrics_and_texts_without_touching_them(log, path):
    log.append(3, {"train/loss": 1.5})
    log_event(log, FIRST)
    log.append(3, {}, batch_hash="ab")
    assert read_log_and_events(path)[1] == [FIRST]
    assert list(read_metrics(path)) == ["train/loss"]
    assert read_text(path, "batch_hash") == {3: "ab"}


def test_a_resume_cuts_the_events_that_came_after_its_checkpoint(log, path):
    log_event(log, FIRST)
    position = log.position()
    log_event(log, SECOND)
    log.truncate_to(position)
    assert read_log_and_events(path)[1] == [FIRST]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, "warning", "", "x"), "kind must be one of finding, alert, got 'warning'; choose one"),
        ((1, "alert", "", ""), "text must say what happened, got ''; write a sentence"),
        ((-1, "alert", "", "x"), "step must be >= 0, got -1; count from 0"),
    ],
)
def test_an_event_that_says_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Event(*arguments)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ('{"step": 1, "event": "alert", "text": "x"}', "an event's layer must be a text, got None"),
        ('{"step": 1, "event": "alert", "layer": "", "text": 3}', "text must be a text, got 3"),
        ('{"step": 1, "event": "alarm", "layer": "", "text": "x"}', "kind must be one of finding"),
        ('{"step": 1, "event": ["alert"', "must be JSON"),
    ],
)
def test_a_damaged_event_is_an_error_that_names_file_and_line(path, damage, message):
    path.write_text(seal('{"step": 0, "x": 1}') + seal(damage))
    with pytest.raises(ValueError, match=rf"metrics.jsonl: line 2.*{message}"):
        read_log_and_events(path)[1]
