"""How the processes of a training ended, in words: which of several ranks was the first, and why.

Leaves out how a single command is quoted (`study.foreign.died`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ending", "first_to_end", "have_ended"]

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL)
"""As torchrun and `accelerate launch` tell of the process that they saw end first."""

Line = Mapping[str, Any]


def have_ended(ends: Sequence[Line | None]) -> bool:
    """Whether every rank came to its own end, after as many updates as the others."""
    well = [end for end in ends if end and end["reason"] != "error"]
    return len(well) == len(ends) and len({end["step"] for end in well}) == 1


def ending(begins: Sequence[Line], ends: Sequence[Line | None]) -> str:
    """Return how a training ended, and of several ranks on which one."""
    ranks = sorted(zip(begins, ends, strict=True), key=lambda each: each[0]["rank"])
    many = len(ranks) > 1
    failed = [(begin["rank"], end) for begin, end in ranks if end and end["reason"] == "error"]
    if failed:
        rank, end = min(failed, key=lambda each: each[1].get("time", 0.0))
        why = f" ({end['error']})" if end.get("error") else ""
        return f"ended in an error{why}{f' on rank {rank}' if many else ''}"
    lost = [begin for begin, end in ranks if end is None]
    if lost:
        where = f" on rank {', '.join(str(each['rank']) for each in lost)}" if many else ""
        is_forked = any(each.get("forked", False) for each in lost)
        return (
            f"was killed{', or its forked process left by os._exit,' if is_forked else ''}{where}"
        )
    steps = [end["step"] for _, end in ranks if end]
    early = [begin["rank"] for begin, end in ranks if end and end["step"] < max(steps)]
    where = f" on rank {', '.join(map(str, early))} before it did on others" if early else ""
    return f"ended{where}"


def first_to_end(ranks: Sequence[Sequence[Line]], output: str) -> str:
    """Return which of several ranks ended first, and how; empty where there are none or no word.

    `ranks` are the lines of each, and `output` is the last that the launcher has printed: of a
    process that is killed only that can tell.
    """
    begins = [next((x for x in lines if x["kind"] == "begin"), None) for lines in ranks]
    ends = {
        begin["rank"]: next((x for x in lines if x["kind"] == "end"), None)
        for begin, lines in zip(begins, ranks, strict=True)
        if begin
    }
    cause = _ROOT_CAUSE.search(output)
    if cause and ends.get(int(cause[1])) is None:
        code = int(cause[2])
        how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
        return f"rank {cause[1]} ended first: it {how}"
    told = {rank: end for rank, end in ends.items() if end}
    if not told or len(ends) < 2:
        return ""
    rank = min(told, key=lambda each: told[each]["time"])
    end = told[rank]
    why = f": {end['error']}" if end.get("error") else ""
    return f"rank {rank} ended first, after {end['step']} updates{why}"
