"""What the report draws of a study beside ladder, loss and drift, against the records."""

import html
import json
import math
import re

import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.metric_log import MetricLog
from stability.records.metric_names import (
    ULP_HISTOGRAM,
    WEIGHT_HISTOGRAM,
    deviation_name,
    drift_name,
    watch_name,
)
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, write_waterfall
from stability.report.page.chart import POINTS, SEED_POINTS, thinning_remarks
from stability.report.page.html import render
from stability.report.page.weight_charts import SHOWN
from tests.stability.report.synthetic import STEPS, write_run, write_synthetic
from tests.stability.report.synthetic_full import ALERT, FINDING, PARAMETERS, write_full

ARM = "flash_all_bf16"
WATERFALL = WaterfallRecord(
    profile="all_bf16",
    format="bf16",
    layer=2,
    step=STEPS,
    point={},
    numerics={},
    steps=[
        {"change": "none", "point": "", "format": "", "errors": {"out": 3e-3, "dq": 8e-3}},
        {
            "change": "lowered",
            "point": "scores",
            "format": "bf16",
            "errors": {"out": 1e-4, "dq": 2e-4},
        },
        {
            "change": "lowered",
            "point": "lse",
            "format": "bf16",
            "errors": {"out": 3e-16, "dq": 7e-3},
        },
        {
            "change": "raised",
            "point": "scores",
            "format": "fp64",
            "errors": {"out": 2e-3, "dq": 8e-3},
        },
        {"change": "raised", "point": "lse", "format": "fp64", "errors": {"out": 3e-3, "dq": 4e-3}},
    ],
    versions={},
)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_full(tmp_path_factory.mktemp("studies") / "full")


@pytest.fixture(scope="module")
def page(full):
    return page_of(full)


def page_of(folder):
    study = read_study(folder)
    return render(study, ladder_of(study), stamp="without plotly's own source")


def traces_of(page, key):
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data.group(1))["figures"][key]["data"]


def mean(folder, arm, name):
    """The mean over the seeds by step."""
    runs = read_study(folder).arm(arm).runs.values()
    seeds = [run.series(name) for run in runs]
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in seeds[0]}


def test_time_line_marks_each_event_and_a_run_that_failed(synthetic, tmp_path):
    folder = write_full(tmp_path / "study")
    fp32 = next(arm for arm in synthetic.ARMS if arm["name"] == "fp32")
    RunPaths.for_run(folder, "fp32", 1).metrics.unlink()
    write_run(folder, fp32, 1, state="failed", until=70)
    marks = {
        (trace["meta"]["arm"], trace["name"].split(": ")[1], x): text
        for trace in traces_of(page_of(folder), "timeline")
        for x, text in zip(trace["x"], trace["text"], strict=True)
    }
    assert set(marks) == {
        (ARM, "finding", FINDING.step),
        (ARM, "alert", ALERT.step),
        ("fp32", "failed", 70),
    }
    assert FINDING.text in marks[ARM, "finding", FINDING.step]


def test_map_of_parameters_holds_the_means_the_most_drifted_on_top(full, page):
    (trace,) = [t for t in traces_of(page, "parameters") if t["meta"] == {"arm": ARM}]
    shares = {**PARAMETERS, "blocks.0.qkv.weight": 1.0}
    assert trace["y"] == sorted(shares, key=shares.get, reverse=True)
    for row, name in enumerate(trace["y"]):
        drifts = mean(full, ARM, drift_name(name, "rel_l2"))
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


def test_watched_figures_are_those_of_the_logs(full, page):
    want = mean(full, ARM, watch_name("grad_norm"))
    lines = [
        t for t in traces_of(page, "watch") if t["meta"] == {"arm": ARM, "figure": "grad_norm"}
    ]
    thick = next(line for line in lines if line["name"] == ARM)
    assert dict(zip(thick["x"], thick["y"], strict=True)) == pytest.approx(want, rel=1e-6)


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


