"""The commit and the changes of a folder are put on record, and git is never in the way."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from stability.records import git_state as git
from stability.records.git_state import git_state


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(git, "_SECONDS", 30.0)  # a machine that is busy with other tests is slow

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
    program = _program(repository, f"touch {marker}\ncat")
    (repository / ".gitattributes").write_text("*.py filter=a.b=c diff=d\n")
    for name in (
        "core.fsmonitor",
        "diff.external",
        "diff.d.textconv",
        "filter.a.b=c.clean",
        "filter.a.b=c.process",
        "filter.a.b=c.smudge",
    ):
        _configure(repository, name, str(program))
    _configure(repository, "filter.a.b=c.required", "true")
    (repository / "code.py").write_text("lr = 2\n")
    assert "lr = 2" in git_state(repository)["diff"]
    assert not marker.exists()


def test_no_filter_of_a_submodule_is_run(repository, tmp_path_factory):
    marker = repository / "was_run"
    inner = repository / "inner"
    inner.mkdir()
    _git(inner, "init", "-q")
    (inner / "code.py").write_text("lr = 1\n")
    _git(inner, "add", "code.py")
    _git(inner, *OWN, "commit", "-q", "-m", "first")
    _git(repository, "add", "inner")
    _git(repository, *OWN, "commit", "-q", "-m", "second")
    _configure(inner, "filter.f.clean", str(_program(repository, f"touch {marker}\ncat")))
    (inner / ".git" / "info" / "attributes").write_text("*.py filter=f\n")
    (inner / "code.py").write_text("lr = 3\n")
    assert set(git_state(repository)) == {"commit"}
    assert not marker.exists()


def test_variables_of_another_repository_are_not_heeded(repository, tmp_path_factory, monkeypatch):
    here = git_state(repository)
    other = tmp_path_factory.mktemp("other")
    _git(other, "init", "-q")
    _git(other, *OWN, "commit", "-q", "--allow-empty", "-m", "another")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert git_state(repository) == here


def test_a_git_that_hangs_is_ended_in_time_with_all_that_it_started(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    folder = tmp_path / "bin"
    folder.mkdir()
    # rev-parse answers; what follows starts a process that holds git's own output open
    script = (
        f'case "$*" in *rev-parse*) echo {"a" * 40};; *) sleep 60 & echo $! > {pid}; wait;; esac'
    )
    _program(folder, script, "git")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    start = time.monotonic()
    found = git_state(tmp_path)
    assert time.monotonic() - start < 2 * git._SECONDS
    assert found == {"commit": "a" * 40, "diff": "not on record: git failed or was too slow"}
    assert _has_ended(int(pid.read_text()))


OWN = ("-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false")


def _git(folder, *command):
    subprocess.run(["git", "-C", str(folder), *command], check=True, timeout=30)


def _configure(repository, name, value):
    _git(repository, "config", name, value)


def _program(folder, script, name="program"):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def _has_ended(pid):
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
