"""Choosing among an experiment's rows, and one figure a seed out of them, for `stated_tests`.

Leaves out what is decided (`stated_tests`) and what is drawn (`report.paper_series`).

From which step on a signal tells two runs apart, decided over seeds.

A signal's gap, how far it lies from that of the paired run, is held against the gap of another
pair whose difference is known to mean nothing: a nudge. Leaves out how signals are measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stability.analysis.intervals import paired_interval

__all__ = ["LOOKS", "Row", "by_seed", "chosen", "first_notice"]

Row = Mapping[str, Any]


def chosen(rows: Sequence[Row], **only: object) -> list[Row]:
    """Return the rows that have the values of `only`; ValueError if there is none."""
    found = [row for row in rows if all(row.get(name) == value for name, value in only.items())]
    if not found:
        raise ValueError(f"chosen: only must be values that some row has, got {only}")
    return found


def by_seed(
    rows: Sequence[Row],
    value: str,
    pick: Callable[[list[float]], float] | None = None,
    /,
    **only: object,
) -> dict[int, float]:
    """Return by seed the `value` of the rows that `only` chooses; of several what `pick` makes.

    ValueError if it chooses none, or several of one seed without a `pick`.
    """
    found: dict[int, list[float]] = {}
    for row in chosen(rows, **only):
        found.setdefault(row["seed"], []).append(float(row[value]))
    for seed, values in found.items():
        if pick is None and len(values) > 1:
            raise ValueError(
                f"by_seed: only must leave one row a seed, got {len(values)} of seed {seed} for "
                f"{value!r} with {only}; name the column that tells them apart, or pick one"
            )
    return {seed: pick(values) if pick else values[0] for seed, values in found.items()}


LOOKS = 3
"""Looks in a row that must tell: a single one does by chance once in twenty at a level of 0.9.
Looks of one run are not independent, so this is a rule and no level of its own."""


def first_notice(ratios: Mapping[int, Mapping[int, float]], level: float = 0.9) -> int | None:
    """Return the first step from which `LOOKS` looks in a row tell, None if there is none.

    `ratios`, by step and seed, are gap over meaningless gap, NaN where that is 0. A look tells if
    the interval over its seeds lies above 1. ValueError for a negative ratio.
    """
    told: list[int] = []
    for step in sorted(ratios):
        known = not any(math.isnan(ratio) for ratio in ratios[step].values())
        tells = known and paired_interval(ratios[step], level).low > 1
        told = [*told, step] if tells else []
        if len(told) == LOOKS:
            return told[0]
    return None
