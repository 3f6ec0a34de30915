"""docs/architecture.md names files that exist, and its picture shows the contracts of today."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:[a-z_0-9-]+/)+(?:[A-Za-z_0-9-]+\.[a-z]+)?)`", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_named_file_exists(path):
    assert (ROOT / path).exists()


def test_a_folder_of_the_tree_exists():
    tree = PAGE.split("```text\n")[1].split("```")[0]
    folders = [line.split()[0] for line in tree.splitlines() if not line.startswith(" ")]
    folders += re.findall(r"(?<=[;:,] )[\w/]+/(?= |,|;)", tree)
    assert len(folders) > 12
    within = ("", "stability", "stability/report", "kernels/attention_kernels", "experiments")
    homes = [ROOT / home for home in within]
    assert [x for x in folders if not any((home / x).is_dir() for home in homes)] == []


def test_enough_files_are_named():
    assert len(PATHS) > 30


def test_picture_is_drawn_from_the_contracts_of_today():
    script = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))
    assert script["PICTURE"].read_text() == script["draw"](), "run `make docs`"


def test_picture_names_every_room():
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    for package in ("stability", "kernels/attention_kernels"):
        for path in (ROOT / package).iterdir():
            if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
                continue
            assert f">{path.stem}</text>" in picture, path
