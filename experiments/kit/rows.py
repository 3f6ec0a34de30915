"""Chooses among the rows that an experiment measured, and takes one figure per seed out of them.

A row is a flat mapping: what was varied, the `seed`, and the measured figures.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["BySeed", "Row", "Rows", "by_seed", "chosen", "mean", "over", "values_by"]

Rows = Sequence[Mapping[str, Any]]
BySeed = Mapping[int, float]
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


def mean(rows: Sequence[Row], value: str, **only: object) -> float:
    """Return the mean of `value` over the rows that `only` chooses; ValueError if there is none."""
    found = [float(row[value]) for row in chosen(rows, **only)]
    return sum(found) / len(found)


def over(numerator: BySeed, denominator: BySeed) -> dict[int, float]:
    """Return numerator over denominator, seed by seed."""
    return {seed: value / denominator[seed] for seed, value in numerator.items()}


def values_by(
    rows: Sequence[Row], place: str, value: str, **only: object
) -> dict[float, list[float]]:
    """Return the values of every seed by `place`, as `plots.draw_series` wants a line.

    `only` names the values that other columns must have; no row need have them.
    """
    found: dict[float, list[float]] = {}
    for row in rows:
        if all(row[name] == wanted for name, wanted in only.items()):
            found.setdefault(float(row[place]), []).append(float(row[value]))
    return found
