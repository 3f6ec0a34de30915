"""Which places are called the worst of a result: none that is so by the luck of a head's draw."""

from pathlib import Path

import numpy as np

from stability.analysis.operator_places import worst_places
from stability.analysis.study_records import RecordedArm, RecordedRun
from stability.config.study import PolicyConfig
from stability.records.metric_columns import Series
from stability.records.metric_names import deviation_name, head_part
from stability.records.paths import RunPaths

POLICY = PolicyConfig()
LOOKS, LAYERS, HEADS = 12, 3, 4
RESULTS = ("out", "dq", "dk", "dv")
AT = ("layer_2", "dv", "golden_bias_ulp", head_part(1))


def _right():
    """Return the metrics of a run whose attention is right, by layer, result, metric and part."""
    rng = np.random.default_rng(3)
    drawn = {
        "error_ratio": lambda: 1.1 * np.exp(0.1 * rng.normal(size=LOOKS)),
        "gain": lambda: 2e-4 * rng.normal(size=LOOKS),
        "gain_baseline": lambda: 2e-4 * rng.normal(size=LOOKS),
        "golden_bias_ulp": lambda: 0.01 * rng.normal(size=LOOKS),
    }
    return {
        (f"layer_{layer}", what, metric, part): draw()
        for layer in range(LAYERS)
        for what in RESULTS
        for metric, draw in drawn.items()
        for part in ("", *(head_part(head) for head in range(HEADS)))
    }


def _worst(figures):
    metrics = {
        deviation_name(layer, what, metric, part=part): Series(list(range(LOOKS)), list(values))
        for (layer, what, metric, part), values in figures.items()
    }
    run = RecordedRun(
        paths=RunPaths(Path("nowhere")), seed=0, manifest=None, metrics=metrics, events=(), error=""
    )
    diff = {"attention.implementation": ["baseline", "flash"]}
    arm = RecordedArm(
        name="mine", axis="attention", diff=diff, role="candidate", until=100, runs={0: run}
    )
    return worst_places(arm, POLICY)


def test_each_result_has_its_worst_figure_of_each_kind_and_the_worst_is_first():
    found = _worst(_right())
    assert {(one.what, one.kind) for one in found} == {
        (what, kind) for what in RESULTS for kind in ("error", "gain", "bias")
    }
    assert [one.of_limit for one in found] == sorted((x.of_limit for x in found), reverse=True)
    assert found[0].looks == LOOKS
    assert _worst({}) == ()


def test_a_bias_that_a_head_has_by_luck_is_not_called_the_worst_but_a_sure_one_is():
    scatter = 0.06 + 0.1 * np.random.default_rng(4).normal(size=LOOKS)
    assert scatter.mean() > POLICY.max_bias_ulp
    biases = [one for one in _worst(_right() | {AT: scatter}) if one.kind == "bias"]
    assert {one.where for one in biases} == {"the mean of all layers"}
    worst, *_ = _worst(_right() | {AT: 1 + 0.1 * scatter})
    assert (worst.what, worst.kind, worst.where) == ("dv", "bias", "head 1 of layer_2")
