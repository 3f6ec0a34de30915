"""How fast a study's training drives tiny differences apart, and how far each arm is ahead of that.

The rate of growth belongs to the dynamics, not to an arm: it is taken from the nudges, which change
nothing but the last bit of the initial weights. It is stated only if their drift grows
exponentially: on the points of the early phase (`growth_fit`) an exponential must fit better than a
power law of the step with as many parameters, surely so over the seeds. Its uncertainty is taken
from the seeds too, because neighbouring drifts of one run are correlated.

While differences grow at one rate, an arm that starts with a larger one stays ahead by a constant
factor: its offset. From the step where its drift can't be told from the nudge's, that drift no
longer tells anything about the change.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stability.analysis.growth_fit import Growth, drift_slope, fit_growth
from stability.analysis.intervals import Interval, mean_interval, paired_interval
from stability.analysis.study_records import RecordedArm, RecordedStudy

__all__ = [
    "ArmGrowth",
    "Dynamics",
    "arm_growth",
    "smallest_nudge",
    "study_dynamics",
    "study_growth",
]

FEWEST_SEEDS = 3
"""Fewer can't say which of two laws fits better: a single run's errors are correlated."""
LEVEL = 0.95
"""One-sided, of the test that the exponential fits better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dynamics:
    """The growth of tiny differences in a study's training, from its nudges."""

    rate: Interval
    """Natural log per step; NaN where none may be stated."""
    phase: tuple[int, int]
    """First and last step of the early phase, over all nudges and seeds; (0, 0) without one."""
    seeds: int
    """Seeds with a nudge whose drift has an early phase."""
    reason: str
    """Why no rate may be stated; empty where one is."""

    @property
    def is_exponential(self) -> bool:
        """Whether a rate may be stated."""
        return not self.reason

    @property
    def doubling_time(self) -> float:
        """Steps in which a difference doubles; NaN where no rate may be stated."""
        return math.log(2) / self.rate.mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmGrowth:
    """One arm's drift beside the dynamics, over its seeds; of the relative L2 drift."""

    arm: str
    dynamics: Dynamics
    """The study's, the same for each of its arms."""
    offset: Interval
    """Its drift over the nudges' in the early phase; NaN without one, and for a nudge."""
    slope: Interval
    """Robust slope of the drift per step, over the whole run."""
    lost_in_chaos: int | None
    """The step from which the drift can't be told from the nudge's; None: never, or no nudge."""


def study_growth(study: RecordedStudy, level: float = 0.9) -> list[ArmGrowth]:
    """Return the growth of each arm but the baseline, in the study's order."""
    dynamics = study_dynamics(study, level)
    return [_arm_growth(study, arm, dynamics, level) for arm in study.candidates]


def arm_growth(study: RecordedStudy, arm: RecordedArm, level: float = 0.9) -> ArmGrowth:
    """Return the growth of `arm`; runs without drifts, and exact zeros, are left out."""
    return _arm_growth(study, arm, study_dynamics(study, level), level)


def study_dynamics(study: RecordedStudy, level: float = 0.9) -> Dynamics:
    """Return the rate at which the nudges leave the baseline, if they do so exponentially."""
    fits: dict[int, list[Growth]] = {}
    nudges = _nudges(study)
    for nudge in nudges:
        for seed, run in nudge.runs.items():
            values = run.drift("rel_l2")
            fit = fit_growth(list(values), list(values.values()))
            if fit is not None:
                fits.setdefault(seed, []).append(fit)
    reason = _why_no_rate(fits) if nudges else "there is no nudge"
    # the nudges of one seed share its batches: their mean is one observation
    rates = {seed: _mean(fit.rate for fit in found) for seed, found in fits.items()}
    ends = [
        step for found in fits.values() for fit in found for step in (fit.first_step, fit.last_step)
    ]
    return Dynamics(
        rate=mean_interval({} if reason else rates, level),
        phase=(0, 0) if reason else (min(ends), max(ends)),
        seeds=len(fits),
        reason=reason,
    )


def smallest_nudge(study: RecordedStudy) -> RecordedArm | None:
    """Return the arm that nudges the initial weights least, if there is one."""
    return min(_nudges(study), key=lambda arm: arm.diff["nudge.ulps"][1], default=None)


def _nudges(study: RecordedStudy) -> list[RecordedArm]:
    return [arm for arm in study.candidates if arm.axis == "nudge"]


def _why_no_rate(fits: Mapping[int, list[Growth]]) -> str:
    """Return why the nudges have no exponential rate that could be stated; empty if they have."""
    if len(fits) < FEWEST_SEEDS:
        return f"{len(fits)} of the {FEWEST_SEEDS} seeds that it takes have a growing nudge"
    better = [_mean(fit.exponential_over_power for fit in found) for found in fits.values()]
    if not _surely_positive(better):
        return "a power law of the step fits the nudges as well as an exponential"
    if _mean(fit.rate for found in fits.values() for fit in found) <= 0:
        return "the nudges do not grow"
    return ""


def _surely_positive(values: list[float]) -> bool:
    """Whether the mean of the law that `values` come from is above 0, by Student's t."""
    from scipy.stats import t  # heavy: 1.2 s of CPU

    count, mean = len(values), _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean > float(t.ppf(LEVEL, count - 1)) * math.sqrt(variance / count)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _arm_growth(
    study: RecordedStudy, arm: RecordedArm, dynamics: Dynamics, level: float
) -> ArmGrowth:
    drifts = {seed: run.drift("rel_l2") for seed, run in arm.runs.items()}
    slopes = {
        seed: drift_slope(list(values), list(values.values()))
        for seed, values in drifts.items()
        if len(values) > 1
    }
    return ArmGrowth(
        arm=arm.name,
        dynamics=dynamics,
        offset=paired_interval(_offsets(study, arm, dynamics), level),
        slope=mean_interval(slopes, level),
        lost_in_chaos=_lost_in_chaos(study, arm, level),
    )


def _offsets(study: RecordedStudy, arm: RecordedArm, dynamics: Dynamics) -> dict[int, float]:
    """Return by seed the geometric mean of the arm's drift over the nudges' in the phase."""
    nudges = _nudges(study)
    if not dynamics.is_exponential or arm in nudges:
        return {}
    first, last = dynamics.phase
    found = {}
    for seed, run in arm.runs.items():
        logs = [
            math.log(mine / other)
            for nudge in nudges
            if seed in nudge.runs
            for step, other in nudge.runs[seed].drift("rel_l2").items()
            if first <= step <= last
            # neither one that has not parted yet nor one that is lost has a log
            and other
            and 0 < (mine := run.drift("rel_l2").get(step, 0.0)) / other < math.inf
        ]
        if logs:
            found[seed] = math.exp(_mean(logs))
    return found


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
