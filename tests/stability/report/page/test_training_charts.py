"""Loss, drift, its growth and what was watched, against the records."""

import json
import re

import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.study_records import read_study
from stability.records.metric_names import watch_name
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
