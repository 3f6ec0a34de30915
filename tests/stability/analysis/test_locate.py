"""Where an error is: exactly there, and nowhere in a healthy run."""

import pytest

from stability.analysis.locate import EVERY_LAYER, MOST_LAYERS, Location, locate, sentences
from stability.analysis.looks import OperatorLimits
from stability.analysis.probe_records import metrics_of_probe, read_probe
from stability.records.metric_names import COMPARED, is_made_here
from tests.sampling import one_in
from tests.stability.report.synthetic_probe import write_probe


def _layer(index):
    return f"model.layers.{index}.self_attn"


@pytest.mark.parametrize("golden", [True, False], ids=["error-ratio", "rel-fro"])
def test_an_error_planted_in_one_head_is_found_in_it_alone_and_since_its_step(tmp_path, golden):
    metrics = read_probe(write_probe(tmp_path, planted=(2, 1), golden=golden)).metrics
    found = locate(metrics)
    assert {each.place for each in found} == {Location(_layer(2), 1)}
    assert {each.what for each in found} == {"out", "dq", "dk", "dv"}
    assert {each.since for each in found} == {20}
    assert {each.kind for each in found} == {"error"}
    (line,) = sentences(found)
    metric = "error ratio" if golden else "relative error"
    assert line.startswith(f"{_layer(2)}, head 1: {metric} stands out since step 20: out ")


def test_an_error_of_a_whole_layer_is_the_layers(tmp_path):
    metrics = read_probe(write_probe(tmp_path, planted=(1, 0), heads=0, since=0)).metrics
    assert {each.place for each in locate(metrics)} == {Location(_layer(1))}


def test_most_heads_of_a_layer_are_the_layer(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path, planted=(1, 0), since=0)).metrics)
    first = f"deviation/{_layer(1)}/head_0/"
    for name in [name for name in metrics if name.startswith(first)]:
        for other in ("head_1", "head_2"):
            metrics[name.replace("head_0", other)] = metrics[name]
    assert {each.place for each in locate(metrics)} == {Location(_layer(1))}


@pytest.mark.parametrize("golden", [True, False], ids=["against FP64", "against the baseline"])
def test_a_fifth_of_an_ulp_is_found_by_its_sign_where_max_abs_shows_nothing(tmp_path, golden):
    probed = read_probe(write_probe(tmp_path, biased=3, golden=golden))
    found = locate(probed.metrics)
    assert {(each.kind, each.place, each.what) for each in found} == {
        ("bias", Location(_layer(3)), "out")
    }
    assert found[0].value == pytest.approx(0.2, abs=0.05)
    (shadow,) = metrics_of_probe(probed)
    largest = [shadow.worst(layer, "out", "max_abs") for layer in probed.layers]
    assert len(set(largest)) == 1
    against = "FP64" if golden else "the baseline"
    assert sentences(found)[0].startswith(
        f"{_layer(3)}: signed error against {against} is biased since step 0: out +0"
    )


def test_a_bias_must_keep_its_sign(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path)).metrics)
    layer, head = f"deviation/{_layer(0)}/dv", f"deviation/{_layer(1)}/head_1/dv"
    metrics[f"{layer}/golden_bias_ulp"].values = [0.2, -0.21, 0.2, -0.2, 0.2, -0.2]
    metrics[f"{head}/golden_bias_ulp"].values = [0.0, 0.0, 0.2, 0.0, 0.2, 0.2]
    assert locate(metrics) == []
    metrics[f"{head}/golden_bias_ulp"].values = [0.2, 0.201, 0.2, 0.2, 0.199, 0.2]
    found = locate(metrics)
    assert [(each.place, each.since) for each in found] == [(Location(_layer(1), 1), 0)]


