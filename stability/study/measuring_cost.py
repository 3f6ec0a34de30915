"""What is measured beside the runs of a study takes: distances, planted faults, the report.

Known faults are planted on each candidate that does not fail, and looked at until each is found or
surely missed (`probe.planted_faults`), so that nobody knows beforehand how many gradients of the
model that takes: `USUAL` of them were in studies that ship, and `most_gradients` are where no fault
is ever settled. Leaves out what a gradient, or a distance, takes: that is timed (`cost_estimate`,
`command_cost`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from stability.analysis.assay import faults_due
from stability.config.schema import Role
from stability.probe.planted_faults import FEW, MOST

__all__ = [
    "REPORT_BYTES",
    "REPORT_S",
    "USUAL",
    "WIDER",
    "MeasuringCost",
    "in_mean_updates",
    "is_assayed",
    "most_gradients",
    "settled",
]

REPORT_BYTES = 5_500_000
"""The page of a small study; most of it is what draws its charts."""
REPORT_S = 3.0
"""What it takes to write it: of 18 runs 1 s, of 27 with 40 updates 3 s, on an AMD EPYC."""

USUAL = 110
"""Gradients on a candidate: 78 and 150 in the quickstart, 87 in the script of `init`, and those of
the operator's looks beside them."""

WIDER = 3
"""Updates that take about as long as an isolated gradient, which is computed in wider formats."""

_BESIDE = 3
"""Gradients of a look without a fault: the golden's, the baseline's, the candidate's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringCost:
    """Seconds by what takes them."""

    distances: float = 0.0
    planted: float = 0.0
    """Faults, as many looks as usual; 0 if the study plants none."""
    planted_most: float = 0.0
    """The same, were none ever found or surely missed."""
    report: float = REPORT_S

    @property
    def seconds(self) -> float:
        """All of it, as usual."""
        return self.distances + self.planted + self.report

    @property
    def hours(self) -> dict[str, float]:
        """The same in hours, by what takes them, in JSON values."""
        return {
            "distances": self.distances / 3600,
            "planted_faults": self.planted / 3600,
            "planted_faults_at_most": self.planted_most / 3600,
            "report": self.report / 3600,
        }


def most_gradients(updates: int, stages: Sequence[int] = (MOST,)) -> int:
    """Return the most gradients on a candidate whose run makes so many `updates`.

    In each of `stages` batches are looked at from the first one on, up to so many.
    """
    due = faults_due("")
    in_gradient = sum("gradient" in levels for levels in due.values())
    looks = sum(min(most, updates) for most in stages if most == stages[0] or updates > stages[0])
    # at the operator the candidate without a fault is looked at too
    return looks * (_BESIDE + in_gradient) + FEW * (len(due) + 1)


def is_assayed(arm: str, role: Role, named: Collection[str]) -> bool:
    """Whether faults are planted on an arm of a study that has one broken on purpose.

    `named` are the candidates of the study's policy; where it names none, the arms of that role.
    """
    return arm in named if named else role == "candidate"


def in_mean_updates(gradient: float, look: float, gradient_every: int) -> float:
    """Return how many updates of a run, with the looks that it makes, take as long as a gradient.

    `gradient` is what one takes that a fault is planted in, and `look` what one at the gradient
    takes at each `gradient_every`th update, or never if that is 0: in updates without looks.
    """
    return gradient / (1 + look / gradient_every) if gradient_every else gradient


def settled(seconds: Sequence[float]) -> float:
    """Return what something takes once it has warmed up: the median of the later half; of none 0.

    What a busy machine adds to single ones leaves a median as it is.
    """
    return median(seconds[len(seconds) // 2 :]) if seconds else 0.0
