"""Waterfalls on record as bars, and one that is damaged."""

import html

from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, write_waterfall
from tests.stability.report.pages import page_of, traces_of
from tests.stability.report.synthetic import STEPS

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
