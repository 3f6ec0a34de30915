"""The check-list of a release finds what is not as it should be."""

import hashlib
import json
import runpy
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "release_check.py"))
FILES = ("pyproject.toml", "stability/__init__.py", "CITATION.cff", "CHANGELOG.md", "tests/slow.md")


OK = "120 passed in 9 min"


def write_slow(root, *rows):
    lines = [f"| {what} | {day} | 1a2b3c4 | {result} |" for what, day, result in rows]
    table = ["| what | date | commit | result |", "|---|---|---|---|", *lines]
    (root / "tests" / "slow.md").write_text("\n".join(table) + "\n")


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
    write_slow(copy, ("`.ci/run` quiet", "2026-11-01", OK), ("`make test-slow`", "2026-11-03", OK))
    assert SCRIPT["slow_trouble"](copy, date(2026, 11, 10)) == ""
    assert SCRIPT["slow_trouble"](copy, date(2026, 11, 30)) == "the newest is of 2026-11-03"


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        (OK, ""),
        ("1,562 passed, 1 failed in 63 min: mended", "1 failed"),
        ("5 passed, 2 errors in 9 s", "2 errors"),
        ("1,315 passed, none failed in 54 min", ""),
    ],
)
def test_a_failure_in_the_last_run_of_all_slow_tests_is_told(copy, result, failed):
    """One in an older run, or in a part of them, or of one that was stopped, is not looked at."""
    rows = [
        ("`make test-slow`", "2026-11-01", "9 failed"),
        ("`.ci/run` on a fresh clone", "2026-11-03", result),
        ("`make test-slow`, stopped at 93 %", "2026-11-04", "3 failed"),
        ("`pytest -m slow tests/zoo`", "2026-11-04", "4 failed"),
    ]
    write_slow(copy, *rows)
    expected = failed and f"that of 2026-11-03 has {failed}"
    assert SCRIPT["slow_trouble"](copy, date(2026, 11, 10)) == expected


def test_rows_of_the_page_are_read_and_none_is_told(copy):
    day, result = SCRIPT["last_slow_run"](ROOT)
    assert day >= date(2026, 11, 28)
    assert " passed" in result
    write_slow(copy)
    with pytest.raises(ValueError, match=r"must have a row of `make test-slow` or `\.ci/run`"):
        SCRIPT["slow_trouble"](copy, date(2026, 11, 10))


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


class FakeCommands:
    """Takes the place of the commands of a build: what was asked, and what is planted in them."""

    def __init__(self, version):
        self.asked, self.answers, self.fails = [], {}, ""
        self.version = version

    def __call__(self, *words, cwd):
        line = " ".join(map(str, words))
        self.asked.append((line, Path(cwd)))
        if self.fails and self.fails in line:
            raise subprocess.CalledProcessError(2, [str(word) for word in words])
        if " pip wheel " in line:
            (Path(cwd) / "it-1-py3-none-any.whl").touch()
        if "build_sdist" in line:
            place = Path(line.partition("build_sdist('")[2].partition("'")[0])
            (place / "it-1.tar.gz").touch()
        if line.endswith("--version"):
            installed = [each for each, _ in self.asked if " pip install " in each][-1]
            kind = next((kind for kind in self.answers if installed.endswith(kind)), None)
            return self.answers.get(kind, f"stability {self.version}\n")
        return ""


@pytest.fixture
def commands(monkeypatch):
    fake = FakeCommands(SCRIPT["versions"](ROOT)["pyproject.toml"])
    monkeypatch.setitem(SCRIPT["build_trouble"].__globals__, "said", fake)
    return fake


def test_wheel_and_source_distribution_are_installed_and_used_in_a_folder_of_their_own(commands):
    assert SCRIPT["build_trouble"](ROOT) == ""
    installed = [line for line, _ in commands.asked if " pip install " in line]
    for ending in ("it-1-py3-none-any.whl", "it-1.tar.gz"):
        forced = [line for line in installed if line.endswith(ending) and "--force-re" in line]
        assert len(forced) == 1, "the first one's files do not stay for the second"
    checks = [place for line, place in commands.asked if " check my_kernel:attend" in line]
    assert len({*checks}) == 2
    assert not any(place.is_relative_to(ROOT) for place in checks)
    kernels = [place for line, place in commands.asked if " init --template kernel" in line]
    assert kernels == checks


