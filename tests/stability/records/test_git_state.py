"""The commit and the changes of a folder are put on record, and git is never in the way."""

import subprocess

import pytest

from stability.records import git_state as git
from stability.records.git_state import git_state


@pytest.fixture
def repository(tmp_path):
    def run(*command):
        own = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, "-C", str(tmp_path), *command], check=True, timeout=30)

    run("init", "-q")
    (tmp_path / "code.py").write_text("lr = 1\n")
    run("add", "code.py")
    run("commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_folder_has_a_commit_and_a_changed_one_its_diff(repository):
    clean = git_state(repository)
    assert set(clean) == {"commit"}
    assert len(clean["commit"]) == 40
    (repository / "code.py").write_text("lr = 2\n")
    changed = git_state(repository)
    assert changed["commit"] == clean["commit"]
    assert "-lr = 1\n+lr = 2" in changed["diff"]
    assert len(changed["diff_sha256"]) == 64


def test_a_long_diff_is_cut_and_its_hash_is_of_all(repository, monkeypatch):
    (repository / "code.py").write_text("lr = 2\n" * 50)
    whole = git_state(repository)
    monkeypatch.setattr(git, "_LONGEST", 30)
    cut = git_state(repository)
    assert (len(cut["diff"]), cut["diff_sha256"]) == (30, whole["diff_sha256"])


def test_without_a_repository_or_git_there_is_nothing(tmp_path, repository, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(outside) == {}
    monkeypatch.setenv("PATH", "")
    assert git_state(repository) == {}


def test_no_program_that_a_folder_names_is_run(repository):
    marker = repository / "was_run"
    program = repository / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external"):
        command = ["git", "-C", str(repository), "config", name, str(program)]
        subprocess.run(command, check=True, timeout=30)
    (repository / "code.py").write_text("lr = 2\n")
    assert "lr = 2" in git_state(repository)["diff"]
    assert not marker.exists()
