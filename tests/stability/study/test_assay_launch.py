"""How a command is started again to have faults planted in it; what they show is tested beside."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stability.config.study import PolicyConfig
from stability.recorder.launch import Asked
from stability.recorder.spool_tail import SpoolTail
from stability.study import foreign_assay
from stability.study.foreign_plan import ForeignRun


class _StartedError(Exception):
    """Ends what comes after the start."""


def test_a_command_that_runs_again_for_the_assay_logs_no_second_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ForeignRun(
        study="study",
        folder=tmp_path,
        arm="fa2",
        seed=0,
        config={},
        env={"WANDB_MODE": "online", "OTHER": "kept"},
        diff={},
        axis="attention",
        role="candidate",
        asked=Asked(seed=0, attention="flash:fa2"),
        words=["train", "--save", "{out}"],
    )
    run.paths.root.mkdir(parents=True)
    started: list[Any] = []

    def launch(*given: Any, **_: Any) -> None:
        started.extend(given)
        raise _StartedError

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(foreign_assay, "steps_of", lambda paths: [4])
    monkeypatch.setattr(foreign_assay, "launch", launch)
    manifest: Any = SimpleNamespace(step=4)
    with pytest.raises(_StartedError):
        foreign_assay._planted(
            *(run, manifest, None, PolicyConfig()), lambda *_: None, ["dv_gain"], 24
        )
    words, variables = started
    assert variables["WANDB_MODE"] == "disabled"
    assert variables["OTHER"] == "kept"
    assert words[2] == variables["STABILITY_SPOOL"], "what it saves is gone afterwards"
    assert not any(path.name.startswith(".spool") for path in run.paths.root.iterdir())


def test_how_far_the_planting_has_come_is_told_as_it_goes(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    tail, spool = SpoolTail(tmp_path), tmp_path / "rank-0-1.jsonl"

    def write(*lines: dict[str, Any]) -> None:
        with spool.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        foreign_assay._tell_of_newest(tail, 24, lambda *given: told.append(given))

    write({"kind": "begin", "rank": 0}, {"odd": "line of a script's own"})
    write({"kind": "update", "step": 1}, {"kind": "update", "step": 2}, {"kind": "state"})
    write()
    write(
        {"kind": "update", "step": 24},
        {"kind": "planted", "done": 2, "most": 72, "faults": 2},
        {"kind": "planted", "done": 3, "most": 72, "faults": 1},
    )
    assert told == [(2, 24, "updates"), (3, 72, "looks, 1 fault open")]