def test_a_wrong_factor_is_named_with_its_size(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path)).metrics)
    series = metrics[f"deviation/{_layer(1)}/head_2/dk/gain"]
    series.values = [5e-3 + 1e-6 * step for step in (1, -1, 2, 0, -2, 1)]
    found = locate(metrics)
    assert [(each.kind, each.what, each.place) for each in found] == [
        ("gain", "dk", Location(_layer(1), 2))
    ]
    assert sentences(found) == [
        f"{_layer(1)}, head 2: a wrong factor since step 0: dk is 1.0050 ± 6e-07 times what it "
        "should be"
    ]
    assert locate(metrics, OperatorLimits(gain=1e-2)) == []


@pytest.mark.parametrize(("layers", "heads"), one_in(2, [(1, 1), (2, 2), (12, 0), (4, 4)]))
def test_a_healthy_run_points_at_nothing(tmp_path, layers, heads):
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        probed = read_probe(write_probe(folder, seed=seed, layers=layers, heads=heads))
        assert locate(probed.metrics) == []


@pytest.mark.parametrize("steps", [1, 6])
def test_what_is_bad_everywhere_alike_is_said_of_the_whole_model(tmp_path, steps):
    """An error 20,000 times the baseline's in every layer: no layer stands out, and all are bad."""
    metrics = dict(read_probe(write_probe(tmp_path)).metrics)
    for name, series in metrics.items():
        if name.endswith(("error_ratio", "rel_fro")):
            series.values = [2e4 * value for value in series.values]
        metrics[name] = type(series)(series.steps[:steps], series.values[:steps])
    found = locate(metrics)
    assert {each.place for each in found} == {EVERY_LAYER}
    of_every_attention = {*filter(is_made_here, COMPARED)} - {"dbias", "dsinks"}
    assert {each.what for each in found} == of_every_attention
    (line,) = sentences(found)
    assert line.startswith("every layer: error ratio is beyond its limit since step 0: out ")
    assert all(1e4 < each.value < 4e4 for each in found)


def test_one_head_that_is_bad_in_every_layer_is_named_in_each_and_not_the_model(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path)).metrics)
    for name, series in metrics.items():
        is_head = "/head_" not in name or "/head_1/" in name
        if name.endswith("out/error_ratio") and is_head:
            series.values = [1e3 * value for value in series.values]
    assert {each.place for each in locate(metrics)} == {Location(_layer(i), 1) for i in range(4)}


def test_where_most_layers_are_bad_one_that_is_far_worse_still_has_a_name(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path, heads=0)).metrics)
    for name, series in metrics.items():
        if name.endswith("out/error_ratio"):
            times = 1e4 if _layer(1) in name else 1 if _layer(2) in name else 40
            series.values = [times * value for value in series.values]
    found = locate(metrics)
    assert [each.place for each in found] == [MOST_LAYERS, Location(_layer(1))]
    assert found[1].peers < 1e3 < found[1].value


def test_an_error_below_the_accepted_factor_is_none_and_a_lasting_one_above_is(tmp_path):
    metrics = dict(read_probe(write_probe(tmp_path, heads=0)).metrics)
    for name, series in metrics.items():
        if name.endswith("error_ratio"):
            series.values = [0.1 for _ in series.values]
    series = metrics[f"deviation/{_layer(0)}/out/error_ratio"]
    series.values = [1.9, 1.91, 1.89, 1.9, 1.9, 1.92]
    assert locate(metrics) == []
    series.values = [1.9] * 5 + [2.1]
    assert locate(metrics) == []
    series.values = [3.0, 3.01, 2.99, 3.0, 3.02, 3.0]
    assert [each.since for each in locate(metrics)] == [0]
    series.values = [1.9] * 5 + [21.0]
    assert [(each.since, each.value) for each in locate(metrics)] == [(50, pytest.approx(21.0))]


def test_each_shadow_is_held_against_itself(tmp_path):
    metrics = read_probe(write_probe(tmp_path, planted=(2, 1), shadows=("good", "bad"))).metrics
    healthy = {name: series for name, series in metrics.items() if "/good/" not in name}
    calm = tmp_path / "calm"
    calm.mkdir()
    other = read_probe(write_probe(calm, shadows=("good",))).metrics
    found = locate({**healthy, **other})
    assert {each.shadow for each in found} == {"bad"}
    assert sentences(found)[0].startswith("bad: ")
