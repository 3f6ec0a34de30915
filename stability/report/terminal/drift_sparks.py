"""Each arm's drift over the steps as a sparkline, all arms on one scale.

Leaves out the table it stands in (`terminal`).
"""

from collections.abc import Mapping

from rich.console import Console

from stability.analysis.sampling import INDEPENDENT_AXES
from stability.analysis.spread import Spread
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.terminal.sparkline import Sparks, evenly, log_scale

__all__ = ["DriftSparks", "drift_sparks"]

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
    found = [Spread({s: v[step] for s, v in drifts.items() if step in v}) for step in steps]
    return [spread.mean if spread.n else None for spread in found]
