"""A commit's folder is that commit: what was edited in it since is refused."""

import subprocess
from pathlib import Path

import pytest

from stability.study.worktree import checkout, sources_outside


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(root)
    (root / "train.py").write_text("x = 1\n")
    (root / "version.py").write_text("v = 0\n")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def test_a_folder_that_was_edited_since_is_refused(commit: str) -> None:
    place = checkout(commit, Path())
    (place / "built.so").write_text("what setup builds")
    assert checkout(commit, Path()) == place
    (place / "train.py").write_bytes(b"x = 2  # caf\xe9\n")
    with pytest.raises(ValueError, match=rf"ref: {place}: must hold commit {commit[:12]} .*edited"):
        checkout(commit, Path())
    (place / "train.py").write_text("x = 1\n")
    assert checkout(commit, Path()) == place


def test_what_setup_itself_has_edited_is_no_edit(commit: str) -> None:
    setup = "sh -c 'echo v = 1 > version.py'"
    place = checkout(commit, Path(), setup)
    assert checkout(commit, Path(), setup) == place
    (place / "version.py").write_text("v = 2\n")
    with pytest.raises(ValueError, match="was edited since"):
        checkout(commit, Path(), setup)


def test_a_library_of_the_working_tree_is_a_source_of_it(tmp_path: Path) -> None:
    root, worktree = tmp_path / "root", tmp_path / "cache/root"
    files = [str(root / "ops.so"), str(worktree / "ops.so")]
    assert sources_outside(files, root, worktree) == files[:1]


def test_results_that_a_run_has_written_over_are_put_back(commit: str) -> None:
    Path("results.csv").write_text("step,loss\n")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["add", "."], [*who, "commit", "-qm", "results"]):
        subprocess.run(["git", *words], check=True)
    place = checkout("HEAD", Path())
    (place / "results.csv").write_text("step,loss\n1,2\n")
    assert checkout("HEAD", Path()) == place
    assert (place / "results.csv").read_text() == "step,loss\n"
    (place / "results.csv").write_text("1,2\n")
    (place / "train.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match="edited since"):
        checkout("HEAD", Path())
    assert (place / "results.csv").read_text() == "1,2\n"
