"""The pages state what the GPU's results say, and results that are new change just those lines."""

import copy
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture
def fill(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("fill_readme")
    sys.modules.pop("fill_readme")


@pytest.fixture
def measured(fill):
    clock, model = (
        json.loads((FOLDER / "results" / name).read_text()) for name in ("cuda.json", "static.json")
    )
    return fill.Measured(copy.deepcopy(clock), model)


@pytest.fixture
def pages(fill, monkeypatch, tmp_path):
    """Copies of the pages, which `main` reads and writes."""
    for block in fill.BLOCKS:
        copied = tmp_path / block.page
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text((fill.ROOT / block.page).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    return tmp_path


def test_the_pages_state_what_was_measured(fill):
    assert fill.main(["--check"]) == 0


def test_speeds_are_other_times_over_ours_and_means_are_geometric(fill, measured):
    for row in measured.clock["rows"]:
        if row["section"] == "memory" or "refused" in row:
            continue
        ours = row["name"] in ("fa2 launches", "flash:fa2")
        row["forward_s"] = 1.0 if ours else 3.0
        if row["case"].endswith("q512-k512-d64") and ours and row["causal"]:
            row["forward_s"] = 24.0
    text = fill.speed_rows(measured)
    assert "forward; backward | 3.0 to 3.0x; 1.1 to 1.6x |" in text
    # 3 / 24, 3 and 3: the third root of 9 / 8
    assert "| 3.00 to 3.00x; 1.04 to 3.00x |" in text


def test_a_new_run_changes_the_lines_that_state_it_and_no_others(
    fill, measured, pages, monkeypatch
):
    old = {block.page: (pages / block.page).read_text() for block in fill.BLOCKS}
    measured.clock["hardware"]["name"] = "NVIDIA X9"
    measured.clock["commit"] = "abcdef0123-changed"
    del measured.clock["not_run"]
    results = pages / "results"
    results.mkdir()
    (results / "cuda.json").write_text(json.dumps(measured.clock))
    (results / "static.json").write_text(json.dumps(measured.model))
    monkeypatch.setattr(fill, "RESULTS", results)
    assert fill.main(["--check"]) == 1
    assert {page: (pages / page).read_text() for page in old} == old, "--check writes nothing"
    assert fill.main([]) == 0
    new = {page: (pages / page).read_text() for page in old}
    changed = {
        page: set(new[page].splitlines()) - set(text.splitlines()) for page, text in old.items()
    }
    assert {page: len(lines) for page, lines in changed.items()} == {
        "README.md": 1,
        "docs/measured.md": 2,
        "kernels/benchmarks/README.md": 1,
    }
    assert all("X9" in " ".join(lines) for lines in changed.values())
    assert "at commit abcdef0-changed," in new["docs/measured.md"]
    assert "were not reached" not in new["docs/measured.md"].partition("memory at length")[0]
    assert not list(pages.rglob("*.part"))


@pytest.mark.parametrize("missing", ["section", "place", "model", "memory", "key"])
def test_with_something_missing_no_page_is_written(
    fill, measured, pages, monkeypatch, capsys, missing
):
    results = pages / "results"
    results.mkdir()
    monkeypatch.setattr(fill, "RESULTS", results)
    measured.clock["hardware"]["name"] = "NVIDIA X9"
    rows = measured.clock["rows"]
    if missing in ("section", "memory"):
        left_out = {"section": "kernels", "memory": "memory"}[missing]
        measured.clock["rows"] = [row for row in rows if row["section"] != left_out]
    elif missing == "place":
        page = pages / "docs/measured.md"
        page.write_text(page.read_text().replace("On one NVIDIA", "On an NVIDIA"))
    elif missing == "key":
        del measured.clock["versions"]
    else:
        measured.model["rows"].pop()
    (results / "cuda.json").write_text(json.dumps(measured.clock))
    (results / "static.json").write_text(json.dumps(measured.model))
    assert fill.main([]) == 2
    assert {
        "section": "cuda.json: section kernels has no sdpa:flash, full, length 8192, head_dim 64",
        "memory": "cuda.json: section memory has no length 8192 and 16384",
        "place": "docs/measured.md: lines like",
        "model": "static.json: has no backward, head_dim 256",
        "key": "has no 'versions'",
    }[missing] in capsys.readouterr().err
    assert not any("X9" in (pages / block.page).read_text() for block in fill.BLOCKS)
