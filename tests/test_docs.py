"""docs/architecture.md and docs/chaos.md show the files, contracts and records of today."""

import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.pages import blocks_for

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RECORDS = sorted((ROOT / "experiments" / "results").glob("*.cpu.json"))
((_, TREE),) = blocks_for(
    "test_docs.py::test_a_folder_of_the_tree_exists", "docs/architecture.md", "text"
)
PATHS = sorted(set(re.findall(r"`((?:[a-z_0-9-]+/)+(?:[A-Za-z_0-9-]+\.[a-z]+)?)`", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_named_file_exists(path):
    assert (ROOT / path).exists()


def test_a_folder_of_the_tree_exists():
    folders = [line.split()[0] for line in TREE.splitlines() if not line.startswith(" ")]
    folders += re.findall(r"(?<=[;:,] )[\w/]+/(?= |,|;)", TREE)
    assert len(folders) > 12
    within = ("", "stability", "stability/report", "kernels/attention_kernels", "experiments")
    homes = [ROOT / home for home in within]
    assert [x for x in folders if not any((home / x).is_dir() for home in homes)] == []


def test_enough_files_are_named():
    assert len(PATHS) > 30


def test_picture_is_drawn_from_the_contracts_of_today():
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "draw_rooms.py"))
    assert script["PICTURE"].read_text() == script["draw"](), "run `make docs`"


def test_picture_names_every_room():
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    for package in ("stability", "kernels/attention_kernels"):
        for path in (ROOT / package).iterdir():
            if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
                continue
            assert f">{path.stem}</text>" in picture, path


def test_the_table_of_chaos_is_that_of_its_record():
    drifts = runpy.run_path(str(ROOT / "docs" / "scripts" / "draw_chaos.py"))["drifts"]()
    page = (ROOT / "docs" / "chaos.md").read_text()
    rows = {
        "1-ULP nudge": "a [nudge](glossary.md#nudge) of 1 ULP",
        "flash, fa2": "flash, fa2",
        "flash, all BF16": "flash, every point in BF16",
        "BF16 vs FP32": "BF16 against FP32",
        "flash, all FP32": "flash against plain, both in FP32",
    }
    for pair, label in rows.items():
        values = [drifts[pair].get(step) for step in (0, 1, 20, 100, 200)]
        cells = ["" if value is None else f"{value:.1e}" for value in values]
        assert f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |") in page
    # what the text says of it
    nudge, fa2 = drifts["1-ULP nudge"], drifts["flash, fa2"]
    assert round(nudge[1] / nudge[0]) == 94
    assert round(nudge[200] / fa2[200], 1) == 1.1


def test_the_readme_counts_what_the_records_of_experiments_decide():
    records = [json.loads(path.read_text()) for path in RECORDS]
    found = Counter(x["decision"] for each in records for x in each["tests"] if not x["control"])
    said = f"{found['holds']} hold, {found['refuted']} refuted, {found['undecided']} undecided"
    readme = (ROOT / "README.md").read_text()
    assert f"what {len(records)} published claims state" in readme
    assert f"| {said} |" in readme


def test_each_paper_whose_claim_an_experiment_tests_is_to_be_cited():
    sources = [path.read_text() for path in (ROOT / "experiments").glob("*.py")]
    named = {
        number
        for text in sources
        for number in re.findall(r"^Source: [^\n]*arXiv (\d{4}\.\d{5})", text, re.MULTILINE)
    }
    assert len(named) >= 5
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert {each["url"].rpartition("/")[2] for each in cited} == named
    assert all(each["title"] and each["authors"] and each["year"] for each in cited)
