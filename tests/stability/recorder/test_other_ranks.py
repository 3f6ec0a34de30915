"""Ranks of one training that do not compute alike leave a pair unproven."""

import json
from pathlib import Path

import torch
from torch import nn

from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import read_spool

BEGIN = {"init": "", "rank": 0, "world": 2, "script": "", "modules": {}}


def two_ranks(folder: Path, **second: object) -> list[str]:
    """Return the doubts about a training whose second rank has `second` in its environment."""
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
    for line in lines:
        if line["kind"] == "begin":
            line |= {"rank": 1, "environment": {"threads": 1, **second}}
    other = path.with_name(path.name.replace("rank-0", "rank-1"))
    other.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return list(read_spool(folder).doubts)


def test_ranks_that_compute_alike_leave_no_doubt(tmp_path: Path) -> None:
    assert two_ranks(tmp_path) == []


def test_a_rank_with_other_threads_is_named(tmp_path: Path) -> None:
    said = "the same environment on rank 1: another threads"
    assert two_ranks(tmp_path, threads=2) == [said]
