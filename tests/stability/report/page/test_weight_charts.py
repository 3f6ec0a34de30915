"""Parameters that drift, and the histograms of the weights, against the records."""

import math

import pytest
import torch

from stability.metrics.weight_counts import WEIGHT_EDGES, weight_counts
from stability.records.metric_log import MetricLog
from stability.records.metric_names import WEIGHT_HISTOGRAM, drift_name
from stability.records.paths import RunPaths
from stability.report.page.weight_charts import SHOWN
from tests.stability.report.pages import mean_of, page_of, traces_of
from tests.stability.report.synthetic import STEPS
from tests.stability.report.synthetic_full import PARAMETERS

ARM = "flash_all_bf16"


@pytest.fixture(scope="module")
def page(full_study):
    return page_of(full_study)


def test_map_of_parameters_holds_the_means_the_most_drifted_on_top(full_study, page):
    (trace,) = [t for t in traces_of(page, "parameters") if t["meta"] == {"arm": ARM}]
    shares = {**PARAMETERS, "blocks.0.qkv.weight": 1.0}
    assert trace["y"] == sorted(shares, key=shares.get, reverse=True)
    for row, name in enumerate(trace["y"]):
        drifts = mean_of(full_study, ARM, drift_name(name, "rel_l2"))
        for column, step in enumerate(trace["x"]):
            assert float(trace["customdata"][row][column]) == pytest.approx(drifts[int(step)], 1e-5)
            assert trace["z"][row][column] == pytest.approx(math.log10(drifts[int(step)]), 1e-5)


def test_only_so_many_parameters_are_drawn_and_it_is_said(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    log = MetricLog(RunPaths.for_run(folder, ARM, 0).metrics)
    log.append(STEPS, {drift_name(f"p{n}", "rel_l2"): 1.0 + n for n in range(2 * SHOWN)})
    log.close()
    page = page_of(folder)
    (trace,) = [t for t in traces_of(page, "parameters") if t["meta"] == {"arm": ARM}]
    assert trace["y"][0] == f"p{2 * SHOWN - 1}"
    assert len(trace["y"]) == SHOWN
    assert f"The {SHOWN} of {2 * SHOWN + 1} parameters" in page


def test_weights_that_are_all_nan_have_no_histogram_and_the_page_is_whole(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    for arm, count in ((ARM, 0), ("baseline", 10)):
        log = MetricLog(RunPaths.for_run(folder, arm, 0).metrics)
        counts = weight_counts([torch.full((5,), math.nan)])
        log.append(STEPS, {}, {WEIGHT_HISTOGRAM: [count + each for each in counts]})
        log.close()
    assert [trace["meta"]["arm"] for trace in traces_of(page_of(folder), "weights")] == ["baseline"]


def test_histogram_of_weights_pools_the_seeds(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study")
    places = {0: (10, 50), 1: (50, 90)}
    for seed, (one, other) in places.items():
        counts = [0] * (len(WEIGHT_EDGES) + 1)
        counts[one], counts[other] = 30, 10
        log = MetricLog(RunPaths.for_run(folder, ARM, seed).metrics)
        log.append(STEPS, {}, {WEIGHT_HISTOGRAM: counts})
        log.close()
    (trace,) = traces_of(page_of(folder), "weights")
    assert trace["meta"] == {"arm": ARM, "step": str(STEPS)}
    shares = dict(zip(trace["x"], trace["y"], strict=True))
    assert {x: y for x, y in shares.items() if y} == {10: 30 / 80, 50: 40 / 80, 90: 10 / 80}
    assert list(shares) == list(range(10, 91))
