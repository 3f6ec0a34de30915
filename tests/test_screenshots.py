"""The pictures that pages of the documentation show are those that `make screenshots` takes.

Whether they are of today's pages is asked before a release (`.ci/release_check.py`) and not here:
to take them needs a browser, and the quickstart study of a machine that answers as README.md says.
"""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("selenium")
    return runpy.run_path(str(ROOT / "docs" / "take_screenshots.py"))


def shown():
    """The PNGs that some page shows, below docs/."""
    return {
        (page.parent / target).resolve().relative_to(ROOT / "docs").as_posix()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text())
    }


def test_each_picture_of_a_page_is_taken_by_the_script_and_each_of_the_script_is_shown(script):
    on_disk = {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.png")
    }
    assert {*script["SHOWN"]} == shown() == on_disk


def test_pictures_are_small_enough_for_a_clone(script):
    sizes = {name: (ROOT / "docs" / name).stat().st_size for name in script["SHOWN"]}
    assert [name for name, size in sizes.items() if size > script["MOST_BYTES"]] == []
    assert sum(sizes.values()) < 1_000_000


def test_it_is_on_record_of_which_sources_the_pictures_were_taken(script):
    kept = json.loads(script["MADE_OF"].read_text())
    assert {"stability/report/page/assets/report.css"} < {*kept} & {*script["made_of"]()}


def test_a_screen_holds_what_was_not_erased(script):
    """As rich writes it: up a line, erased, written anew."""
    written = b"\x1b[?25lone\r\nbar 1\r\nbar 2\r\x1b[2K\x1b[1A\x1b[2Kdone\r\nbar 3\r\n\x1b[?25h"
    assert script["screen_of"](written) == "one\ndone\nbar 3\n"


def test_docs_are_renewed_only_from_a_study_that_answers_as_the_readme_says(script):
    readme = "x\n```text\na PASS\n\narm  3x\n```\n```text\nother\n```\n"
    assert script["is_of_readme"]("\x1b[1ma PASS\x1b[0m  \n\n arm  3x\nmore\n", readme)
    assert not script["is_of_readme"]("a PASS\n\narm  2x\n", readme)
