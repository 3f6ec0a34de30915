"""Metric names, the same in the metric log, in W&B and in the report.

`train/loss`, `deviation/<layer>/<what>/<metric>`, `drift/<parameter or "all">/<metric>`. Leaves out
what a metric means: `metrics.deviation` and `metrics.drift` say that.
"""

from typing import NamedTuple

__all__ = [
    "STEP_AXIS",
    "TRAIN_LOSS",
    "DeviationName",
    "DriftName",
    "deviation_name",
    "drift_name",
    "parse_deviation",
    "parse_drift",
]

TRAIN_LOSS = "train/loss"
STEP_AXIS = "trainer/global_step"
"""W&B's x axis: the number of optimizer updates made before the measurement."""


class DeviationName(NamedTuple):
    """The parts of a deviation's name."""

    layer: str
    what: str
    metric: str


class DriftName(NamedTuple):
    """The parts of a drift's name."""

    parameter: str
    metric: str


def deviation_name(layer: str, what: str, metric: str) -> str:
    """Return the name of a deviation: `what` is out, dq, dk or dv."""
    return f"deviation/{layer}/{what}/{metric}"


def drift_name(parameter: str, metric: str) -> str:
    """Return the name of a drift; `parameter` is "all" for the pooled weights."""
    return f"drift/{parameter}/{metric}"


def parse_deviation(name: str) -> DeviationName | None:
    """Return the parts of a deviation's name, None for any other name."""
    head, _, rest = name.partition("/")
    parts = rest.rsplit("/", 2)
    return DeviationName(*parts) if head == "deviation" and len(parts) == 3 else None


def parse_drift(name: str) -> DriftName | None:
    """Return the parts of a drift's name, None for any other name."""
    head, _, rest = name.partition("/")
    parts = rest.rsplit("/", 1)
    return DriftName(*parts) if head == "drift" and len(parts) == 2 else None
