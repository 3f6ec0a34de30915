"""WANDB_* variables: honoured for where runs go, passed over or refused for which run is which."""

import subprocess
import sys
from pathlib import Path

import pytest

from stability.cli.main import main
from stability.tracking.environment import check_wandb, resolve_mode

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, "offline"),
        (None, "online", "online"),
        (None, "disabled", "disabled"),
        (None, "dryrun", "offline"),
        ("offline", "online", "offline"),
        ("online", "offline", "online"),
        ("online", "disabled", "online"),
        ("disabled", "online", "disabled"),
    ],
)
def test_the_environment_replaces_the_default_alone(monkeypatch, argument, variable, expected):
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert resolve_mode(argument) == expected


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offlien")
    with pytest.raises(ValueError, match=r"^WANDB_MODE must be one of offline, .* got 'offlien'"):
        resolve_mode(None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WANDB_RESUME", "must", "WANDB_RESUME must be unset, got 'must'; a run that goes on is"),
        ("WANDB_RESUME_FROM", "abc?_step=3", "WANDB_RESUME_FROM must be unset"),
        ("WANDB_FORK_FROM", "abc?_step=3", "WANDB_FORK_FROM must be unset"),
        ("WANDB_SWEEP_ID", "abc", "WANDB_SWEEP_ID must be unset"),
        ("WANDB_RUN_STORAGE_ID", "abc", "WANDB_RUN_STORAGE_ID must be unset"),
        ("WANDB_TAGS", "a," + "b" * 65, "no W&B setting: .*65 characters"),
        ("WANDB_TAGS", "a,,b", "no W&B setting: .*Tag at index 1 is empty"),
        ("WANDB_PROJECT", "a/../b", "no W&B setting: Invalid project name .*; mend or unset it"),
        ("WANDB_PROJECT", "p" * 129, "exceeded 128 characters"),
    ],
)
def test_what_would_break_a_study_is_refused_before_training(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_wandb("offline")
    check_wandb("disabled")


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own: W&B reads the environment once."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_w_and_b_that_cannot_be_imported_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import a_part_of_it_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    said = r"imported: No module named 'a_part_.*WANDB_MODE=disabled"
    with pytest.raises(ValueError, match=said):
        check_wandb("offline")


def test_a_variable_that_is_no_setting_of_w_and_b_is_named(tmp_path):
    code = "from stability.tracking.environment import check_wandb as c; c('offline')"
    done = _run(code, WANDB_BASE_URL="nonsense", HOME=str(tmp_path))
    assert "ValueError: a WANDB_* variable is no W&B setting: base_url: " in done.stderr
    assert "got 'nonsense'; mend or unset it" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "validation error" not in last, "pydantic's own words are no help"


def test_online_without_an_account_is_refused_and_says_what_to_do(tmp_path):
    code = "from stability.tracking.environment import check_wandb as c; c('online')"
    done = _run(code, HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    assert (
        "ValueError: W&B: no account is known at http://127.0.0.1:9; run `wandb login` or set"
        in done.stderr
    )


@pytest.mark.parametrize("variable", ["offline", "disabled"])
def test_online_that_is_asked_for_is_online_whatever_the_environment_says(tmp_path, variable):
    code = "from stability.tracking.environment import check_wandb as c; c('online')"
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": variable}
    done = _run(code, HOME=str(tmp_path), **server)
    # it goes as far as to look for an account
    assert (
        "ValueError: W&B: no account is known at http://127.0.0.1:9; run `wandb login` or set"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ([], "disabled", "disabled"),
        ([], None, "offline"),
        (["--wandb", "online"], "offline", "online"),
        (["--wandb", "offline"], "online", "offline"),
    ],
)
def test_a_run_goes_where_its_flag_says_and_else_where_the_environment_does(
    write_study, tmp_path, monkeypatch, capsys, words, variable, expected
):
    def stop(mode):
        raise ValueError(mode)

    monkeypatch.setattr("stability.cli.run.check_wandb", stop)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    with pytest.raises(SystemExit):
        main(["run", str(write_study()), "--out", str(tmp_path), *words])
    assert capsys.readouterr().err == f"stability: {expected}\n"


@pytest.mark.slow
def test_variables_say_where_runs_go_and_not_which_they_are(tmp_path, offline_log, read_records):
    code = (
        "from pathlib import Path\n"
        "from stability.tracking.environment import check_wandb\n"
        "from stability.records.paths import RunPaths\n"
        "from stability.tracking.history import open_wandb_run\n"
        "check_wandb('offline')\n"
        "shown = open_wandb_run('offline', study='s', arm='a', seed=0, axis='none', changes=[],\n"
        f"    config={{}}, paths=RunPaths(Path({str(tmp_path / 'run')!r})))\n"
        "shown.send({'step': 0, 'train/loss': 1.0})\n"
        "shown.close()\n"
    )
    honoured = {
        "WANDB_PROJECT": "mine",
        "WANDB_ENTITY": "team",
        "WANDB_NOTES": "why",
        "WANDB_TAGS": "paper, figure-2",
    }
    passed_over = {
        "WANDB_RUN_ID": "theirs",
        "WANDB_NAME": "theirs",
        "WANDB_RUN_GROUP": "theirs",
        "WANDB_JOB_TYPE": "theirs",
        "WANDB_DIR": str(tmp_path / "theirs"),
        "WANDB_SILENT": "false",
    }
    done = _run(code, HOME=str(tmp_path), **honoured, **passed_over)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "theirs").exists()
    records = read_records(offline_log(tmp_path / "run" / "wandb"))
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["project"], run["entity"], run["notes"]) == ("mine", "team", "why")
    assert sorted(run["tags"]) == ["figure-2", "none", "paper", "seed-0"]
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("s", "a", "a-seed0")
    assert run["run_id"] != "theirs"