def test_waterfall_has_a_bar_only_where_a_point_changes_the_result(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    write_waterfall(RunPaths.for_run(folder, ARM, 0), WATERFALL)
    traces = traces_of(page_of(folder), "waterfall")
    shown = {(t["name"], t["meta"]["result"]): t["y"] for t in traces}
    assert shown["this point alone rounded", "out"] == [1e-4, None]
    assert shown["this point alone rounded", "dq"] == [2e-4, 7e-3]
    assert shown["this point alone in FP64", "dq"] == [8e-3, 4e-3]
    assert shown["the profile as it is", "dq"] == [8e-3, 8e-3]
    assert traces[0]["meta"]["waterfall"] == f"{ARM}, seed 0: all_bf16, layer 2, step {STEPS}"


def test_damaged_waterfall_is_named_and_the_report_goes_on(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    write_waterfall(RunPaths.for_run(folder, ARM, 0), WATERFALL)
    broken = write_waterfall(RunPaths.for_run(folder, "flash_fa2", 0), WATERFALL)
    broken.write_bytes(broken.read_bytes().replace(b"0.008", b"0.009"))
    page = page_of(folder)
    assert f"Not drawn: {broken}" in html.unescape(page)
    assert {t["meta"]["waterfall"].split(",")[0] for t in traces_of(page, "waterfall")} == {ARM}


def test_growth_laws_stand_below_the_drift(full, page):
    section = re.search(r'<section id="section-drift".*?</section>', page, re.DOTALL).group(0)
    laws = {law.arm: law for law in study_growth(read_study(full))}
    found = re.findall(r'data-arm-row="([^"]*)">.*?<td class="num">([^<]*)', section)
    assert {arm: float(doubling.split()[0]) for arm, doubling in found} == {
        arm: pytest.approx(law.doubling_time, rel=5e-3)
        for arm, law in laws.items()
        if law.rate.mean == law.rate.mean
    }


@pytest.mark.parametrize(
    ("seeds", "outcome"), [((0, 1), "OPEN"), (tuple(range(5)), "PASS")], ids=["2 seeds", "5 seeds"]
)
def test_answer_of_the_policy_comes_first(tmp_path, seeds, outcome):
    policy = {"candidate": "flash_fa2", "max_ratio": 1.0, "step": 20}
    page = page_of(write_synthetic(tmp_path / "study", seeds=list(seeds), policy=policy))
    assert page.index(f'<p class="answer {outcome}">') < page.index("<main>")
    whiskers = "90% interval of the mean" if len(seeds) == 5 else "smallest to largest seed"
    assert f"whiskers: {whiskers}" in page


def test_whiskers_are_the_interval_once_there_are_seeds_enough(tmp_path):
    folder = write_synthetic(tmp_path / "study", seeds=list(range(5)))
    row = ladder_of(read_study(folder)).row("fp32")
    marks = [t for t in traces_of(page_of(folder), "ladder") if "error_x" in t]
    early = next(t for t in marks if t["x"] == [row.rel_l2.early.mean])
    interval = row.rel_l2.early.interval
    assert early["x"][0] + early["error_x"]["array"][0] == pytest.approx(interval.high)
    assert early["x"][0] - early["error_x"]["arrayminus"][0] == pytest.approx(interval.low)
    assert interval.high < row.rel_l2.early.high


def test_thinning_is_said_where_it_happens():
    assert thinning_remarks(SEED_POINTS, seeds=2) == thinning_remarks(POINTS, seeds=1) == ()
    (both,) = thinning_remarks(2000, seeds=2)
    assert "Thin lines of 2,000 steps" in both
    assert "thick lines of 2,000 steps" in both
    assert "thin" not in thinning_remarks(2000, seeds=1)[0].lower()


def test_run_that_failed_is_listed_though_no_event_is(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    fp32 = next(arm for arm in synthetic.ARMS if arm["name"] == "fp32")
    RunPaths.for_run(folder, "fp32", 0).metrics.unlink()
    write_run(folder, fp32, 0, state="failed", until=70)
    page = page_of(folder)
    assert "All 1, in words" in page
    assert "<td>failed</td>" in page


def test_histogram_of_another_length_does_not_cost_the_report(synthetic, tmp_path):
    folder = write_full(tmp_path / "study")
    name = deviation_name("layer_0", "out", ULP_HISTOGRAM)
    log = MetricLog(RunPaths.for_run(folder, ARM, 0).metrics)
    log.append(STEPS, {}, {name: [1, 2, 3]})
    log.close()
    metas = [trace["meta"] for trace in traces_of(page_of(folder), "histogram")]
    assert metas.count({"arm": ARM, "what": "out"}) == 5