@pytest.mark.parametrize("kind", [".whl", ".tar.gz"])
def test_a_distribution_of_another_version_is_named(commands, kind):
    commands.answers[kind] = "stability 9.9.9\n"
    said = SCRIPT["build_trouble"](ROOT)
    assert said.endswith(f"{kind} says 'stability 9.9.9'")


@pytest.mark.parametrize("step", ["pip wheel", "build_sdist", "tar.gz", "doctor", "init", "check"])
def test_each_step_of_a_build_that_fails_is_a_trouble(commands, step):
    commands.fails = step
    with pytest.raises(subprocess.CalledProcessError):
        SCRIPT["build_trouble"](ROOT)


def test_a_command_of_a_step_sees_no_clone_and_its_failure_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    asked = "import os; print(os.getcwd(), os.environ.get('PYTHONPATH'))"
    assert SCRIPT["said"](sys.executable, "-c", asked, cwd=tmp_path) == f"{tmp_path} None\n"
    with pytest.raises(subprocess.CalledProcessError):
        SCRIPT["said"](sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_first_target_of_make_that_fails_is_named(tmp_path, monkeypatch):
    script(tmp_path, "make", 'echo "$1" >> "$0.asked"; [ "$1" != "test" ]')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SCRIPT["make_trouble"]("lint", "docs") == ""
    assert SCRIPT["make_trouble"]("lint", "test", "docs") == "make test fails"
    assert (tmp_path / "make.asked").read_text().split() == ["lint", "docs", "lint", "test"]


@pytest.mark.parametrize(
    ("last", "code", "trouble"),
    [
        ("9 passed in 200.0s", 0, ""),
        ("8 passed, 1 skipped in 2.0s", 0, "8 passed, 1 skipped in 2.0s"),
        ("1 failed, 8 passed in 2.0s", 1, "1 failed, 8 passed in 2.0s"),
    ],
)
def test_a_test_of_the_wheel_that_fails_or_is_skipped_is_a_trouble(
    tmp_path, monkeypatch, last, code, trouble
):
    python = script(
        tmp_path, "python", f'echo "$@" > "$0.asked"; echo .; echo "{last}"; exit {code}'
    )
    monkeypatch.setattr(sys, "executable", str(python))
    assert SCRIPT["wheel_trouble"](ROOT) == trouble
    assert (tmp_path / "python.asked").read_text() == (
        "-m pytest -q -m slow or long tests/test_wheel.py\n"
    )


TROUBLES = (
    "version_trouble",
    "tree_trouble",
    "slow_trouble",
    "picture_trouble",
    "make_trouble",
    "build_trouble",
    "wheel_trouble",
)


@pytest.fixture
def planted(monkeypatch):
    def plant(**said):
        for name in TROUBLES:
            text = said.get(name, "")
            monkeypatch.setitem(SCRIPT["main"].__globals__, name, lambda *_, text=text: text)
        return SCRIPT["main"]()

    return plant


def test_where_all_holds_the_list_ends_in_what_a_person_looks_at(planted, capsys):
    assert planted() == 0
    checks, by_hand = capsys.readouterr().out.split("\nby hand:\n")
    assert "FAILS" not in checks
    assert len(checks.splitlines()) >= len(TROUBLES)
    assert by_hand.count("  [ ] ") == len(SCRIPT["BY_HAND"])


@pytest.mark.parametrize("name", TROUBLES)
def test_one_trouble_is_told_and_the_exit_code_is_1(planted, capsys, name):
    assert planted(**{name: "planted here"}) == 1
    lines = capsys.readouterr().out.splitlines()
    failing = [line for line in lines if line.startswith("FAILS")]
    assert failing
    assert all(line.endswith(": planted here") for line in failing)
