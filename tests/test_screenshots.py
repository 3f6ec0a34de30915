"""The pictures that pages of the documentation show are those that `make screenshots` takes.

Whether they are of today's pages is asked before a release (`.ci/release_check.py`) and not here:
to take them needs a browser, and the quickstart study of a machine that answers as README.md says.
"""

import contextlib
import json
import re
import runpy
from pathlib import Path

import pytest

from stability.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


SHOWN = runpy.run_path(str(ROOT / "docs" / "scripts" / "shown_pictures.py"))


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("selenium")
    return runpy.run_path(str(ROOT / "docs" / "scripts" / "take_screenshots.py"))


PHOTOGRAPHS = (ROOT / "docs" / "quickstart.png", ROOT / "docs" / "screenshots")


def shown():
    """The pictures of the program that some page shows, below docs/."""
    found = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.(?:png|svg))\)", page.read_text())
    }
    return {
        path.relative_to(ROOT / "docs").as_posix()
        for path in found
        if path in PHOTOGRAPHS or path.parent in PHOTOGRAPHS
    }


def test_each_picture_of_a_page_is_taken_by_the_script_and_each_of_the_script_is_shown():
    on_disk = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in [*(ROOT / "docs").rglob("*.png"), *(ROOT / "docs/screenshots").glob("*.svg")]
    }
    assert {*SHOWN["SHOWN"], *SHOWN["SAID"]} == shown() == on_disk


def test_the_gallery_shows_all_but_the_picture_of_the_first_page_each_with_words_for_it():
    page = (ROOT / "docs" / "screenshots.md").read_text()
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page)
    every = {*SHOWN["SHOWN"], *SHOWN["SAID"]}
    assert {target for _, target in pictures} == every - {"quickstart.png"}
    words = [alt for alt, _ in pictures]
    assert len({*words}) == len(words)
    assert min(map(len, words)) > 15


def test_pictures_are_small_enough_for_a_clone():
    sizes = {name: (ROOT / "docs" / name).stat().st_size for name in SHOWN["SHOWN"]}
    assert [name for name, size in sizes.items() if size > SHOWN["MOST_BYTES"]] == []
    assert sum(sizes.values()) < 1_000_000


def test_it_is_on_record_of_which_sources_the_pictures_were_taken():
    kept = json.loads((ROOT / SHOWN["MADE_OF"]).read_text())
    rooms = ("live", "page", "page/assets", "paper", "terminal", "view")
    for found in (kept, SHOWN["made_of"](ROOT)):
        folders = {Path(name).parent.as_posix() for name in found}
        assert folders >= {f"stability/report/{room}" for room in rooms}


def test_what_drawings_alone_show_makes_no_photograph_old():
    """They are read by a test, and any machine draws them anew."""
    drawn = {f"{SHOWN['SOURCES']}/{name}" for name in SHOWN["DRAWN"]}
    assert all((ROOT / name).is_file() for name in drawn)
    assert not drawn & SHOWN["made_of"](ROOT).keys()
    assert not drawn & json.loads((ROOT / SHOWN["MADE_OF"]).read_text()).keys()


def test_a_source_that_has_changed_come_or_gone_since_is_named(tmp_path):
    room = tmp_path / SHOWN["SOURCES"] / "page"
    kept = tmp_path / SHOWN["MADE_OF"]
    for folder in (room / "__pycache__", kept.parent):
        folder.mkdir(parents=True)
    for name in ("as_it_was.css", "changed.css", "gone.css"):
        (room / name).write_text("a")
    kept.write_text(json.dumps(SHOWN["made_of"](tmp_path)))
    (room / "changed.css").write_text("b")
    (room / "come.css").write_text("a")
    (room / "gone.css").unlink()
    (room / "__pycache__" / "page.pyc").write_text("a")
    names = [Path(name).name for name in SHOWN["changed_since"](tmp_path)]
    assert names == ["changed.css", "come.css", "gone.css"]


def test_a_screen_holds_what_was_not_erased(script):
    """As rich writes it: up a line, erased, written anew."""
    written = b"\x1b[?25lone\r\nbar 1\r\nbar 2\r\x1b[2K\x1b[1A\x1b[2Kdone\r\nbar 3\r\n\x1b[?25h"
    assert script["screen_of"](written) == "one\ndone\nbar 3\n"


def test_the_picture_of_the_answer_ends_where_the_ladder_begins(script):
    answer = "Why?\n\na PASS\n\narm  operator\n────\na    holds\n\na PASS.\nSee `show\nall`"
    ladder = "          drift\n\x1b[1marm what changed step 1\x1b[0m\n────\na   \n\ndrift: far"
    assert script["answer_of"](f"\n{answer}\n\n{ladder}\n") == answer


def test_docs_are_renewed_only_from_a_study_that_answers_as_the_readme_says():
    readme = "x\n```text\na PASS\n\narm  3x\n```\n```text\nother\n```\n"
    assert SHOWN["is_of_readme"]("\x1b[1ma PASS\x1b[0m  \n\n arm  3x\nmore\n", readme)
    assert not SHOWN["is_of_readme"]("a PASS\n\narm  2x\n", readme)


def said(words, capsys):
    """Return what a command prints, without white space."""
    with contextlib.suppress(SystemExit):
        main(words)
    return "".join("".join(capsys.readouterr()).split())


def test_the_drawn_help_and_mistakes_are_what_the_program_says_today(tmp_path, monkeypatch, capsys):
    drawn = {name: (ROOT / "docs" / name).read_text() for name in SHOWN["SAID"]}
    shown = {Path(name).stem: SHOWN["words_of"](text) for name, text in drawn.items()}
    monkeypatch.chdir(tmp_path)
    again = "run `make screenshots`"
    assert shown["help"] == "stability--help" + said(["--help"], capsys), again
    mistakes = "mistakes"
    for words in SHOWN["MISTAKES"]:
        mistakes += "$stability" + "".join(words) + said(words, capsys)
    assert shown["mistakes"] == mistakes, again
    # figures and answers are another machine's
    for each in ("studies and the demo", "stability workspace", "attention flash:fa2"):
        assert "".join(each.split()) in shown["doctor"], each
    for each in ("training", "training-dark"):
        assert "candidate,seed0" in shown[each]
        assert re.search(r"study.*\d/8runs0:00:\d\dleft0:\d\d:\d\dcandidate", shown[each])
    # a reader's browser fetches nothing to show them
    assert not any("url(http" in text or "@import" in text for text in drawn.values())
