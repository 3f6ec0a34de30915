"""How W&B draws and sums up each metric: over which axis, and which of its values counts.

A metric is told W&B under its own name or under a prefix, never under both: of two prefixes that
fit, W&B 0.31 takes one by chance. Leaves out the values.
"""

import wandb

from stability.records.names import STEP_AXIS, TRAIN_LOSS, parse_deviation

__all__ = ["MetricRules"]

_PREFIXES = {
    "drift/*": None,  # the last value, plainly
    "watch/*": "last,max",
    "weights/*": None,
}
_WORST_IS_LEAST = {"cosine", "sqnr_db"}


class MetricRules:
    """Tells a run of W&B each metric's rule before its first value."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run
        self._known = {TRAIN_LOSS}
        run.define_metric(STEP_AXIS, hidden=True)
        self._define(TRAIN_LOSS, "last,min")
        for prefix, summary in _PREFIXES.items():
            self._define(prefix, summary)

    def see(self, name: str, *, is_number: bool) -> None:
        """Tell of `name`, unless it was told or a prefix covers it."""
        if name in self._known:
            return
        self._known.add(name)
        if name.startswith(tuple(prefix[:-1] for prefix in _PREFIXES)):
            return
        parts = parse_deviation(name)
        if parts is None or not is_number:
            self._define(name, None)
        else:
            self._define(name, "last,min" if parts.metric in _WORST_IS_LEAST else "last,max")

    def _define(self, name: str, summary: str | None) -> None:
        self._run.define_metric(name, step_metric=STEP_AXIS, step_sync=True, summary=summary)
