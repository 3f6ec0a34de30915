"""A waterfall on record comes back as it was written, in one order, and damage is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from stability.records.paths import RunPaths
from stability.records.sealed_json import write_sealed
from stability.records.waterfall_record import WaterfallRecord, read_waterfalls, write_waterfall

STEPS = [
    {"change": "none", "point": "", "format": "", "errors": {"out": 3e-3, "dq": 4e-3}},
    {"change": "lowered", "point": "scores", "format": "bf16", "errors": {"out": 2e-3, "dq": 0.0}},
    {"change": "raised", "point": "scores", "format": "fp64", "errors": {"out": 1e-3, "dq": 1.0}},
]
RECORD = WaterfallRecord(
    profile="all_bf16",
    format="bf16",
    layer=2,
    step=150,
    point={"causal": True, "changes": [["splits", 2]]},
    numerics={"scores": "bf16"},
    steps=STEPS,
    versions={"torch": "2.13.0"},
)


def test_what_was_written_is_read_in_the_order_of_runs_and_files(tmp_path):
    first, second = (RunPaths.for_run(tmp_path, arm, 0) for arm in ("b", "a"))
    later = replace(RECORD, step=1000)
    for record in (later, RECORD, RECORD):
        write_waterfall(first, record)
    write_waterfall(second, RECORD)
    expected = [(first, RECORD), (first, later), (second, RECORD)]
    assert read_waterfalls([first, second]) == expected
    assert read_waterfalls([RunPaths.for_run(tmp_path, "none", 0)]) == []


def test_another_choice_is_another_file(tmp_path):
    run = RunPaths.for_run(tmp_path, "a", 0)
    others = [
        replace(RECORD, numerics={"scores": "fp16"}),
        replace(RECORD, point={**RECORD.point, "causal": False}),
        replace(RECORD, layer=3),
        replace(RECORD, profile="fa2"),
    ]
    paths = {write_waterfall(run, record) for record in (RECORD, *others)}
    assert len(paths) == 5
    assert {path.parent for path in paths} == {tmp_path / "a" / "seed-0" / "waterfalls"}


@pytest.mark.parametrize("profile", ["../../out", "<script>", "\N{SNOWMAN}" * 300, ""])
def test_no_profile_leads_out_of_the_run(tmp_path, profile):
    run = RunPaths.for_run(tmp_path, "a", 0)
    record = replace(RECORD, profile=profile)
    path = write_waterfall(run, record)
    assert path.resolve().parent == (run.root / "waterfalls").resolve()
    assert read_waterfalls([run]) == [(run, record)]


def test_the_name_says_what_was_changed():
    assert RECORD.name == "all_bf16 splits=2, layer 2, step 150"


def _flip(path: Path) -> None:
    path.write_text(path.read_text().replace("0.003", "0.004"))


def _reseal(path: Path, **changes: object) -> None:
    content = {name: getattr(RECORD, name) for name in RECORD.__slots__}
    write_sealed(path, {**content, **changes})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_flip, "must have the checksum"),
        (lambda path: path.write_text(path.read_text()[:50]), "is torn or damaged"),
        (lambda path: write_sealed(path, {"profile": "fa2"}), "missing key format, layer"),
        (lambda path: _reseal(path, layer="2"), "layer must be of type int, is '2'"),
        (lambda path: _reseal(path, steps=[]), "steps must be one as it is"),
        (
            lambda path: _reseal(path, steps=[{**STEPS[0], "errors": {"out": "<b>"}}]),
            "out must be of",
        ),
        (lambda path: _reseal(path, steps=[{**STEPS[0], "change": "bent"}]), "change must be one"),
        (lambda path: _reseal(path, steps=[*STEPS, STEPS[0]]), "steps must be one"),
        (lambda path: _reseal(path, steps=[*STEPS[:-1]]), "steps must be one"),
        (lambda path: _reseal(path, steps=[{**STEPS[0], "point": 3}]), "point must be of"),
    ],
)
def test_a_damaged_waterfall_is_named(tmp_path, spoil, said):
    path = write_waterfall(RunPaths.for_run(tmp_path, "a", 0), RECORD)
    spoil(path)
    with pytest.raises(ValueError, match=said) as caught:
        read_waterfalls([RunPaths.for_run(tmp_path, "a", 0)])
    assert str(path) in str(caught.value)
