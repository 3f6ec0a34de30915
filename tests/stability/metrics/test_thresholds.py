"""Thresholds: crossed from below, once each time, together where they cross together."""

import math

import pytest

from stability.metrics.instability import Threshold, crossings

LOGIT = "watch/layer_2/max_logit"
HEAD = "watch/layer_0/head_3/max_logit"
OTHER = "watch/layer_5/max_logit"


def _names(found):
    return [list(crossing.values) for crossing in found]


@pytest.mark.parametrize(
    ("name", "below", "past"),
    [
        (LOGIT, 1e4, math.nextafter(1e4, math.inf)),
        (HEAD, 1e4, 10001.0),
        ("watch/loss_spike", 0.0, 1.0),
        ("watch/nonfinite_gradients", 0.0, 1.0),
        (LOGIT, math.nan, math.inf),
    ],
)
def test_only_the_way_up_is_a_crossing(name, below, past):
    steps = [below, past, past, below, past]
    found, previous = [], {}
    for value in steps:
        found.append(len(crossings({name: value}, previous)))
        previous = {**previous, name: value}
    assert found == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "name", ["watch/grad_norm", "watch/log_z", "watch/rms_max", "watch/a/entropy", "watch/rms/x"]
)
def test_a_figure_without_a_published_threshold_never_crosses(name):
    assert crossings({name: 1e30}, {}) == []


def test_a_metric_that_was_not_measured_in_between_keeps_its_last_value():
    assert crossings({OTHER: 1.0}, {LOGIT: 5e4}) == []
    assert crossings({LOGIT: 5e4}, {LOGIT: 5e4, OTHER: 1.0}) == []


def test_metrics_that_cross_together_make_one_crossing_led_by_the_largest():
    spike = "watch/loss_spike"
    metrics = {LOGIT: 2e4, OTHER: 3e4, HEAD: 1.0, spike: 1.0}
    logit, loss = crossings(metrics, {})
    assert (list(logit.values), logit.layer) == ([OTHER, LOGIT], "layer_5")
    assert (loss.values, loss.layer) == ({spike: 1.0}, "")
    assert logit.text == (
        "watch/layer_5/max_logit = 3e+04, and 1 more (> 10000, arXiv 2309.14322): attention logits "
        "of runs that diverge"
    )
    assert _names(crossings(metrics, {OTHER: 2e4, spike: 1.0})) == [[LOGIT]]


def test_a_crossing_of_the_whole_run_has_no_layer():
    (crossing,) = crossings({"watch/loss_spike": 1.0}, {})
    assert crossing.layer == ""
    assert crossing.text == (
        "watch/loss_spike = 1 (> 0, our rule): "
        "loss above its running mean by 3.2 standard deviations"
    )


def test_other_thresholds_can_be_given():
    mine = Threshold(
        pattern="watch/grad_norm", relation=">", limit=5.0, meaning="too long", source="here"
    )
    (crossing,) = crossings({"watch/grad_norm": 6.0, LOGIT: 2e4}, {}, [mine])
    assert crossing.text == "watch/grad_norm = 6 (> 5, here): too long"
