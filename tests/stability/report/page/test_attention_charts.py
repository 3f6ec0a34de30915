"""Maps and curves of the deviation: thinned honestly, exact to what is shown, and compact."""

import json
import math

import numpy as np
import pytest

from stability.analysis.probe_records import LayerTable
from stability.records.metric_columns import Column
from stability.records.metric_log import MetricLog
from stability.records.metric_names import ULP_HISTOGRAM, deviation_name
from stability.records.paths import RunPaths
from stability.report.page.attention_charts import CELLS, deviation_section
from tests.stability.report.pages import page_of, traces_of
from tests.stability.report.synthetic import STEPS
from tests.stability.report.synthetic_full import write_full
from tests.stability.report.typed_arrays import decode


def tables(steps, layers=3, arms=1, scale=1e-3):
    """Tables of three metrics whose every number is another one."""
    found = {}
    for arm in range(arms):
        for metric in ("rel_fro", "error_ratio", "bias_ulp"):
            values = 1 + np.random.default_rng(arm).random((layers, len(steps)))
            values *= 1 if metric == "error_ratio" else scale
            rows = {f"layer_{i}": Column(steps, row) for i, row in enumerate(values)}
            found[f"arm{arm}", "out", metric] = LayerTable.of_columns(rows)
    return found


def drawn(section):
    """The traces of map and curves by metric, as the page's script gets them."""
    charts = []
    for chart in section.charts:
        text = json.dumps(chart.figure.to_plotly_json()["data"], allow_nan=False)
        traces = json.loads(text, object_hook=decode)
        by_metric = {}
        for trace in traces:
            by_metric.setdefault(trace["meta"]["metric"], []).append(trace)
        charts.append(by_metric)
    return charts


def test_short_tables_are_shown_whole_and_nothing_is_said():
    steps = np.arange(0, 500, 5)
    given = tables(steps)
    section = deviation_section(given, "arm", "")
    maps, curves = drawn(section)
    assert [chart.remarks for chart in section.charts] == [(), ()]
    for (_, _, metric), table in given.items():
        (map_,) = maps[metric]
        assert map_["x"] == [str(step) for step in steps]
        assert "text" not in map_
        assert [line["x"] for line in curves[metric]] == [steps.tolist()] * 3
        assert [line["y"] for line in curves[metric]] == table.values.tolist()


def test_long_tables_say_how_they_were_thinned_and_keep_each_spike():
    given = tables(np.arange(2000), layers=48, arms=20)
    given["arm7", "out", "rel_fro"].values[5, 1234] = 0.5
    section = deviation_section(given, "arm", "")
    maps, curves = drawn(section)
    columns = CELLS // (48 * 3 * 20)
    for chart in section.charts:
        (remark,) = chart.remarks
        assert remark.startswith(f"2,000 steps in {columns} columns: each shows")
    map_ = maps["rel_fro"][7]
    assert len(map_["x"]) == len(map_["z"][5]) == columns
    place = int(np.argmax(map_["z"][5]))
    assert (map_["z"][5][place], map_["text"][5][place]) == (0.5, 1234)
    assert map_["hovertemplate"] == "%{y}, step %{text}: %{z:.5g}<extra></extra>"
    line = curves["rel_fro"][7 * 48 + 5]
    assert (line["x"][place], line["y"][place]) == (1234, 0.5)


@pytest.mark.parametrize("scale", [1e-3, 1e-42, 1e300])
def test_a_cell_says_what_the_records_say_to_five_digits(scale):
    given = tables(np.arange(7), scale=scale)
    maps, _ = drawn(deviation_section(given, "arm", ""))
    for (_, _, metric), table in given.items():
        (map_,) = maps[metric]
        ratio = metric == "error_ratio"
        said = map_["customdata"] if ratio else map_["z"]
        assert "{customdata:.5g}" in map_["hovertemplate"] or not ratio
        np.testing.assert_allclose(said, table.values, rtol=1e-7)
    np.testing.assert_allclose(maps["error_ratio"][0]["z"], np.log2(table_of(given)), rtol=1e-6)


def table_of(given):
    return given["arm0", "out", "error_ratio"].values


def test_gaps_and_far_steps_can_be_drawn():
    rows = {"layer_0": Column(np.array([1, 2**40]), np.array([math.inf, 2.0]))}
    given = {("a", "out", name): LayerTable.of_columns(rows) for name in ("rel_fro", "error_ratio")}
    maps, curves = drawn(deviation_section(given, "arm", ""))
    for name, height in (("rel_fro", 2.0), ("error_ratio", 1.0)):
        np.testing.assert_array_equal(maps[name][0]["z"], [[np.nan, height]])
        assert curves[name][0]["x"] == [1, 2**40]
        np.testing.assert_array_equal(curves[name][0]["y"], [np.nan, 2.0])


@pytest.mark.parametrize(("layers", "named"), [(16, True), (48, False)])
def test_a_deep_model_fits_the_screen(layers, named):
    map_, curves = deviation_section(tables(np.arange(3), layers=layers), "arm", "").charts
    assert map_.figure.layout.height <= 1050
    assert curves.figure.layout.showlegend is named


def test_histogram_of_another_length_does_not_cost_the_report(synthetic, tmp_path):
    folder = write_full(tmp_path / "study")
    name = deviation_name("layer_0", "out", ULP_HISTOGRAM)
    log = MetricLog(RunPaths.for_run(folder, "flash_all_bf16", 0).metrics)
    log.append(STEPS, {}, {name: [1, 2, 3]})
    log.close()
    metas = [trace["meta"] for trace in traces_of(page_of(folder), "histogram")]
    assert metas.count({"arm": "flash_all_bf16", "what": "out"}) == 5


def test_deviation_of_each_layer_is_the_mean_of_the_seeds(finished, synthetic):
    traces = traces_of(page_of(finished), "deviation-curves")
    chosen = {"arm": "flash_fa2", "what": "out", "metric": "error_ratio"}
    mine = [trace for trace in traces if trace["meta"] == chosen]
    assert [trace["name"] for trace in mine] == [f"layer_{n}" for n in range(5)]
    want = synthetic.deviations("flash_fa2", 3, 40)["error_ratio"]
    assert mine[3]["y"][mine[3]["x"].index(40)] == pytest.approx(want, rel=1e-12)
