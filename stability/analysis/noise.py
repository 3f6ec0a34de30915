"""How small an error of one place lies below the noise of a probe's looks, and has no name for it.

Would we have seen it? A place is named where its mean over the looks is beyond a limit more surely
than chance allows (`looks`), so what it takes depends on how far the looks lie apart: in FP32 a
thousandth is plain, in BF16 a hundredth may need many looks. Leaves out what was found (`locate`).
"""

import math
from collections.abc import Collection, Mapping

import numpy as np

from stability.analysis.locate import tests_of
from stability.analysis.looks import (
    FEW,
    NAMING_ALPHA,
    PLAIN_TIMES,
    OperatorLimits,
    least_named,
)
from stability.analysis.place_table import Judged, PlaceTable, samples_of
from stability.records.metric_columns import Series
from stability.records.metric_names import in_order

__all__ = ["below_the_noise"]

_SAYS: dict[Judged, str] = {"gain": "a wrong factor of less than", "error": "an error ratio below"}


def below_the_noise(
    metrics: Mapping[str, Series],
    limits: OperatorLimits | None = None,
    named: Collection[str] = (),
) -> tuple[str, ...]:
    """Return a sentence for each shadow that is not among `named`, with a figure for each result.

    The figure is that of the place where an error is seen the worst. Nothing is said of a shadow
    with fewer than `FEW` looks, or without an FP64 golden.
    """
    limits = limits or OperatorLimits()
    tests = tests_of(metrics)
    found: dict[str, dict[Judged, list[str]]] = {}
    where: dict[str, str] = {}
    order = in_order(table.what for table, _ in tests)
    for table, kind in sorted(tests, key=lambda test: order.index(test[0].what)):
        least = _least(table, kind, limits, NAMING_ALPHA / len(tests))
        if table.shadow in named or kind not in _SAYS or math.isnan(least):
            continue
        said = f"{least:.2g}" if kind == "error" else f"{100 * least:.2g}%"
        found.setdefault(table.shadow, {}).setdefault(kind, []).append(f"{table.what} {said}")
        place = "head" if "error_ratio" in table.of_head else "layer"
        where[table.shadow] = f"the noise of {len(table.steps)} looks lies, in one {place}"
    lines = []
    for shadow, kinds in found.items():
        who = f"{shadow}: below" if shadow else "Below"
        figures = "; ".join(
            f"{_SAYS[kind]} {', '.join(kinds[kind])}" for kind in _SAYS if kind in kinds
        )
        lines.append(f"{who} {where[shadow]}, {figures}.")
    return tuple(lines)


def _least(table: PlaceTable, kind: Judged, limits: OperatorLimits, alpha: float) -> float:
    """Return the least size that is named anywhere, as it is shown; NaN if that can't be said."""
    samples = samples_of(table, kind, limits)
    if samples is None or len(table.steps) < FEW:
        return math.nan
    # half of what the errors have is for the limit (`locate`)
    least = least_named(*samples, alpha / 2 if kind == "error" else alpha)
    if not np.isfinite(least).any():
        return math.nan
    worst = float(np.nanmax(least))
    if kind != "error":
        return worst
    # what is plain in a single look needs no statistics
    return min(math.exp(min(worst, 700.0)), PLAIN_TIMES * limits.error_ratio)
