"""A sparkline: values over the steps as one short word of blocks, on a scale told beside it.

What has no place on the scale is no block: an exact zero is `0`, a value beyond an end `^` or `v`,
one that is no number `!`, a missing one a dot. Leaves out the words around it.

Each arm's drift over the steps as a sparkline, all arms on one scale.

Leaves out the table it stands in (`terminal`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from stability.analysis.ladder import INDEPENDENT_AXES
from stability.analysis.number_text import scientific
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.view.robust_limit import robust_limit

__all__ = ["DriftSparks", "Scale", "Sparks", "drift_sparks", "evenly", "linear_scale", "log_scale"]

_BLOCKS = ("▁▂▃▄▅▆▇█", "·")
_ASCII = ("_.-:=+*#", "?")


@dataclass(frozen=True, slots=True)
class Scale:
    """From the lowest block to the highest; both ends are the same where there is one value."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """Return where `value` lies, 0 at the low end and 1 at the high one."""
        if self.low == self.high:
            return 0.5
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def __str__(self) -> str:
        kind = "log" if self.is_log else "linear"
        return f"{kind} scale from {scientific(self.low)} to {scientific(self.high)}"


def log_scale(values: Iterable[float]) -> Scale:
    """Return the log scale over the positive ones of `values`."""
    found = [value for value in values if 0 < value < math.inf]
    return Scale(min(found, default=1.0), max(found, default=1.0), is_log=True)


def linear_scale(values: Iterable[float]) -> Scale:
    """Return a linear scale with 0 in its middle, for values of either sign; a few may be off."""
    reach = robust_limit(values)
    return Scale(-reach, reach, is_log=False)


@dataclass(frozen=True, slots=True)
class Sparks:
    """The characters that a console can print."""

    blocks: str
    missing: str

    @classmethod
    def for_console(cls, console: Console) -> "Sparks":
        """Return blocks, or ASCII where the console's encoding has none."""
        try:
            "".join(_BLOCKS).encode(console.encoding)
        except UnicodeEncodeError:
            return cls(*_ASCII)
        return cls(*_BLOCKS)

    def line(self, values: Sequence[float | None], scale: Scale) -> str:
        """Return a character for each of `values`; None is missing."""
        return "".join(self._mark(value, scale) for value in values)

    def key(self) -> str:
        """Return what the characters mean that are no blocks."""
        return f"0 is exact, {self.missing} missing, ^ and v off the scale, ! no number"

    def _mark(self, value: float | None, scale: Scale) -> str:
        if value is None:
            return self.missing
        if not math.isfinite(value):
            return "!"
        if value == 0:
            return "0"
        if not scale.low <= value <= scale.high:
            return "^" if value > scale.high else "v"
        return self.blocks[round(scale.place(value) * (len(self.blocks) - 1))]


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of `steps`, evenly taken, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


MOST = 12
"""More steps than this are thinned."""


class DriftSparks:
    """The relative L2 drift of a study's arms, mean over the seeds, at the same steps."""

    def __init__(self, study: RecordedStudy, sparks: Sparks) -> None:
        self._recorded = study.drift_steps
        self._steps = evenly(self._recorded, MOST)
        self._values = {arm.name: _means(arm, self._steps) for arm in study.candidates}
        # other initial weights lie decades away and would press the others into one block
        paired = {arm.name for arm in study.candidates if arm.axis not in INDEPENDENT_AXES}
        values = [v for name in paired or self._values for v in self._values[name] if v is not None]
        self._scale = log_scale(values)
        self._sparks = sparks

    def line(self, arm: str) -> str:
        """Return the sparkline of `arm`; empty for the baseline, which has no drift."""
        return "" if arm == BASELINE else self._sparks.line(self._values[arm], self._scale)

    def caption(self) -> str:
        """Say at which steps and on which scale."""
        some = len(self._steps) < len(self._recorded)
        thinned = f" ({len(self._steps)} of {len(self._recorded)})" if some else ""
        steps = ", ".join(str(step) for step in self._steps)
        return f"drift by step: at {steps}{thinned}; {self._scale}; {self._sparks.key()}."


def drift_sparks(study: RecordedStudy, console: Console) -> DriftSparks | None:
    """Return the sparklines of a study for a terminal; None while no drift is on record."""
    return DriftSparks(study, Sparks.for_console(console)) if study.drift_steps else None


def _means(arm: RecordedArm, steps: list[int]) -> list[float | None]:
    drifts: Mapping[int, Mapping[int, float]] = {
        seed: run.drift("rel_l2") for seed, run in arm.runs.items()
    }
    found = [SeedValues({s: v[step] for s, v in drifts.items() if step in v}) for step in steps]
    return [spread.mean if spread.n else None for spread in found]
