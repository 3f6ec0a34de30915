"""The colours of a map of positive values over many decades: logarithmic, with whole powers named.

Leaves out maps around a centre (`deviation_charts`).
"""

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["log_colours"]

MOST_TICKS = 8


def log_colours(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what a heat map of `rows` is drawn with: z, its colours, and the values to hover over.

    Zeros, and what is no finite number, are empty cells whose hover says what they are.
    """
    z = [[_height(value) for value in row] for row in rows]
    finite = [value for row in z for value in row if value is not None]
    ticks = range(math.floor(min(finite, default=0)), math.ceil(max(finite, default=0)) + 1)
    every = math.ceil(len(ticks) / MOST_TICKS)
    return {
        "z": z,
        "customdata": [[f"{value:.6g}" for value in row] for row in rows],
        "colorscale": "Viridis",
        "colorbar": {
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": list(ticks)[::every],
            "ticktext": [f"1e{tick}".replace("-", "\N{MINUS SIGN}") for tick in ticks][::every],
        },
    }


def _height(value: float) -> float | None:
    return float(f"{math.log10(value):.6g}") if math.isfinite(value) and value > 0 else None
