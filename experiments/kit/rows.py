"""Choosing among an experiment's rows, and one figure a seed out of them, for `stated_tests`.

Leaves out what is decided (`stated_tests`) and what is drawn (`report.paper_series`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Row", "by_seed", "chosen"]

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
