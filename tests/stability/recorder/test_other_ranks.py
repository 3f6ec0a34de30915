"""Ranks of one training that do not compute alike leave a pair unproven."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, read_spool

BEGIN = {"init": "", "buffers": [], "rank": 0, "world": 2, "script": "", "modules": {}}


def two_ranks(folder: Path, **second: object) -> list[str]:
    """Return the doubts about a training whose second rank has `second` in its environment."""
    return list(spooled(folder, {}, **second).doubts)


def spooled(folder: Path, ends: dict[int, Any], **second: object) -> Spooled:
    """Return such a training, whose ranks have `ends` in their last lines."""
    begin = {**BEGIN, "environment": {"threads": 1}}
    training = Training(Spool(str(folder), 0), due=lambda step: False, begin=lambda state: begin)
    uninstall = install(training)
    try:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        training.end("exit")
    finally:
        uninstall()
    (path,) = folder.glob("rank-0-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in _ended(lines, ends.get(0, {}))))
    lines = _ended(lines, ends.get(1, {}))
    for line in lines:
        if line["kind"] == "begin":
            line |= {"rank": 1, "environment": {"threads": 1, **second}}
    other = path.with_name(path.name.replace("rank-0", "rank-1"))
    other.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_spool(folder)


def _ended(lines: list[dict[str, object]], more: dict[str, object]) -> list[dict[str, object]]:
    return [{**line, **more} if line["kind"] == "end" else dict(line) for line in lines]


def test_ranks_that_compute_alike_leave_no_doubt(tmp_path: Path) -> None:
    assert two_ranks(tmp_path) == []


def test_a_rank_with_other_threads_is_named(tmp_path: Path) -> None:
    said = "the same environment on rank 1: another threads"
    assert two_ranks(tmp_path, threads=2) == [said]


def test_a_rank_that_loaded_other_code_is_named_and_one_that_loaded_more_is_not(
    tmp_path: Path,
) -> None:
    ends = {0: {"code": {"code.x": "1 a"}}, 1: {"code": {"code.x": "1 b", "code.y": "1 a"}}}
    found = spooled(tmp_path, ends)
    assert list(found.doubts) == ["the same code on rank 1: another code.x"]
    assert found.environment == {"threads": 1, "code.x": "1 a"}


def test_what_any_rank_has_executed_and_what_none_could_hash_are_told(tmp_path: Path) -> None:
    found = spooled(tmp_path, {0: {"files": ["a.py"]}, 1: {"files": ["b.so"], "unhashed": ["c"]}})
    assert list(found.files) == ["a.py", "b.so"]
    assert list(found.doubts) == ["c"]


def test_weights_of_a_rank_that_are_others_than_the_recorded_ones_are_told(tmp_path: Path) -> None:
    said = "the weights of rank 1: they are others than the first's, as in a pipeline"
    (doubt,) = spooled(tmp_path, {1: {"weights": "other"}}).doubts
    assert doubt.startswith(said)
