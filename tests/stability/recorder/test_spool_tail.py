"""How far a command's training has come is told while it runs, by what its spool holds so far."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from stability.config.command_study import load_command_study
from stability.recorder import launch as launching
from stability.recorder.launch import launch
from stability.recorder.spool_tail import SpoolTail, telling_updates
from stability.study.run_commands import run_commands
from tests.conftest import SilentObserver


def _line(step: int, **losses: float) -> str:
    return json.dumps({"kind": "update", "step": step, "losses": losses}) + "\n"


def _begin(rank: int) -> str:
    return json.dumps({"kind": "begin", "rank": rank}) + "\n"


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_each_line_is_told_once_and_only_whole(tmp_path: Path) -> None:
    tail, path = SpoolTail(tmp_path), tmp_path / "rank-0-7.jsonl"
    assert tail.new_lines() == []
    first, second = _line(1, a=2.5), _line(2, a=2.25)
    _append(path, _begin(0) + first + second[:9])
    assert [line.get("step") for line in tail.new_lines()] == [None, 1]
    assert tail.new_lines() == []
    _append(path, second[9:])
    assert [line["step"] for line in tail.new_lines()] == [2]


def test_the_newest_update_is_told_with_its_loss_where_there_is_one(tmp_path: Path) -> None:
    told: list[tuple[int, float | None]] = []
    look = telling_updates(tmp_path, lambda *now: told.append(now))
    # a process that was spawned has its rank in its first line alone
    path, other = tmp_path / "rank-0-7.jsonl", tmp_path / "rank-0-8.jsonl"
    look()
    _append(path, _begin(0))
    _append(other, _begin(1))
    look()
    for lines in (_line(1, a=2.5) + _line(2, a=2.25), _line(3), _line(4, a=2.0, b=9.0)):
        _append(path, lines)
        _append(other, _line(99, a=1.0))
        look()
        look()
    assert told == [(2, 2.25), (3, None), (4, None)]


def test_what_can_not_be_read_is_passed_over(tmp_path: Path) -> None:
    tail = SpoolTail(tmp_path)
    (tmp_path / "rank-0-1.jsonl").write_text("no JSON\n")
    (tmp_path / "rank-0-2.jsonl").write_text(f"[1]\n{_begin(0)}{_line(3)}")
    (tmp_path / "rank-0-3.jsonl").mkdir()
    assert [line.get("step") for line in tail.new_lines()] == [None, 3]


def test_what_is_shown_ends_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_LOOK_S", 0.05)
    asked: list[int] = []

    def fail() -> None:
        asked.append(1)
        raise OSError("stale file handle")

    source = "import time; time.sleep(0.5); print('ended')"
    words = [sys.executable, "-S", "-c", source]
    assert launch(words, {}, output=tmp_path / "said", meanwhile=fail).code == 0
    assert asked
    assert (tmp_path / "said").read_text() == "ended\n"


def test_a_command_is_looked_after_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends only once somebody has looked."""
    monkeypatch.setattr(launching, "_LOOK_S", 0.05)
    seen = tmp_path / "seen"
    source = f"import os, time\nwhile not os.path.exists({str(seen)!r}):\n    time.sleep(0.01)"
    launched = launch(
        [sys.executable, "-S", "-c", source],
        {},
        output=tmp_path / "output.txt",
        meanwhile=seen.touch,
    )
    assert launched.code == 0


SCRIPT = """
import os, time
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 5:
        ends = time.monotonic() + 60
        while not os.path.exists("seen") and time.monotonic() < ends:
            time.sleep(0.05)
    model(torch.ones(2, 4) * step).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open("ended", "w").close()
"""


class _Watching(SilentObserver):
    """Lets the script go on once its first updates are told."""

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        super().run_advanced(arm, seed, step, loss)
        if not Path("ended").exists():
            assert (arm, seed) == ("baseline", 0)
            assert (loss is None) == (step == 0)
        if step and not Path("ended").exists():
            Path("seen").write_text(str(step))


@pytest.mark.slow
def test_a_study_of_commands_tells_how_far_a_run_is_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    base = {"command": f"{shlex.quote(sys.executable)} train.py", "train": {"steps": 6}}
    content = {"name": "mine", "question": "is it told?", "base": base, "arms": {}, "seeds": [0]}
    Path("study.yaml").write_text(yaml.safe_dump(content))
    study = load_command_study(Path("study.yaml"))
    run_commands(study, tmp_path / "runs", observer=_Watching())
    assert 1 <= int(Path("seen").read_text()) <= 5
