"""How large an error would have been named is said, and is true."""

import re
from dataclasses import replace

import pytest

from stability.analysis.locate import locate
from stability.analysis.noise import below_the_noise
from stability.analysis.probe_answer import answer_of_probe
from stability.analysis.probe_records import read_probe
from stability.records.metric_columns import Series
from tests.stability.report.synthetic_probe import write_probe

LINE = re.compile(
    r"Below the noise of 6 looks lies, in one head, a wrong factor of less than out ([\d.]+)%, .*"
    r"dv [\d.]+%; an error ratio below out ([\d.]+), .*dv [\d.]+\.$"
)


def _figures(metrics):
    (line,) = below_the_noise(metrics)
    return [float(x) for x in LINE.match(line).groups()]


def _with(metrics, metric, change):
    """Return metrics with one head's values changed at every look."""
    name = f"deviation/model.layers.2.self_attn/head_1/out/{metric}"
    series = metrics[name]
    return {**metrics, name: Series(list(series.steps), [change(x) for x in series.values])}


@pytest.mark.parametrize("metric", ["gain", "error_ratio"])
def test_what_is_said_to_be_below_the_noise_is_not_named_and_what_is_above_it_is(tmp_path, metric):
    metrics = read_probe(write_probe(tmp_path)).metrics
    gain, ratio = _figures(metrics)
    assert 0.1 < gain < 1
    assert 2 < ratio <= 20

    def found(times):
        if metric == "gain":
            changed = _with(metrics, "gain", lambda x: x + times * gain / 100)
        else:
            changed = _with(metrics, "error_ratio", lambda x: x * times * ratio)
        return [str(each.place) for each in locate(changed) if each.kind in ("gain", "error")]

    # head means are 0 +- 1e-4 and 1 +- 0.3: far less than the factors beside 1
    assert found(2.0) == ["model.layers.2.self_attn, head 1"]
    assert not found(0.2)


def test_it_is_said_of_candidates_alone_that_nothing_was_named_of(tmp_path):
    probed = read_probe(write_probe(tmp_path, shadows=("fa2", "mine")))
    answer = answer_of_probe(probed)
    assert [line.split(":")[0] for line in answer.unsure] == ["fa2", "mine"]
    name = "deviation/model.layers.2.self_attn/mine/head_1/out/error_ratio"
    wrong = Series(list(probed.metrics[name].steps), [1e4] * 6)
    answer = answer_of_probe(replace(probed, metrics={**probed.metrics, name: wrong}))
    assert [line.split(":")[0] for line in answer.places] == ["mine"]
    assert [line.split(":")[0] for line in answer.unsure] == ["fa2"]


def test_nothing_is_said_without_a_golden_or_with_few_looks(tmp_path):
    metrics = read_probe(write_probe(tmp_path / "a", golden=False)).metrics
    assert below_the_noise(metrics) == ()
    metrics = read_probe(write_probe(tmp_path / "b")).metrics
    few = {name: Series(list(s.steps)[:3], list(s.values)[:3]) for name, s in metrics.items()}
    assert below_the_noise(few) == ()
