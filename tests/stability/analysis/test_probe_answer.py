"""What a probe says first: failures, then places, and calm words only where neither is."""

from dataclasses import replace

import pytest

from stability.analysis.probe_answer import answer_of_probe, worst_result
from stability.analysis.probe_records import RecordedProbe, read_probe
from stability.records.events import Event
from stability.records.metric_columns import Series
from tests.stability.report.synthetic_probe import write_probe


def _layer(index):
    return f"model.layers.{index}.self_attn"


def _raised(layers, text="flash:fa2: RuntimeError: no such kernel"):
    return tuple(Event(0, "finding", _layer(index), text) for index in layers)


def test_a_healthy_probe_holds_and_says_what_it_was_held_to(tmp_path):
    answer = answer_of_probe(read_probe(write_probe(tmp_path)))
    assert answer.holds
    line, noise = answer.lines
    assert line.startswith("No layer or head is beyond its limit: error ratio 2, gain 0.10%, bias ")
    assert "4 layers, 6 looks" in line
    assert answer.unsure == (noise,)


def test_a_single_look_beyond_the_limit_is_not_called_within_it(tmp_path):
    probed = read_probe(write_probe(tmp_path))
    metrics = dict(probed.metrics)
    name = next(name for name in metrics if name.endswith("/dq/error_ratio"))
    old = metrics[name]
    metrics[name] = Series(list(old.steps), [*list(old.values)[:-1], 4.09])
    answer = answer_of_probe(replace(probed, metrics=metrics))
    (line,) = answer.said
    assert line.startswith("No layer or head is surely beyond its limit: error ratio 2")
    assert "error ratio of a look is 4.09, and more looks tell whether that is chance" in line


@pytest.mark.parametrize(
    ("layers", "where"),
    [(range(4), "every layer"), ((1, 3), f"{_layer(1)}, {_layer(3)}")],
)
def test_a_candidate_that_raised_is_said_first(tmp_path, layers, where):
    probed = read_probe(write_probe(tmp_path, planted=(2, 1), events=_raised(layers)))
    answer = answer_of_probe(probed)
    assert not answer.holds
    assert answer.lines[0] == f"flash:fa2 failed in {where}: RuntimeError: no such kernel"
    assert answer.lines[1].startswith(f"{_layer(2)}, head 1: error ratio stands out")


def test_a_layer_that_was_not_compared_is_said_beside_the_calm_words(tmp_path):
    events = (
        Event(0, "finding", "model.extra", "not seen: it is written by hand; wrap it"),
        Event(0, "finding", "model.layers.9.self_attn", "head_dim 8 is less than 16"),
        Event(0, "finding", "model.layers.8.self_attn", "head_dim 8 is less than 16"),
        Event(0, "finding", _layer(0), "seen in part: dropout"),
        Event(0, "finding", _layer(1), "golden dq was not finite in some row"),
        Event(3, "finding", "model", "step 2 was never announced"),
        Event(0, "alert", _layer(2), "a figure past a threshold"),
    )
    answer = answer_of_probe(read_probe(write_probe(tmp_path, events=events)))
    assert answer.holds
    assert answer.lines[0].startswith("No layer or head is beyond its limit")
    assert answer.lines[2:] == answer.unseen
    assert answer.unseen == (
        "model.extra: not seen: it is written by hand; wrap it",
        "model.layers.9.self_attn, model.layers.8.self_attn: not measured: head_dim 8 is less "
        "than 16",
        f"{_layer(0)}: seen in part: dropout",
    )


def test_a_candidate_that_failed_in_the_only_layer_is_not_said_twice(tmp_path):
    events = (Event(0, "finding", "model.extra", "flash:fa2: ValueError: no"),)
    answer = answer_of_probe(read_probe(write_probe(tmp_path, events=events)))
    assert answer.failures == ("flash:fa2 failed in model.extra: ValueError: no",)
    assert not answer.unseen


def test_a_golden_that_failed_leaves_nothing_judged_and_is_said(tmp_path):
    events = _raised([0], "golden: MemoryError: no")
    probed = read_probe(write_probe(tmp_path, golden=False, events=events))
    assert answer_of_probe(probed).failures == (f"golden failed in {_layer(0)}: MemoryError: no",)


def test_a_candidate_that_was_never_called_is_a_failure(tmp_path):
    healthy = read_probe(write_probe(tmp_path))
    silent = RecordedProbe(record=healthy.record, metrics={}, counts={}, events=())
    (line,) = answer_of_probe(silent).failures
    assert line == "flash:fa2 was never compared (4 layers were caught)"
    why = (Event(0, "finding", _layer(0), "not looked at: dropout_p 0.1"),)
    (line,) = answer_of_probe(replace(silent, events=why)).failures
    assert line.endswith("was never compared (4 layers were caught): not looked at: dropout_p 0.1")


def test_values_not_finite_are_a_failure_unless_fp64s_are_not_either(tmp_path):
    probed = read_probe(write_probe(tmp_path))
    metrics = dict(probed.metrics)
    for metric in ("nonfinite", "golden_nonfinite"):
        series = metrics[f"deviation/{_layer(1)}/dq/{metric}"]
        series.values = [0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
        failures = answer_of_probe(replace(probed, metrics=metrics)).failures
        assert bool(failures) == (metric == "golden_nonfinite")
    assert failures == (
        f"flash:fa2 returned values that are not finite in {_layer(1)}, since step 20: dq",
    )


def test_a_page_opens_on_what_is_worst(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path)).metrics)
    metrics[f"deviation/{_layer(1)}/head_2/dk/gain"].values = [5e-3] * 6
    assert worst_result(metrics) == ("", "dk", "gain")
    assert worst_result({}) is None
