"""When a watched figure is worth an alert: a published threshold, or a fact that needs none.

A figure without a threshold that could be checked at its source (gradient norm, log Z, entropy,
RMS_t) gets none: RMS_t of arXiv 2304.13013 is logged for the reader to judge, as it passes 2 in
sound runs too. Leaves out the figures themselves (`training_watch`) and who is told.

Sources. arXiv 2309.14322: "all points with attention logits above 1e4 diverged". A loss spike is
defined by us: the window and the number of standard deviations are no published ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["LOSS_SPIKE_DEVIATIONS", "THRESHOLDS", "Crossing", "Threshold", "crossings"]

LOSS_SPIKE_DEVIATIONS = 3.2
"""How many standard deviations above its mean a loss counts as a spike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A limit on every metric whose whole name matches `pattern`.

    The pattern's group `layer`, if it has one, is the layer or parameter that the name speaks of.
    """

    pattern: str
    relation: Literal[">", ">="]
    limit: float
    meaning: str
    """What it means to be past the limit, in a few words."""
    source: str

    def is_past(self, value: float) -> bool:
        """Whether `value` is past the limit; NaN never is: non-finite values are counted apart."""
        return value >= self.limit if self.relation == ">=" else value > self.limit


THRESHOLDS = (
    Threshold(
        pattern=r"watch/(?P<layer>[^/]+)/(?:[^/]+/)?max_logit",
        relation=">",
        limit=1e4,
        meaning="attention logits of runs that diverge",
        source="arXiv 2309.14322",
    ),
    Threshold(
        pattern=r"watch/loss_spike",
        relation=">",
        limit=0.0,
        meaning=f"loss above its running mean by {LOSS_SPIKE_DEVIATIONS} standard deviations",
        source="our rule",
    ),
    Threshold(
        pattern=r"watch/nonfinite_gradients",
        relation=">",
        limit=0.0,
        meaning="NaN or infinity in the gradients",
        source="by definition",
    ),
)


class Crossing(NamedTuple):
    """The metrics that got past one threshold together."""

    threshold: Threshold
    values: dict[str, float]
    """By name, the largest first; never empty."""

    @property
    def layer(self) -> str:
        """The layer or parameter of the largest value, "" if it is the whole run's."""
        found = re.fullmatch(self.threshold.pattern, next(iter(self.values)))
        return (found.groupdict() if found else {}).get("layer", "")

    @property
    def text(self) -> str:
        """What happened, in one line."""
        (name, value), *others = self.values.items()
        more = f", and {len(others)} more" if others else ""
        rule = f"{self.threshold.relation} {self.threshold.limit:g}, {self.threshold.source}"
        return f"{name} = {value:.4g}{more} ({rule}): {self.threshold.meaning}"


def crossings(
    metrics: Mapping[str, float],
    previous: Mapping[str, float],
    thresholds: Sequence[Threshold] = THRESHOLDS,
) -> list[Crossing]:
    """Return the thresholds that metrics are past now and were not past before.

    `previous` holds the last value of each metric that was ever measured: the caller goes on with
    `{**previous, **metrics}`, and a name that is not in it counts as not past. Metrics that cross
    one threshold at once make one crossing.
    """
    found = []
    for threshold in thresholds:
        crossed = {
            name: value
            for name, value in metrics.items()
            if re.fullmatch(threshold.pattern, name)
            and threshold.is_past(value)
            and not (name in previous and threshold.is_past(previous[name]))
        }
        if crossed:
            largest_first = sorted(crossed.items(), key=lambda item: -item[1])
            found.append(Crossing(threshold, dict(largest_first)))
    return found
