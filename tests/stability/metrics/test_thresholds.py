"""Thresholds: crossed from below, once each time, together where they cross together."""

import math

import pytest

from stability.metrics.thresholds import Threshold, crossings

LOGIT = "watch/layer_2/max_logit"
HEAD = "watch/layer_0/head_3/max_logit"
RMS_A, RMS_B = "watch/rms/blocks.layer_0.query.weight", "watch/rms/final_norm.weight"


def _names(found):
    return [list(crossing.values) for crossing in found]


@pytest.mark.parametrize(
    ("name", "below", "past"),
    [
        (LOGIT, 1e4, math.nextafter(1e4, math.inf)),
        (HEAD, 1e4, 10001.0),
        (RMS_A, 2.2999, 2.3),
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
    "name", ["watch/grad_norm", "watch/log_z", "watch/rms_max", "watch/layer_2/entropy", "rms/x"]
)
def test_a_figure_without_a_published_threshold_never_crosses(name):
    assert crossings({name: 1e30}, {}) == []


def test_a_metric_that_was_not_measured_in_between_keeps_its_last_value():
    assert crossings({RMS_B: 1.0}, {RMS_A: 5.0}) == []
    assert crossings({RMS_A: 5.0}, {RMS_A: 5.0, RMS_B: 1.0}) == []


def test_metrics_that_cross_together_make_one_crossing_led_by_the_largest():
    metrics = {RMS_A: 2.5, RMS_B: 3.25, "watch/rms/other": 1.0, LOGIT: 2e4}
    logit, rms = crossings(metrics, {})
    assert (logit.values, logit.layer) == ({LOGIT: 2e4}, "layer_2")
    assert (list(rms.values), rms.layer) == ([RMS_B, RMS_A], "final_norm.weight")
    assert rms.text == (
        "watch/rms/final_norm.weight = 3.25, and 1 more (>= 2.3, arXiv 2304.13013): second moment "
        "out of date, as 1 to 8 steps before a loss spike"
    )
    assert _names(crossings(metrics, {RMS_B: 3.0, LOGIT: 2e4})) == [[RMS_A]]


def test_a_crossing_of_the_whole_run_has_no_layer():
    (crossing,) = crossings({"watch/loss_spike": 1.0}, {})
    assert crossing.layer == ""
    assert crossing.text == (
        "watch/loss_spike = 1 (> 0, arXiv 2304.13013): "
        "loss above its running mean by 3.2 standard deviations"
    )


def test_other_thresholds_can_be_given():
    mine = Threshold(
        pattern="watch/grad_norm", relation=">", limit=5.0, meaning="too long", source="here"
    )
    (crossing,) = crossings({"watch/grad_norm": 6.0, LOGIT: 2e4}, {}, [mine])
    assert crossing.text == "watch/grad_norm = 6 (> 5, here): too long"
