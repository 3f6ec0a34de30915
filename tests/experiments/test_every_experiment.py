"""Every experiment is whole, and what is kept of it is of today's settings and on the page."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from experiments.kit.record import read_experiment
from experiments.kit.results_table import described, filled_in
from experiments.kit.runner import KEPT, SIZES, load, names
from stability.config.schema import OptimizerConfig
from stability.records.sealed_json import jsonable

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
NAMES = names(FOLDER)
RESULTS = sorted((FOLDER / "results").glob("*.json"))
MOST_LINES = 300
MOST_LETTERS = {"Claim": 220, "Published": 260, "Source": 100}
"""What a cell of a table of six columns holds."""


def _described(name):
    return described(name, load(FOLDER, name).__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_experiment_is_described_sized_short_and_says_its_command(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert f"    stability experiment {name} [--size cpu|gpu]\n" in text
    assert len(text.splitlines()) <= MOST_LINES
    sections = _described(name).sections
    for section, most in MOST_LETTERS.items():
        assert len(sections[section]) <= most, section
    for size in SIZES:
        assert re.search(rf"(^|; ){size}: \w", sections["Sizes"]), size


@pytest.mark.parametrize("name", NAMES)
def test_every_size_has_settings_and_only_gpu_needs_a_gpu(name):
    sizes = load(FOLDER, name).SIZES
    assert set(sizes) == set(SIZES)
    for size, settings in sizes.items():
        assert dataclasses.is_dataclass(settings)
        written = json.dumps(jsonable(dataclasses.asdict(settings)))
        on_gpu = '"cuda"' in written or '"gpu"' in written
        assert on_gpu == (size == "gpu")
        assert jsonable(dataclasses.asdict(settings)) != jsonable(
            dataclasses.asdict(sizes["gpu" if size != "gpu" else "quick"])
        )


@pytest.mark.parametrize("name", NAMES)
def test_experiment_has_a_test_file_that_measures(name):
    test = Path(__file__).with_name(f"test_{name}.py").read_text()
    assert ".measure(" in test
    assert 'SIZES["quick"]' in test


def test_the_list_holds_experiments_and_their_test_files_only():
    assert "stable_fig3" in NAMES
    assert "find_own_kernel" not in NAMES
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert tested - set(NAMES) == {"every_experiment", "find_own_kernel"}


def _less_what_is_new(settings, kept):
    """Return settings as JSON, less fields that the kept ones lack and that are at their default.

    A field that is new since then stands, at its default, for what was always done.
    """
    if not dataclasses.is_dataclass(settings):
        return jsonable(settings)
    values = {field: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {
        field.name: _less_what_is_new(value, kept.get(field.name, {}))
        for field, value in values.items()
        if field.name in kept or value != _default(field)
    }


def _default(field):
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def test_a_setting_that_is_new_may_be_missing_at_its_default_alone():
    chosen = OptimizerConfig(warmup_steps=3)
    kept = {"lr": 1e-3, "warmup_steps": 3}
    assert _less_what_is_new(chosen, kept) == kept
    other = dataclasses.replace(chosen, state="bf16")
    assert _less_what_is_new(other, kept) == {**kept, "state": "bf16"}
    assert _less_what_is_new(chosen, {**kept, "state": "bf16"}) == {**kept, "state": ""}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_result_is_of_the_settings_of_today_and_drawn(path):
    record = read_experiment(path)
    assert path.stem == f"{record.name}.{record.size}"
    assert record.name in NAMES
    settings = load(FOLDER, record.name).SIZES[record.size]
    assert record.settings == _less_what_is_new(settings, record.settings), "stale: run it again"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert record.controls == "holds"
    assert re.fullmatch(r"[0-9a-f]{7,40}", record.commit), "not of a commit: run it again"
    assert record.agrees == "yes" or record.explanation, "a control must show why"


def test_all_cpu_sizes_take_half_an_hour_at_most():
    seconds = [read_experiment(path).seconds for path in RESULTS if path.stem.endswith(".cpu")]
    assert len(seconds) == len(NAMES)
    assert sum(seconds) <= 1800


def test_the_page_is_what_the_records_say():
    page = (FOLDER / "README.md").read_text()
    records = {
        name: [
            read_experiment(path)
            for size in KEPT
            if (path := FOLDER / "results" / f"{name}.{size}.json") in RESULTS
        ]
        for name in NAMES
    }
    expected = filled_in(page, [_described(name) for name in NAMES], records)
    assert page == expected, "run `stability experiment all --redraw`"


def test_every_figure_belongs_to_a_result():
    figures = {path.stem for path in (FOLDER / "results").glob("*.png")}
    assert figures == {path.stem for path in RESULTS}
