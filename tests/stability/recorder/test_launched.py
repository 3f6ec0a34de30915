"""What a training was really started with is its baseline's, or the pair is refused or unproven."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stability.recorder.recording import Recording, code_of

pytestmark = pytest.mark.slow

TRAINS = """
import os, sys, json, torch
torch.manual_seed(0)
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.load(open(flags["--config"])) if "--config" in flags else {}
lr = float(flags.get("--lr", config.get("lr", os.environ.get("MY_LR", "0.1"))))
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=float(flags.get("--wd", "0")))
data = torch.Generator().manual_seed(1)
for step in range(2):
    loss = torch.nn.functional.cross_entropy(
        model(torch.randn(5, 6, generator=data)), torch.randint(0, 3, (5,), generator=data)
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Shell(Recording):
    """A study of a command that starts Python itself."""

    def record(self, arm: str, *flags: str, seed: int = 0, options: tuple[str, ...] = ()) -> int:
        """Record an arm; the command gets these flags and no seed."""
        given = ["--study", "study", "--arm", arm, "--seed", str(seed), "--out", str(self.out)]
        return code_of(
            "record", *given, "--wandb", "disabled", *options, "--", *self.command, *flags
        )


Study = Callable[[str], Shell]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Return a study of a shell script with these lines; $PY is Python, and train.py beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    monkeypatch.setenv("PY", sys.executable)

    def written(lines: str) -> Shell:
        (tmp_path / "run.sh").write_text(lines, encoding="utf-8")
        return Shell(tmp_path / "runs", ["bash", "run.sh"])

    return written


def said_of(study: Recording, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the sentence of `verify` about the last arm."""
    capsys.readouterr()
    code = code_of("verify", str(study.folder), "--json")
    told = json.loads(capsys.readouterr().out)
    return code, json.dumps(told)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "given", "sentence"),
    [
        ('--out "$1/results" --lr 0.5', ("{out}", "{out}"), "an A/A pair"),
        (
            '--lr "$1" --wd 0.5',
            ("0.5", "0.25"),
            "flags.argument_2 differs, and nothing else that was seen",
        ),
        (
            '--lr "$1" --wd "$1"',
            ("0.5", "0.25"),
            "wd is '0.5' in one and '0.25' in the other, which was not declared",
        ),
    ],
    ids=["a rerun", "handed on once", "handed on twice"],
)
def test_what_a_shell_script_hands_on_is_told(
    study: Study, capsys, lines: str, given: tuple[str, str], sentence: str
) -> None:
    shell = study(f'exec "$PY" train.py {lines}\n')
    assert shell.record("baseline", given[0]) == 0
    assert shell.record("other", given[1]) == 0
    code, said = said_of(shell, capsys)
    assert (code == 0) == ("not declared" not in sentence), said
    assert sentence in said


@pytest.mark.long
def test_an_edited_shell_script_is_refused(study: Study, capsys) -> None:
    shell = study('exec "$PY" train.py --lr 0.5 "$@"\n')
    assert shell.record("baseline") == 0
    study('exec "$PY" train.py --lr 0.4 "$@"\n')
    assert shell.record("wd", "--wd", "0.1") == 1
    assert "the content of run.sh must be the baseline's" in capsys.readouterr().out


@pytest.mark.long
def test_an_argument_that_a_hidden_file_decides_is_refused(
    study: Study, capsys, tmp_path: Path
) -> None:
    shell = study('. ./hidden.env; exec "$PY" train.py --lr $LR "$@"\n')
    (tmp_path / "hidden.env").write_text("LR=0.5\n")
    assert shell.record("baseline") == 0
    (tmp_path / "hidden.env").write_text("LR=0.4\n")
    assert shell.record("nudge", options=("--nudge", "1")) == 1
    said = capsys.readouterr().out
    assert "the process's argument lr must be the baseline's '0.5', is '0.4'" in said
    assert shell.record("wd", "--wd", "0.1") == 0
    code, said = said_of(shell, capsys)
    assert code != 0
    assert "lr is '0.5' in one and '0.4' in the other" in said


def test_a_variable_that_was_not_declared_is_unproven_by_its_name_alone(
    study: Study, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = study('exec "$PY" train.py "$@"\n')
    monkeypatch.setenv("MY_LR", "0.123456")
    assert shell.record("baseline") == 0
    monkeypatch.setenv("MY_LR", "0.234567")
    assert shell.record("wd", "--wd", "0.1") == 0
    assert "unproven: the same variables (MY_LR: others" in capsys.readouterr().out
    code, said = said_of(shell, capsys)
    assert code != 0
    assert "the same variables (MY_LR: others, which the script may read)" in said
    assert "0.123456" not in shell.paths("baseline").manifest.read_text()


def test_a_variable_that_was_declared_is_a_pair(study: Study, capsys) -> None:
    shell = study('exec "$PY" train.py\n')
    assert shell.record("baseline", options=("--env", "MY_LR=0.5")) == 0
    assert shell.record("slow", options=("--env", "MY_LR=0.25")) == 0
    code, said = said_of(shell, capsys)
    assert code == 0, said
    assert "env.MY_LR differs, and nothing else that was seen" in said


@pytest.mark.long
def test_a_flag_of_a_module_that_a_shell_script_starts_is_the_one_change(
    study: Study, capsys, tmp_path: Path
) -> None:
    shell = study('exec "$PY" -m train --lr "$1"\n')
    assert shell.record("baseline", "0.5") == 0
    assert shell.record("lr", "0.4") == 0
    code, said = said_of(shell, capsys)
    assert code == 0, said
    manifest = json.loads(
        next((tmp_path / "runs").glob("**/baseline/**/manifest.json")).read_text()
    )
    launched = manifest["resolved"]["launched"]
    assert Path(launched["arguments"][0]).name == "train.py"
    assert launched["later_arguments"] == []


def test_another_content_of_a_named_config_is_refused(study: Study, capsys, tmp_path: Path) -> None:
    study("")
    script = Shell(tmp_path / "runs", [sys.executable, "train.py", "--config", "a.json"])
    (tmp_path / "a.json").write_text('{"lr": 0.5}')
    assert script.record("baseline") == 0
    assert script.record("rerun") == 0
    code, said = said_of(script, capsys)
    assert code == 0, said
    (tmp_path / "a.json").write_text('{"lr": 0.4}')
    assert script.record("wd", "--wd", "0.1") == 1
    assert "the content of a.json must be the baseline's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "is_proven"),
    [
        pytest.param('{"lr": 0.4, "x": 1}', True, marks=pytest.mark.long),
        ('{"lr": 0.4, "x": 2}', False),
    ],
)
def test_two_configs_that_differ_in_more_than_a_line_are_unproven(
    study: Study, capsys, tmp_path: Path, other: str, is_proven: bool
) -> None:
    study("")
    script = Shell(tmp_path / "runs", [sys.executable, "train.py"])
    (tmp_path / "a.json").write_text('{"lr": 0.5, "x": 1}')
    (tmp_path / "b.json").write_text(other)
    assert script.record("baseline", "--config", "a.json") == 0
    assert script.record("b", "--config", "b.json") == 0
    code, said = said_of(script, capsys)
    assert (code == 0) == is_proven, said
    is_said = "that a.json and b.json differ in one thing (2 lines differ)" in said
    assert is_said != is_proven


@pytest.mark.long
def test_a_file_that_a_run_writes_is_unproven(study: Study, capsys, tmp_path: Path) -> None:
    shell = study('echo "$$" >> log.txt; exec "$PY" train.py --log log.txt\n')
    (tmp_path / "log.txt").write_text("")
    shell.command.append("log.txt")
    assert shell.record("baseline") == 0
    assert shell.record("rerun") == 0
    code, said = said_of(shell, capsys)
    assert code != 0
    assert "the same log.txt (other content, and a run writes into it)" in said


@pytest.mark.long
def test_a_program_that_is_in_no_file_is_unproven(study: Study, capsys) -> None:
    shell = study('"$PY" - < train.py\n')
    assert shell.record("baseline") == 0
    assert shell.record("rerun") == 0
    code, said = said_of(shell, capsys)
    assert code != 0
    assert "the program, which python was given in no file" in said


def test_a_password_is_on_no_record(study: Study, capsys) -> None:
    shell = study('exec "$PY" train.py --api-key hunter2 --hub_token=hunter3\n')
    assert shell.record("baseline") == 0
    assert "hunter" not in shell.paths("baseline").manifest.read_text()
