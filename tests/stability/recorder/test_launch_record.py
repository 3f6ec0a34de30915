"""What goes on record of a process's arguments, files and variables, and what never does."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from stability.recorder.inside import launched
from stability.recorder.inside.launched import NamedFiles, Started, hash_of
from stability.recorder.launched import GivenCommand, launch_record
from stability.records.session_variables import VOLATILE, lasting

SECRET = "hunter2"


def test_names_in_flags_and_lists_are_files_and_folders_are_none(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml", "c.yaml", "args.txt"):
        (tmp_path / name).write_text(name)
    words = ["--config=a.yaml", "b.yaml,c.yaml", "@args.txt", ".", "missing.yaml", "", "x" * 5000]
    found = NamedFiles(words, str(tmp_path)).hashes()
    assert sorted(found) == ["a.yaml", "args.txt", "b.yaml", "c.yaml"]
    assert {known["of"] for known in found.values()} == {"whole"}


def test_of_a_large_file_both_ends_are_hashed_and_its_times_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "_WHOLE", 8)
    path = tmp_path / "data.bin"

    def known(content: bytes) -> dict:
        path.write_bytes(content)
        return NamedFiles(["data.bin"], str(tmp_path)).hashes()["data.bin"]

    one = known(b"head--middle--tail")
    assert one["of"] == "ends of 18 bytes"
    assert one == NamedFiles(["data.bin"], str(tmp_path)).hashes()["data.bin"]
    middle = known(b"head--MIDDLE--tail")
    assert middle["sha256"] == one["sha256"]
    assert middle["stat"] != one["stat"]
    assert known(b"head--middle--TAIL")["sha256"] != one["sha256"]
    assert known(b"small")["of"] == "whole"


def test_of_what_is_more_than_can_be_read_sizes_and_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.bin", "b.bin", "c.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"12345678")
    monkeypatch.setattr(launched, "_MOST_BYTES", 16)
    found = NamedFiles(names, str(tmp_path)).hashes()
    assert [found[name]["of"] for name in names] == ["whole", "whole", "stat"]
    assert found["c.bin"]["stat"] == [8, (tmp_path / "c.bin").stat().st_mtime_ns]
    monkeypatch.setattr(launched, "_WHOLE", 4)  # of a large file no more is read
    found = NamedFiles(names, str(tmp_path)).hashes()
    assert "stat" not in {known["of"] for known in found.values()}


@pytest.mark.parametrize(
    ("variables", "of"),
    [
        ({}, "whole"),
        ({"RANK": "8"}, "whole"),  # the user's own
        ({"RANK": "0", "WORLD_SIZE": "2"}, "whole"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "unread"),
    ],
)
def test_the_first_rank_alone_reads_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], of: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("x: 1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["t.py", "a.yaml"])
    assert Started().told()["files"]["a.yaml"]["of"] == of


def test_a_file_that_was_written_since_is_told(tmp_path: Path) -> None:
    for name in ("log.txt", "a.yaml", "gone.txt"):
        (tmp_path / name).write_text("before")
    files = NamedFiles(["log.txt", "a.yaml", "new.txt", "gone.txt"], str(tmp_path))
    (tmp_path / "log.txt").write_text("before, and more")
    (tmp_path / "new.txt").write_text("made")
    (tmp_path / "gone.txt").unlink()
    assert sorted(files.written()) == ["gone.txt", "log.txt", "new.txt"]
    assert files.hashes()["gone.txt"]["of"] == "unreadable"


def test_lines_are_told_apart_of_short_texts_alone(tmp_path: Path) -> None:
    texts = {"a.yaml": "x: 1\n\ny: 2\n", "a.json": '{"x": 1, "y": 2}', "a.py": "x = 1\ny = 2\n"}
    others = {"t.py": "x = 1\n", "long.txt": "x\n" * 500, "a.bin": "x\0\ny", "empty.yaml": ""}
    for name, text in {**texts, **others}.items():
        (tmp_path / name).write_text(text)
    found = NamedFiles([*texts, *others], str(tmp_path), ["t.py"]).hashes()
    counts = {name: len(known["lines"]) for name, known in found.items() if "lines" in known}
    assert counts == {"a.yaml": 2, "a.json": 2, "a.py": 2, "empty.yaml": 0}


def test_the_lines_of_a_config_in_python_are_told_apart_and_those_of_the_program_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "config.py"):
        (tmp_path / name).write_text("x = 1")
    words = ["python", "train.py", "config.py"]
    command = GivenCommand(words, words)
    command.begin(tmp_path)
    monkeypatch.setattr(sys, "argv", words[1:])
    inside = Started().told()["files"]
    for files in (inside, launch_record(told(*words[1:]), command)["files"]):
        assert [name for name, known in files.items() if "lines" in known] == ["config.py"]


def test_a_process_tells_what_it_was_given_and_no_value_of_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("x: 1")
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "a.yaml"])
    started = Started()
    started.look()
    # what the script does itself comes later
    monkeypatch.setattr(sys, "argv", ["train.py"])
    os.chdir(tmp_path.parent)
    told = started.told()
    assert told["arguments"] == ["train.py", "--config", "a.yaml"]
    assert told["later_arguments"] == ["train.py"]
    assert told["files"]["a.yaml"]["of"] == "whole"
    assert told["variables"]["MY_TOKEN"] == hash_of(SECRET)
    assert SECRET not in str(told)


def told(*arguments: str, **more: object) -> dict:
    """Return what a process with these arguments tells."""
    given = {"arguments": list(arguments), "later_arguments": list(arguments), "main": "file"}
    return {**given, "variables": {}, "files": {}, **more}


def test_placeholders_stand_for_what_they_are_filled_in_with() -> None:
    written = ["bash", "run.sh", "{arm}", "--seed", "{seed}"]
    filled = ["bash", "run.sh", "bf16", "--seed", "0"]
    values = {"arm": "bf16", "seed": 0, "out": "/runs/s/bf16/seed-0"}
    command = GivenCommand(written, filled, values)
    own = ["t.py", "--dtype", "bf16", "--out", "/runs/s/bf16/seed-0/x", "logs/bf16.txt"]
    record = launch_record(told(*own, *filled[2:]), command)
    assert record["arguments"] == [
        "t.py",
        *("--dtype", "bf16"),  # it may be the value of a flag
        *("--out", "{out}/x", "logs/{arm}.txt", "{arm}", "--seed", "{seed}"),
    ]
    without = GivenCommand(["bash", "run.sh"], ["bash", "run.sh"], values)
    assert launch_record(told("t.py", "logs/bf16.txt"), without)["arguments"][1] == "logs/bf16.txt"


def test_a_file_has_the_name_that_the_command_gives_it(tmp_path: Path) -> None:
    (tmp_path / "bf16.yaml").write_text("x: 1")
    command = GivenCommand(["python", "t.py", "{arm}.yaml"], ["python", "t.py", "bf16.yaml"])
    command.begin(tmp_path)
    files = NamedFiles(["bf16.yaml"], str(tmp_path)).hashes()
    record = launch_record(told("t.py", "bf16.yaml", files=files, written=["bf16.yaml"]), command)
    assert [*record["files"]] == ["{arm}.yaml"]


def test_passwords_are_hashed_and_other_words_are_not() -> None:
    words = ["--api-key", SECRET, f"--hub_token={SECRET}", f"db.password={SECRET}"]
    plain = ["--tokenizer", "gpt2", "--max-tokens", "512"]
    arguments = launch_record(told("t.py", *words, *plain), GivenCommand())["arguments"]
    assert SECRET not in str(arguments)
    assert arguments[1:3] == ["--api-key", f"masked:{hash_of(SECRET)}"]
    assert arguments[-4:] == plain


def test_arguments_that_the_script_has_changed_are_both_on_record() -> None:
    given = told("t.py", "--lr", "1", later_arguments=["t.py", "--lr", "2", "--api-key", SECRET])
    record = launch_record(given, GivenCommand())
    assert record["arguments"] == ["t.py", "--lr", "1"]
    assert record["later_arguments"][:3] == ["t.py", "--lr", "2"]
    assert SECRET not in str(record)


def test_of_a_module_the_arguments_are_on_record_once_and_its_file_is_its_name() -> None:
    given = told("-m", "--lr", "1", later_arguments=["/checkout/pkg/train.py", "--lr", "1"])
    record = launch_record(given, GivenCommand())
    assert record["arguments"] == ["/checkout/pkg/train.py", "--lr", "1"]
    assert record["later_arguments"] == []


def test_what_a_command_sets_itself_is_told_from_what_it_had() -> None:
    command = GivenCommand(variables={"A": "1", "B": "1"})
    given = told("t.py", variables={"A": hash_of("1"), "B": hash_of("2"), "C": hash_of("3")})
    assert launch_record(given, command)["set_on_the_way"] == ["B", "C"]
    assert launch_record({}, command) == {}


SESSION = """PWD SHLVL STABILITY_SEED SSH_TTY SLURM_JOB_ID SLURMD_NODENAME JOB_ID JOB_NAME POD_NAME
TERM TERM_PROGRAM TERMINFO LESSOPEN LESS_TERMCAP_mb HISTSIZE HISTCONTROL PROMPT_COMMAND PS1
TMUX_PANE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_RANK PMI_RANK PMIX_RANK RAY_JOB_ID COV_CORE_SOURCE
POD_IP
POD_IPS POD_UID GITHUB_RUN_ID GITHUB_SHA CI_JOB_ID CI_PIPELINE_IID CI_COMMIT_SHA CI_RUNNER_ID
BUILD_ID BUILD_NUMBER BUILD_TAG MLFLOW_RUN_ID ITERM_SESSION_ID AWS_SESSION_TOKEN
AWS_SECURITY_TOKEN"""


@pytest.mark.parametrize("name", SESSION.split())
def test_a_variable_of_a_session_is_left_out(name: str) -> None:
    assert lasting({name: "1", "MY_LR": "2"}) == {"MY_LR": "2"}


def test_every_variable_that_is_left_out_has_a_reason() -> None:
    assert all(reason for reason in VOLATILE.values())
    kept = ["HOME", "PATH", "MY_LR", "LR", "OMP_NUM_THREADS", "LANG", "USER", "BATCH_SIZE", "DEBUG"]
    # of names like those of a session's
    kept += ["PROMPT", "PROMPT_LENGTH", "HISTORY", "HIST_BINS", "TERM_WEIGHT", "TERMS"]
    kept += ["LESS_LAYERS", "RAY_SEED", "TASK_ID", "ROLE_WEIGHT", "COV_WEIGHT", "PMIN", "SLURMY"]
    kept += ["MY_WORLD_SIZE", "DESKTOP_SIZE", "POD_IPA", "ITERM_COUNT", "PSI", "TMUX_SIZE"]
    kept += ["JOB_SIZE", "TASK_LR", "POD_INDEX", "CI_LR", "BUILD_MODE", "MLFLOW_LR", "AWS_REGION"]
    assert [*lasting(dict.fromkeys(kept, ""))] == sorted(kept)


def test_where_torch_itself_puts_compiled_code_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, f"{tempfile.gettempdir()}/torchinductor_me")
    assert name not in Started().variables
    monkeypatch.setenv(name, "/mine")
    assert Started().variables[name] == hash_of("/mine")
