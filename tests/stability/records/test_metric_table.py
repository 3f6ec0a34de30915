"""The table of metrics lists what the functions return, and what its readers can draw."""

import pytest
import torch

from stability.metrics.deviation import LAYER_COLUMNS, compare, deviation
from stability.metrics.drift import ALL, drift
from stability.metrics.golden_error import GOLDEN_COLUMNS
from stability.metrics.inside_attention import INSIDE_METRICS
from stability.probe.measurements import DELTA_SUM, QUERY_NORM
from stability.records.metric_names import ALL_WEIGHTS
from stability.records.metric_table import (
    DEVIATION_METRICS,
    DRIFT_METRICS,
    GRADIENT_METRICS,
    HEAD_WATCH_METRICS,
    LAYER_METRICS,
    LAYER_WATCH_METRICS,
    RUN_METRICS,
    SHOWN_DRIFTS,
    WATCH_METRICS,
)


def _weights(shift: float) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0) + shift, "b": torch.ones(3)}


@pytest.mark.parametrize("shift", [0.0, 0.5], ids=["same bits", "other bits"])
def test_drift_returns_exactly_the_metrics_of_the_table(shift):
    found = drift(_weights(shift), _weights(0.0))
    assert ALL == ALL_WEIGHTS
    assert found.keys() == {ALL_WEIGHTS, "a", "b"}
    for values in found.values():
        assert values.keys() == DRIFT_METRICS.keys()


def test_deviation_returns_exactly_the_metrics_of_the_table():
    x = torch.randn(1, 2, 4, 8)
    assert tuple(deviation(x, x)) == LAYER_COLUMNS
    assert compare(x, x, golden=x).layer.shape == (len(DEVIATION_METRICS),)
    assert (*LAYER_COLUMNS, *GOLDEN_COLUMNS) == tuple(DEVIATION_METRICS)


def test_what_is_watched_of_a_layer_and_of_a_head_is_what_the_probe_logs():
    assert tuple(LAYER_WATCH_METRICS) == (*INSIDE_METRICS, DELTA_SUM)
    assert tuple(HEAD_WATCH_METRICS) == (QUERY_NORM,)


@pytest.mark.parametrize(
    "table",
    [
        *(RUN_METRICS, DRIFT_METRICS, DEVIATION_METRICS, GRADIENT_METRICS),
        *(WATCH_METRICS, LAYER_WATCH_METRICS, HEAD_WATCH_METRICS),
    ],
)
def test_each_metric_stands_under_its_name_and_has_a_label(table):
    for name, metric in table.items():
        assert metric.name == name
        assert metric.label


def test_values_that_are_negative_when_all_is_well_are_never_drawn_on_a_log_axis():
    tables = (DRIFT_METRICS, DEVIATION_METRICS, GRADIENT_METRICS)
    for metric in (metric for table in tables for metric in table.values()):
        assert metric.scale == "linear" or metric.centre != 0
        assert metric.shown_scale == "log" or not metric.complement


def test_charts_show_how_far_a_cosine_is_from_one():
    assert SHOWN_DRIFTS["1-cosine"].shown(0.75) == 0.25
    assert SHOWN_DRIFTS["rel_l2"].shown(0.75) == 0.75


def test_what_is_shown_of_a_layer_has_a_short_label_for_a_colour_bar():
    assert all(metric.short for metric in LAYER_METRICS.values())
