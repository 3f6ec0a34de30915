"""`stability init --candidate FLAG=VALUE --broken FLAG=VALUE`: arms that need no editing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stability.cli.command_parts import parts_of, with_seed
from stability.cli.flag_arms import flags_of_arms
from stability.cli.study_text import study_text
from stability.config.command_study import CommandArm, expand_commands, load_command_study
from tests.stability.recorder.recording import SCRIPTS, code_of

PLAIN = [sys.executable, str(SCRIPTS / "plain.py")]


def written(folder: Path, words: list[str], **asked: str) -> tuple[str, dict[str, CommandArm]]:
    """Return the text of the study with the arms that are asked, and its arms as loaded."""
    given, _ = with_seed(["python", "train.py", *words])
    text = study_text("mine", given, {}, 7, arms=flags_of_arms(parts_of(given), asked))
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return text, {arm.name: arm for arm in expand_commands(load_command_study(path))}


def test_arms_that_are_given_are_written_tried_and_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--candidate", "--lr=0.02", "--broken=lr=0.1", "--", *PLAIN, "--seed", "0"]
    assert code_of("init", *words, "--lr", "0.01", "--bf16") == 0
    said = capsys.readouterr().out
    # the script evaluates nothing
    assert "study.yaml: fill in a held-out loss, then: stability run study.yaml" in said
    assert "`held_out` in the study says" in said
    arms = expand_commands(load_command_study(tmp_path / "study.yaml"))
    assert [(arm.name, arm.role, arm.config.flags) for arm in arms[:4]] == [
        ("baseline", "baseline", {"lr": 0.01, "bf16": True}),
        ("candidate", "candidate", {"lr": 0.02, "bf16": True}),
        ("reference", "reference", {"lr": 0.01, "bf16": False}),
        ("broken", "broken", {"lr": 0.1, "bf16": True}),
    ]
    assert code_of("init", "--to", "b.yaml", "--broken", "lr=1", "--", *PLAIN, "--seed", "0") == 0
    assert "fill in a candidate, a reference and a held-out loss, then: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "flags", "why"),
    [
        ("--candidate", "lrr=0.02", "error: unrecognized arguments: --lrr 0.02"),
        ("--broken", "steps=many", "argument --steps: invalid int value: 'many'"),
    ],
)
def test_an_arm_that_its_script_rejects_is_told_in_the_script_s_words_and_not_written(
    asked: str,
    flags: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", asked, flags, "--", *PLAIN, "--seed", "0") == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"FAILED: {asked}: `{sys.executable} ")
    assert "the command ended with exit code 2: " in said
    assert why in said
    assert not list(tmp_path.iterdir())


def test_a_broken_arm_that_stops_in_its_trial_is_written_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stops = "if asked.lr > 1: raise FloatingPointError('loss is nan')\nmodel ="
    source = (SCRIPTS / "plain.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(source.replace("model =", stops, 1), encoding="utf-8")
    words = [sys.executable, "train.py", "--seed", "0", "--lr", "0.01"]
    assert code_of("init", "--broken", "lr=9", "--", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the broken arm stopped in its trial, --broken: `" in said
    assert "the command ended with exit code 1: FloatingPointError: loss is nan. It is" in said
    assert "It is written, but a run that stops so is no proof that harm is seen: give it a" in said
    assert (
        "fill in a candidate, a reference, a milder broken arm and a held-out loss, then: " in said
    )
    arms = {arm.role: arm for arm in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    assert arms["broken"].config.flags == {"lr": 9}


def test_a_place_is_kept_for_what_is_not_given(tmp_path: Path) -> None:
    text, arms = written(tmp_path, ["--lr", "0.1"], candidate="lr=0.2")
    assert "\n  # broken:\n  #   role: broken\n" in text
    assert "# candidate:" not in text
    assert "broken" not in arms
    text, arms = written(tmp_path, ["--lr", "0.1"], broken="lr=1")
    assert "\n  # candidate:\n" in text
    assert "# broken:" not in text, "where it stands already, another one can't be filled in"
    assert "candidate" not in arms
    assert arms["broken"].role == "broken"


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        ("lr=1e-3", 0.001, ["--lr", "0.001"]),
        ("--lr=5", 5, ["--lr", "5"]),
        ("-l=5", 5, ["-l", "5"]),
        ("bf16=true", True, ["--bf16"]),
        ("fused=null", None, []),
        ("sizes=[1, 2]", [1, 2], ["--sizes", "1", "2"]),
        ('tag="007"', "007", ["--tag", "007"]),
        ("tag=007", "007", ["--tag", "007"]),
        ("time=1:30", "1:30", ["--time", "1:30"]),
        ("say=it's # odd", "it's # odd", ["--say", "it's # odd"]),
        ("glob='*.bin'", "*.bin", ["--glob", "*.bin"]),
        ('say="a: \\"{b}\\", é"', 'a: "{b}", é', ["--say", 'a: "{b}", é']),
        ("what='null'", "null", ["--what", "null"]),
        ("opt=a=b", "a=b", ["--opt", "a=b"]),
    ],
)
@pytest.mark.parametrize("arm", ["candidate", "broken"])
def test_a_value_is_that_of_yaml_and_comes_back_from_the_file(
    tmp_path: Path, arm: str, text: str, value: Any, words: list[str]
) -> None:
    base = ["--data", "*.bin", "--fused"]
    _, arms = written(tmp_path, base, **{arm: text})
    own = arms[arm].config
    name = text.partition("=")[0].lstrip("-")
    assert own.flags[name] == value
    assert isinstance(own.flags[name], type(value))
    fused = [] if name == "fused" else ["--fused"]
    assert own.words() == ["python", "train.py", "--data", "*.bin", *fused, *words]
    assert arms["baseline"].config.words() == ["python", "train.py", *base]


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (["lr=0.1", "compile=false"], "compile=true", ["lr=0.1", "compile=true"]),
        (["lr=0.1"], "optim.eps=1e-8", ["lr=0.1", "optim.eps=1e-08"]),
        (["--lr=0.1", "--compile=False"], "compile=True", ["--lr=0.1", "--compile=True"]),
        # beside a value `true` is one, and no bare switch
        (["--compile", "false"], "compile=true", ["--compile", "true"]),
        (["--compile", "1"], "compile=false", ["--compile", "false"]),
        (["--compile"], "compile=false", []),
        # of YAML's switches only true and false: others are words of a script
        (["--lr", "1"], "mixed_precision=no", ["--lr", "1", "--mixed_precision", "no"]),
        (["--lr", "1"], "compile=on", ["--lr", "1", "--compile", "on"]),
        (["lr=0.1"], "compile=off", ["lr=0.1", "compile=off"]),
    ],
)
def test_a_flag_is_given_in_the_form_that_the_command_has(
    tmp_path: Path, command: list[str], text: str, words: list[str]
) -> None:
    _, arms = written(tmp_path, command, candidate=text)
    assert arms["candidate"].config.words() == ["python", "train.py", *words]
    assert arms["candidate"].role == "candidate"


@pytest.mark.parametrize(
    ("command", "asked", "why"),
    [
        ([], {"candidate": "lr"}, "--candidate must be FLAG=VALUE, as lr=0.01 or --lr=0.01, VALUE"),
        ([], {"broken": "lr="}, "--broken must be FLAG=VALUE, .*got 'lr='"),
        ([], {"candidate": "=3"}, "must be FLAG=VALUE"),
        ([], {"candidate": "a b=3"}, "must be FLAG=VALUE"),
        ([], {"broken": '"no"=3'}, "must be FLAG=VALUE"),
        ([], {"candidate": "x=[1, 2"}, r"got x=\[1, 2, which is no YAML \(line 1: .*quote what is"),
        ([], {"candidate": "x={a: 1}"}, "a number, a text, true, false, null or a list of these"),
        ([], {"candidate": "x=2025-01-01"}, "got x=2025-01-01; quote what is a text"),
        ([], {"candidate": "x=[{a: 1}]"}, "a number, a text"),
        (["--lr", "0.1"], {"candidate": "lr=0.1"}, "must change what the command is given, got"),
        (["--lr", "1e-3"], {"candidate": "lr=0.001"}, "must change what the command is given"),
        (["--lr", "1e-3"], {"broken": "lr=1e-3"}, "--broken must change what the command is given"),
        (["--bf16"], {"candidate": "bf16=true"}, "must change what the command is given"),
        (["--lr", "1"], {"candidate": "bf16=false"}, "must change what the command is given"),
        (["--compile=False"], {"candidate": "compile=false"}, "must change what the command is"),
        (["--sizes", "1", "2"], {"candidate": "sizes=[1, 2]"}, "must change what the command is"),
        (
            ["--dtype", "bf16"],
            {"candidate": "dtype=fp32"},
            "another change than a reference to this command, got 'dtype=fp32': it would be",
        ),
        (["--bf16"], {"candidate": "bf16=null"}, "it would be measured from itself"),
        (["--bf16"], {"broken": "bf16=false"}, "a reference to this command, .*is no harm"),
        (["--lr", "1"], {"candidate": "lr=2", "broken": "lr=2.0"}, "another change than --candid"),
        (["--seed", "0"], {"candidate": "seed=1"}, "must name a flag that the study can set, got"),
        (["--x", "1", "--x", "2"], {"candidate": "x=1"}, "must name a flag that the study can set"),
    ],
)
def test_an_arm_that_can_not_be_or_judges_nothing_is_refused(
    tmp_path: Path, command: list[str], asked: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=f"^init: .*{why}"):
        written(tmp_path, command, **asked)


def test_a_change_that_is_near_one_that_is_refused_is_taken(tmp_path: Path) -> None:
    """Of the reference's flag another value, and an explicit false where false is a value."""
    _, arms = written(tmp_path, ["--dtype", "bf16"], candidate="dtype=fp16")
    assert arms["candidate"].config.words()[-2:] == ["--dtype", "fp16"]
    assert arms["reference"].config.words()[-2:] == ["--dtype", "fp32"]
    _, arms = written(tmp_path, ["lr=1"], candidate="bf16=false")
    assert arms["candidate"].config.words()[-1] == "bf16=false"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--candidate", "--lr", "0.1", "--", *PLAIN],
            "--candidate must be FLAG=VALUE, as lr=0.01",
        ),
        (["--broken", "--", *PLAIN], "--broken must be FLAG=VALUE"),
        (
            ["--candidate", "lr=1", "--candidate=lr=2", "--", *PLAIN],
            "--candidate must be given once; write a further arm into the study's file",
        ),
        (["--candidate", "lr=1"], "a command must follow --"),
        (
            ["--template", "kernel", "--candidate", "lr=1"],
            "--candidate must be given with a command, got 'lr=1' with --template",
        ),
        (["--template", "script", "--broken", "lr=1"], "--broken must be given with a command"),
        (
            ["--attention", "flash:fa2", "--candidate", "lr=1", "--", *PLAIN],
            "got 'lr=1' beside 'flash:fa2': the attention is the candidate",
        ),
        (
            ["--attention", "flash:fa2", "--broken", "lr=1", "--", *PLAIN],
            "--broken must be left out with --attention",
        ),
        (
            ["--candidate", "bf16=false", "--", *PLAIN, "--bf16"],
            "it would be measured from itself",
        ),
    ],
)
def test_words_that_make_no_arm_are_told_before_anything_is_tried(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", *words) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
