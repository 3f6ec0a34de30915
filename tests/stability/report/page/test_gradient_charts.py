"""The gradient evidence on the page: the verdict's figures with their intervals and limits."""

import math
from dataclasses import replace

import pytest

from stability.config.study import PolicyConfig
from stability.report.page.gradient_charts import gradient_section
from stability.report.view.palette import arm_styles
from tests.stability.report.synthetic_verdict import study_verdict

FIGURES = {
    "flash_fa2": {
        "ratio": 0.95,
        "ratio_low": 0.92,
        "ratio_high": 0.99,
        "share": -0.003,
        "share_low": -0.007,
        "share_high": 0.002,
        "ratio_as_trained": 1.01,
        "looks": 20.0,
    },
    # too few looks for a share's interval, and no arm else was looked at
    "broken": {"ratio": 26.0, "ratio_low": 20.0, "ratio_high": 33.0, "share": 0.3, "looks": 12.0},
}
POLICY = PolicyConfig(max_gradient_ratio=3.0, max_share=0.02)


@pytest.fixture(scope="module")
def charts():
    verdict = study_verdict()
    arms = tuple(
        replace(
            arm,
            levels={
                **arm.levels,
                "gradient": replace(arm.levels["gradient"], figures=FIGURES.get(arm.arm, {})),
            },
        )
        for arm in verdict.arms
    )
    section = gradient_section(
        replace(verdict, arms=arms), POLICY, arm_styles([arm.arm for arm in arms])
    )
    return {chart.key: chart.figure.to_plotly_json() for chart in section.charts}


def test_each_arm_that_was_looked_at_has_its_figure_and_interval(charts):
    for name in ("ratio", "share"):
        marks = {
            (trace["meta"]["arm"], "-open" in trace["marker"]["symbol"]): trace
            for trace in charts[f"gradient-{name}"]["data"]
        }
        for arm, figures in FIGURES.items():
            mark = marks[arm, False]
            assert mark["x"] == [figures[name]]
            if f"{name}_low" not in figures:
                assert "error_x" not in mark
                continue
            low, high = figures[f"{name}_low"], figures[f"{name}_high"]
            assert mark["x"][0] - mark["error_x"]["arrayminus"][0] == pytest.approx(low)
            assert mark["x"][0] + mark["error_x"]["array"][0] == pytest.approx(high)
        assert {arm for arm, _ in marks} == {*FIGURES}
    as_trained = [t for t in charts["gradient-ratio"]["data"] if "-open" in t["marker"]["symbol"]]
    assert [trace["x"] for trace in as_trained] == [[1.01]]


def test_the_limits_are_the_policys_and_in_sight(charts):
    for name, limit in (("ratio", 3.0), ("share", 0.02)):
        layout = charts[f"gradient-{name}"]["layout"]
        shade, edge = layout["shapes"][:2]
        assert (shade["x0"], edge["x0"], edge["x1"]) == (limit, limit, limit)
        low, high = layout["xaxis"]["range"]
        place = math.log10(limit) if name == "ratio" else limit
        assert low < place < high < (math.log10(shade["x1"]) if name == "ratio" else shade["x1"])
        assert layout["meta"]["rows"] == [*FIGURES]


def test_without_a_look_there_is_no_chart():
    assert gradient_section(study_verdict(), POLICY, {}) is None
    assert gradient_section(None, POLICY, {}) is None
