"""The check-list of a release finds what is not as it should be."""

import hashlib
import json
import runpy
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "release_check.py"))
FILES = ("pyproject.toml", "stability/__init__.py", "CITATION.cff", "CHANGELOG.md", "tests/slow.md")


@pytest.fixture
def copy(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_version_is_one_everywhere():
    assert len({*SCRIPT["versions"](ROOT).values()}) == 1


@pytest.mark.parametrize("name", FILES[:4])
def test_a_file_of_another_version_is_named(copy, name):
    version = SCRIPT["versions"](copy)["pyproject.toml"]
    change(copy / name, version, "9.9.9")
    said = SCRIPT["version_trouble"](copy)
    assert f"{name} 9.9.9" in said


def test_a_release_has_its_date_in_the_changelog(copy):
    version = SCRIPT["versions"](copy)["pyproject.toml"]
    page = copy / "CHANGELOG.md"
    text = page.read_text()
    heading = next(line for line in text.splitlines() if line.startswith("## "))
    page.write_text(text.replace(heading, f"## {version} (not released)"))
    assert "must have the date" in SCRIPT["version_trouble"](copy)
    page.write_text(text.replace(heading, f"## {version} (2026-12-01)"))
    assert SCRIPT["version_trouble"](copy) == ""


def test_an_old_result_of_slow_tests_is_told(copy):
    (copy / "tests" / "slow.md").write_text("| x | 2026-11-01 |\n| y | 2026-11-03 |\n")
    assert SCRIPT["slow_trouble"](copy, date(2026, 11, 10)) == ""
    assert SCRIPT["slow_trouble"](copy, date(2026, 11, 30)) == "the newest is of 2026-11-03"


def test_pictures_of_older_pages_are_told(tmp_path):
    room, kept = tmp_path / "stability" / "report", tmp_path / "docs/screenshots/made_of.json"
    for path in (room / "page" / "page.css", room / "new_chart.py", kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a")
    digest = hashlib.sha256(b"a").hexdigest()[:16]
    names = ("page/page.css", "gone.css")
    kept.write_text(json.dumps({f"stability/report/{name}": digest for name in names}))
    told = "run make screenshots: stability/report/gone.css, stability/report/new_chart.py"
    assert SCRIPT["picture_trouble"](tmp_path) == f"{told} changed since"
    (room / "page" / "page.css").write_text("b")
    assert "stability/report/page/page.css changed" in SCRIPT["picture_trouble"](tmp_path)


def test_what_is_not_committed_is_named(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert SCRIPT["tree_trouble"](tmp_path) == ""
    (tmp_path / "new.txt").write_text("x")
    assert SCRIPT["tree_trouble"](tmp_path) == "new.txt"


def test_a_command_that_fails_is_a_trouble_and_the_walk_goes_on():
    def fails():
        subprocess.run(["false"], check=True)

    found = dict(SCRIPT["walk"]({"one": fails, "two": lambda: ""}))
    assert found == {"one": "false ...: exit code 1", "two": ""}
