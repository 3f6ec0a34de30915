"""How fast each arm leaves the baseline: growth rate, doubling time and slope, over the seeds.

A tiny change grows exponentially and then saturates (`growth_fit` finds the early phase of one
run). The rate belongs to the training's dynamics rather than to the arm. Its uncertainty is taken
from the seeds, because neighbouring drifts of one run are correlated and a fit's own error bar is
too small. The nudge arm shows how fast chaos alone grows. From the step where an arm's drift can't
be told from the nudge's, that drift no longer tells anything about the change.
"""

import math
from dataclasses import dataclass

from stability.analysis.growth_fit import Growth, drift_slope, fit_growth
from stability.analysis.intervals import Interval, mean_interval, paired_interval
from stability.analysis.study_records import RecordedArm, RecordedStudy

__all__ = ["ArmGrowth", "arm_growth", "smallest_nudge", "study_growth"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmGrowth:
    """One arm's growth law over its seeds, of the relative L2 drift."""

    arm: str
    rate: Interval
    """Natural log per step, in the early phase; the mean is NaN where no seed has one."""
    phase: tuple[int, int]
    """First and last step of the early phase, over all seeds; (0, 0) without one."""
    slope: Interval
    """Robust slope of the drift per step, over the whole run."""
    lost_in_chaos: int | None
    """The step from which the drift can't be told from the nudge's; None: never, or no nudge."""

    @property
    def doubling_time(self) -> float:
        """Steps in which the drift doubles, of the mean rate; infinite if it does not grow."""
        return math.log(2) / self.rate.mean if self.rate.mean > 0 else math.inf


def study_growth(study: RecordedStudy, level: float = 0.9) -> list[ArmGrowth]:
    """Return the growth law of each candidate, in the study's order."""
    return [arm_growth(study, arm, level) for arm in study.candidates]


def arm_growth(study: RecordedStudy, arm: RecordedArm, level: float = 0.9) -> ArmGrowth:
    """Return the growth law of `arm`; runs without drifts, and exact zeros, are left out."""
    drifts = {seed: run.drift("rel_l2") for seed, run in arm.runs.items()}
    fits: dict[int, Growth] = {}
    for seed, values in drifts.items():
        fit = fit_growth(list(values), list(values.values()))
        if fit is not None:
            fits[seed] = fit
    slopes = {
        seed: drift_slope(list(values), list(values.values()))
        for seed, values in drifts.items()
        if len(values) > 1
    }
    ends = [step for fit in fits.values() for step in (fit.first_step, fit.last_step)]
    return ArmGrowth(
        arm=arm.name,
        rate=mean_interval({seed: fit.rate for seed, fit in fits.items()}, level),
        phase=(min(ends), max(ends)) if ends else (0, 0),
        slope=mean_interval(slopes, level),
        lost_in_chaos=_lost_in_chaos(study, arm, level),
    )


def smallest_nudge(study: RecordedStudy) -> RecordedArm | None:
    """Return the arm that nudges the initial weights least, if there is one."""
    nudges = [arm for arm in study.candidates if arm.axis == "nudge"]
    return min(nudges, key=lambda arm: arm.diff["nudge.ulps"][1], default=None)


def _lost_in_chaos(study: RecordedStudy, arm: RecordedArm, level: float) -> int | None:
    """Return the first step from which on the arm can't be told from chaos at any later step.

    There the interval of its drift over the nudge's, seed by seed, does not lie above 1.
    """
    nudge = smallest_nudge(study)
    if nudge is None or arm.axis == "nudge":
        return None
    lost = None
    # backwards from the end: a drift that overtakes the nudge again was not lost for good
    # past its end the nudge says nothing of chaos
    for step in reversed([step for step in study.drift_steps if 0 < step <= nudge.until]):
        ratios = {}
        for seed, run in arm.runs.items():
            other = nudge.runs[seed].drift("rel_l2").get(step)
            mine = run.drift("rel_l2").get(step)
            # a nudge at exactly 0 has not parted from the baseline yet: there is no ratio to it
            if other and mine is not None and math.isfinite(mine / other):
                ratios[seed] = mine / other
        surely = paired_interval(ratios, level).low if ratios else math.inf
        if surely > 1:
            return lost
        if math.isnan(surely):
            return None  # too few seeds to tell
        lost = step
    return lost
