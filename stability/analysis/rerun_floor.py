"""The floor under a ladder: what reruns, which change nothing, drift by.

It is 0 where training is deterministic. Else every run is one draw of many, and a drift that a
rerun makes too tells nothing of a change. The floor at a step is the largest drift of all rerun
arms and seeds there: a distribution of few values, whose ends are said. Leaves out how reruns enter
a verdict, as controls beside the nudges (`study_distances`).
"""

from collections.abc import Sequence

from stability.analysis.ladder import Ladder, Row
from stability.analysis.number_text import scientific

__all__ = ["below_floor", "floor_note"]


def _rerun_drifts(ladder: Ladder, *, early: bool) -> list[float]:
    """Return the drifts of all reruns at the early or the last step, the smallest first."""
    rows = [row.rel_l2 for row in ladder.rows_on("none")]
    found = [each.early if early else each.last for each in rows]
    return sorted(value for values in found for value in values.per_seed.values())


def floor_note(ladder: Ladder) -> str:
    """Return a sentence on a training that is not deterministic; empty if its reruns are exact."""
    steps = [(step, _rerun_drifts(ladder, early=early)) for step, early in _steps(ladder)]
    said = [f"{_ends(drifts)} at step {step}" for step, drifts in steps if drifts and drifts[-1]]
    if not said:
        return ""
    names = ", ".join(row.arm for row in ladder.rows_on("none"))
    count = max(len(drifts) for _, drifts in steps)
    return (
        f"A/A is not zero here: {names} drifts by up to {' and '.join(said)} ({count} "
        f"rerun{'s' if count > 1 else ''}): the training is not deterministic. That is the floor: "
        "no smaller drift means anything."
    )


def below_floor(ladder: Ladder, row: Row) -> str:
    """Return a clause for an arm that has moved no further than a rerun does; empty if it has."""
    if row.axis == "none":
        return ""
    below = []
    for step, early in _steps(ladder):
        floor, values = _rerun_drifts(ladder, early=early), row.rel_l2.early
        values = values if early else row.rel_l2.last
        if floor and floor[-1] and values.n and values.mean <= floor[-1]:
            below.append((step, floor[-1]))
    if not below:
        return ""
    where = " and ".join(f"{scientific(drift)} at step {step}" for step, drift in below)
    what = "that" if len(below) < 2 else "neither figure"
    means = "means nothing" if len(below) < 2 else "means anything"
    return f"a rerun, which changes nothing, drifts by {where}, so {what} {means}"


def _steps(ladder: Ladder) -> list[tuple[int, bool]]:
    steps = [(ladder.early_step, True), (ladder.last_step, False)]
    return steps if ladder.early_step != ladder.last_step else steps[1:]


def _ends(drifts: Sequence[float]) -> str:
    least = f" (from {scientific(drifts[0])})" if drifts[0] != drifts[-1] else ""
    return f"{scientific(drifts[-1])}{least}"
