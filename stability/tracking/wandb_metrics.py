"""How W&B draws and sums up each metric: over which axis, and which of its values counts.

A metric is told W&B under its own name or under a prefix, never under both: of two prefixes that
fit, W&B 0.31 takes one by chance. Leaves out the values.
"""

import wandb

from stability.records.metric_names import STEP_AXIS, TRAIN_LOSS, ULP_HISTOGRAM, parse_deviation

__all__ = ["MetricRules", "summary_of"]

_PREFIXES = {
    "drift/*": "",  # the last value, plainly
    "watch/*": "last,max",
    "weights/*": "",
}
_WORST_IS_LEAST = {"cosine", "sqnr_db"}


class MetricRules:
    """Tells a run of W&B each metric's rule before its first value."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run
        self._told = {TRAIN_LOSS}
        run.define_metric(STEP_AXIS, hidden=True)
        self._define(TRAIN_LOSS)
        for prefix in _PREFIXES:
            self._define(prefix)

    def see(self, name: str) -> None:
        """Tell of `name`, unless it was told or a prefix covers it."""
        if name not in self._told:
            self._told.add(name)
            if _prefix(name) is None and "*" not in name:  # a star would make it a prefix
                self._define(name)

    def _define(self, name: str) -> None:
        self._run.define_metric(
            name, step_metric=STEP_AXIS, step_sync=True, summary=summary_of(name) or None
        )


def summary_of(name: str) -> str:
    """Return what W&B's summary holds of a metric: some of last, min, max; "" is the last alone."""
    prefix = _prefix(name)
    if prefix is not None:
        return _PREFIXES[prefix]
    if name == TRAIN_LOSS:
        return "last,min"
    parts = parse_deviation(name)
    if parts is None or parts.metric == ULP_HISTOGRAM:
        return ""
    return "last,min" if parts.metric in _WORST_IS_LEAST else "last,max"


def _prefix(name: str) -> str | None:
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix[:-1])), None)
