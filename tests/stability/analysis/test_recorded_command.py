"""The words that a record says were run must be those that its config makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stability.analysis.run_consistency import _command
from stability.config.command_study import CommandConfig, CommandTrain
from stability.config.masking import masked_words
from stability.recorder.launch import Asked
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths
from stability.study.foreign_plan import ForeignRun
from tests.stability.analysis.test_launch_contract import run

PATHS = RunPaths.for_run(Path("runs/study"), "arm", 0)
COMMANDS = [
    ("python train.py --seed {seed}", {"lr": 0.5, "bf16": True}, ""),
    ("python train.py lr=1 {settings}", {"optimizer.lr": 0.5, "flash": False}, ""),
    ("python train.py {assigned} 'a b'", {"lr": [1, 2]}, ""),
    ("python train.py --resume {resume}/state {flags}", {"lr": 0.5}, "given/late"),
    ("python train.py --api-key hunter2 {flags}", {"wandb.token": "hunter3"}, ""),
]


def recorded(command: str, flags: dict[str, Any], start: str) -> Manifest:
    train = CommandTrain(steps=2)
    config = CommandConfig(command=command, flags=flags, start=start, train=train)
    written = json.loads(json.dumps(config.recorded()))
    return replace(run(), config=written, resolved={"command": masked_words(config.words())})


@pytest.mark.parametrize(("command", "flags", "start"), COMMANDS)
def test_what_was_run_is_what_the_study_says(
    command: str, flags: dict[str, Any], start: str
) -> None:
    told = recorded(command, flags, start)
    given: Any = told.config
    assert "hunter" not in str(told)
    assert not list(_command(PATHS, told))
    for name in flags:
        config: Any = {**given, "flags": {**given["flags"], name: 0.7}}
        (line,) = _command(PATHS, replace(told, config=config))
        assert "the command that was run is" in line
    config = {**given, "program": given["program"].replace("train", "other")}
    assert list(_command(PATHS, replace(told, config=config)))
    for words in (told.resolved["command"][:-1], [*told.resolved["command"], "--wd"]):
        assert list(_command(PATHS, replace(told, resolved={"command": words})))
    config = {**given, "program": "python '"}
    assert list(_command(PATHS, replace(told, config=config)))


@pytest.mark.parametrize(
    ("flags", "words", "is_other"),
    [
        ({"steps": 40}, ["t.py", "--steps", "40"], False),
        ({"steps": 40.0}, ["t.py", "--steps", "40.0"], True),
        ({"steps": True}, ["t.py", "--steps"], True),
        # by name the same flags, in another order
        ({"steps": 40}, ["--steps", "40", "t.py"], True),
    ],
)
def test_a_run_is_kept_only_if_its_command_has_the_same_words(
    flags: dict[str, Any], words: list[str], is_other: bool
) -> None:
    known = run(config={"flags": {"steps": 40}}, command="t.py --steps 40")
    asked = ForeignRun(
        study="study",
        folder=Path("runs/study"),
        arm="arm",
        seed=0,
        config={**known.config, "flags": flags},
        diff={},
        axis="none",
        role="candidate",
        asked=Asked(seed=0),
        words=words,
    )
    assert asked.is_other(known) == is_other
