"""Loss, drift, its growth and what was watched, against the records."""

import json
import re
from dataclasses import replace

import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.records.metric_columns import Series
from stability.records.metric_names import EVAL_LOSS, watch_name
from stability.report.page.html import render
from tests.stability.report.pages import figures_of, mean_of, page_of, traces_of

ARM = "flash_all_bf16"


@pytest.fixture(scope="module")
def page(full_study):
    return page_of(full_study)


def test_watched_measurements_are_those_of_the_logs(full_study, page):
    want = mean_of(full_study, ARM, watch_name("grad_norm"))
    lines = [
        t for t in traces_of(page, "watch") if t["meta"] == {"arm": ARM, "figure": "grad_norm"}
    ]
    thick = next(line for line in lines if line["name"] == ARM)
    assert dict(zip(thick["x"], thick["y"], strict=True)) == pytest.approx(want, rel=1e-6)


def test_growth_stands_below_the_drift(full_study, page):
    section = re.search(r'<section id="section-drift".*?</section>', page, re.DOTALL).group(0)
    rows = {row.arm: row for row in study_growth(read_study(full_study))}
    found = dict(re.findall(r'data-arm-row="([^"]*)">(.*?)</tr>', section))
    assert set(found) == {arm for arm, row in rows.items() if row.slope.mean}
    for arm, cells in found.items():
        slope = re.findall(r'<td class="num">([^<]*)', cells)[1]
        mantissa, exponent = slope.split()[0].split("e")[0], slope.split("e")[-1]
        assert float(f"{mantissa}e{exponent}") == pytest.approx(rows[arm].slope.mean, rel=0.06)
    said = re.search(r"grows</h3>\s*<p>(.*?)</p>", section, re.DOTALL).group(1)
    dynamics = next(iter(rows.values())).dynamics
    assert dynamics.reason in said
    assert ("doubles in" in said) == dynamics.is_exponential


def test_charts_hold_the_numbers_of_the_records(finished):
    lines = (finished / "flash_fa2" / "seed-1" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    name = "drift/all/w1"
    logged = {e["step"]: e[name] for e in entries if name in e and e["step"] > 0}
    traces = traces_of(page_of(finished), "drift")
    trace = next(
        t
        for t in traces
        if t["name"] == "flash_fa2, seed 1" and t["meta"] == {"arm": "flash_fa2", "metric": "w1"}
    )
    assert dict(zip(trace["x"], trace["y"], strict=True)) == pytest.approx(logged, rel=1e-5)


def test_zero_drift_is_said_where_a_log_axis_cannot_show_it(finished):
    page = page_of(finished)
    data = figures_of(page)
    names = [trace.get("name") for trace in data["drift"]["data"]]
    assert "rerun: 0 (exact)" in names
    assert "rerun: exactly 0 at all 18 comparisons" in page
    assert any("0 (exact)" in note["text"] for note in data["ladder"]["layout"]["annotations"])


HELD_OUT = {"baseline": 2.93, "flash_fa2": 2.93 - 1.7e-5, "init_seed": 3.4}
"""The held-out loss of arms at the last step; the others have none."""


@pytest.fixture(scope="module")
def held_out(finished):
    """A study whose arms in HELD_OUT have losses on held-out text at two steps."""
    study = read_study(finished)
    arms = tuple(
        replace(
            arm,
            runs={
                seed: replace(run, metrics={**run.metrics, EVAL_LOSS: _losses(arm.name, seed)})
                for seed, run in arm.runs.items()
            },
        )
        if arm.name in HELD_OUT
        else arm
        for arm in study.arms
    )
    return replace(study, arms=arms)


def _losses(arm, seed):
    # the seeds' own losses differ by far more than the arms
    last = HELD_OUT[arm] + 0.1 * seed - (2e-6 * seed if arm == "flash_fa2" else 0.0)
    return Series([100, 200], [last + 1.0, last])


def test_held_out_losses_are_drawn_less_the_baselines_with_the_margin_shaded(held_out):
    page = render(held_out, ladder_of(held_out))
    figure = figures_of(page)["held-out"]
    means = {trace["name"]: trace for trace in figure["data"] if trace.get("showlegend", True)}
    assert {*means} == {"flash_fa2", "init_seed"}
    assert means["flash_fa2"]["x"] == [100, 200]
    assert means["flash_fa2"]["y"] == pytest.approx([-1.8e-5, -1.8e-5], rel=1e-6)
    assert means["init_seed"]["visible"] == "legendonly"
    margin = held_out.policy.margin_nats
    shade, edge = figure["layout"]["shapes"]
    assert (shade["y0"], edge["y0"], edge["y1"]) == (margin, margin, margin)
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < -1.9e-5 < margin < high < shade["y1"]
    # what lies off the scale at first does not set it
    near = figure["layout"]["meta"]["scale"]["the arms alone"]["yaxis.range"]
    assert near[0] < -1.9e-5 < 0 < near[1] < 1e-4


def test_the_ladder_has_a_column_of_held_out_losses_where_there_are_any(held_out, finished):
    page = render(held_out, ladder_of(held_out))
    page = page[page.index('<section id="top">') : page.index('<section id="changes">')]
    assert page.count("held-out loss</th>") == 1

    def cells(arm):
        line = re.search(rf'<th scope="row">{arm}<.*?</tr>', page, re.DOTALL).group(0)
        return re.findall(r'<td class="num[^>]*>([^<]*)(?:<small>([^<]*))?', line)

    assert cells("baseline")[1][0] == "2.98000"
    assert cells("flash_fa2")[1] == ("2.97998", "-1.8e-5")
    assert cells("nudge")[1] == ("\N{EN DASH}", "")
    assert len(cells("nudge")) == 7
    assert "held-out loss</th>" not in page_of(finished)
    assert "held-out" not in figures_of(page_of(finished))
