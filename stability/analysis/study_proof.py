"""All that `stability verify` proves of a study: its pairs, plan, environments and assays."""

from dataclasses import dataclass
from typing import Any

from stability.analysis.assay import assay_troubles
from stability.analysis.distance_check import other_distances
from stability.analysis.protocol_check import seeds_apart
from stability.analysis.study_check import PairCheck, check_pairs
from stability.analysis.study_plan import left_out_runs, plan_note, plan_troubles
from stability.analysis.study_records import RecordedStudy

__all__ = ["StudyProof", "prove_study"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyProof:
    """What holds of a study's records and what does not."""

    checks: tuple[PairCheck, ...]
    """One of each planned pair."""
    troubles: tuple[str, ...]
    """What is wrong with the plan, or with a distance."""
    seeds_apart: tuple[str, ...]
    """Arms whose seeds were trained in several environments."""
    assays: tuple[str, ...]
    """What is wrong with planted faults."""
    left_out: tuple[str, ...]
    """Runs that are no part of the plan."""
    note: str
    """What else there is to say of the plan."""

    @property
    def holding(self) -> int:
        """How many pairs hold."""
        return sum(check.state == "holds" for check in self.checks)

    @property
    def is_refuted(self) -> bool:
        """Whether anything that was to be proven is not."""
        wrong = self.troubles or self.seeds_apart or self.assays
        return self.holding < len(self.checks) or bool(wrong)

    @property
    def sentence(self) -> str:
        """The pairs in a clause, and what else is wrong."""
        wrong = (*self.troubles, *self.seeds_apart, *self.assays)
        return "; ".join([f"{self.holding} of {len(self.checks)} planned pairs hold", *wrong])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "planned": len(self.checks),
            "hold": self.holding,
            "plan_trouble": "; ".join(self.troubles),
            "plan_note": self.note,
            "left_out": list(self.left_out),
            "seeds_apart": list(self.seeds_apart),
            "assays": list(self.assays),
            "pairs": [check.to_dict() for check in self.checks],
        }


def prove_study(study: RecordedStudy, *, every_drift: bool) -> StudyProof:
    """Check everything that the records of `study` claim; without `every_drift` some drifts."""
    checks = check_pairs(study, every_drift=every_drift)
    troubles = [*plan_troubles(study), *other_distances(study, every=every_drift)]
    return StudyProof(
        checks=tuple(checks),
        troubles=tuple(troubles),
        seeds_apart=tuple(seeds_apart(study)),
        assays=tuple(assay_troubles(study)),
        left_out=tuple(left_out_runs(study)),
        note=plan_note(study) or "",
    )
