"""Whether wrong candidates would have been seen: what the planted faults of a study have shown.

A candidate passes only where the same instruments, on the same candidate, find each planted fault
at the levels at which its table says that it must be found. A fault is found at the operator where
one of the figures of one result is surely beyond the policy's limit, over looks and layers, and in
the gradient where the ratio of errors or the share that repeats is. "Surely" is the error rate of
one look of the study, shared by the figures that are tried (Bonferroni). Where a fault is missed,
or none was planted, there is NO ASSAY: nothing was found, and it is not known that something would
have been.

The faults are planted in the first seed, by `study.assay`. That training sees harm is shown by the
arm that is broken on purpose (`verdict`). Leaves out the outcome: a fault that the loss would show
takes more training than a study has.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stability.analysis.evidence import Level, LevelEvidence
from stability.analysis.intervals import p_values
from stability.analysis.number_text import nats
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import PolicyConfig
from stability.records.assay import AssayRecord, FaultRecord, read_assay

__all__ = ["ArmAssay", "AssayState", "arm_assay", "found_at", "would_have_shown"]

AssayState = Literal["sensitive", "blind", "not measured", "not applicable"]
"""`blind`: a fault was missed. `not applicable`: the arm changes nothing a fault is planted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmAssay:
    """What planted faults say of the sight of the instruments on one arm."""

    state: AssayState
    sentence: str
    """The finding as a clause for a reader, with what was missed; without a full stop."""
    missed: Sequence[str] = ()
    """Each fault with the level at which it was missed: `dk_gain at the operator`."""
    faults: int = 0
    """How many faults were planted."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "missed": list(self.missed)
        }


def arm_assay(study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig) -> ArmAssay:
    """Return what the planted faults on record show of `arm`; it never raises."""
    if not any(path.split(".")[0] == "attention" for path in arm.diff):
        return ArmAssay(
            state="not applicable",
            sentence=f"{arm.name} changes no attention, on which faults could be planted",
        )
    try:
        record = read_assay(study.folder, arm.name)
    except ValueError as error:
        return ArmAssay(state="not measured", sentence=f"the assay can't be read: {error}")
    if record is None:
        return ArmAssay(state="not measured", sentence="no faults were planted on it")
    if not _has_parents(record, arm):
        return ArmAssay(
            state="not measured",
            sentence="faults were planted on other weights than those on record; run it again",
        )
    missed = list(_missed(record, look_alpha(policy.alpha), policy))
    count = len(record.faults)
    if missed or not count:
        lost = len({name.split()[0] for name in missed})
        were = "was" if lost == 1 else "were"
        said = f"{lost} of {count} planted faults {were} missed: {', '.join(missed)}"
        return ArmAssay(
            state="blind",
            sentence=said if missed else "no fault was planted on it",
            missed=missed,
            faults=count,
        )
    by_level = {
        level: sum(level in fault.levels for fault in record.faults)
        for level in ("operator", "gradient")
    }
    return ArmAssay(
        state="sensitive",
        sentence=(
            f"all {count} planted faults were found: {by_level['operator']} at the operator, "
            f"{by_level['gradient']} in the gradient"
        ),
        faults=count,
    )


def found_at(
    level: str, fault: FaultRecord, own: FaultRecord, alpha: float, policy: PolicyConfig
) -> bool:
    """Return whether a fault is surely beyond a limit of `policy` at `level`.

    A figure that is beyond its limit without the fault as well (`own`) shows nothing of it.
    """
    if level == "operator":
        tests = list(_operator_tests(fault, own, policy))
    else:
        tests = list(_tests(fault, policy))
    return bool(tests) and min(tests) <= alpha / len(tests)


def would_have_shown(levels: Mapping[Level, LevelEvidence]) -> str:
    """Return what the study's own intervals exclude: the harms that would have been seen.

    Each is the far end of an interval, so what the candidate may still hide; empty where no level
    has one.
    """
    said = []
    for level, figure, write in _SEEN:
        evidence = levels.get(level)
        value = evidence.figures.get(figure, math.nan) if evidence else math.nan
        if math.isfinite(value):
            said.append(write(value))
    return ", ".join(said)


_SEEN: tuple[tuple[Level, str, Callable[[float], str]], ...] = (
    ("operator", "gain_excluded", lambda value: f"a gain error of {100 * value:.2g} %"),
    ("operator", "golden_bias_ulp_excluded", lambda value: f"a bias of {value:.2g} ULP"),
    ("gradient", "ratio_high", lambda value: f"{value:.3g} times the gradient's error"),
    ("training", "excess_high", lambda value: f"E {value:.3g}"),
    ("outcome", "difference_high", lambda value: f"a loss {nats(value).lstrip('+')} nats worse"),
)
"""Level, the figure that is the far end of its interval, and how it is said."""


def _missed(record: AssayRecord, alpha: float, policy: PolicyConfig) -> Iterator[str]:
    for fault in record.faults:
        for level in fault.levels:
            if not found_at(level, fault, record.own, alpha, policy):
                where = "at the operator" if level == "operator" else "in the gradient"
                yield f"{fault.name} {where}"


def _operator_tests(fault: FaultRecord, own: FaultRecord, policy: PolicyConfig) -> Iterator[float]:
    """Yield a p-value for each figure of each result: that it stays within its limit."""
    limits = {"gain": policy.max_gain, "golden_bias_ulp": policy.max_bias_ulp}
    for result, metrics in fault.operator.items():
        control = own.operator.get(result, {})
        for metric, limit in limits.items():
            if abs(_mean(control.get(metric, ()))) <= limit:
                yield _p_beyond(metrics[metric], limit)
        most = math.log(policy.max_error_ratio)
        if _mean(_logs(control.get("error_ratio", ()))) <= most:
            yield _p_above(_logs(metrics["error_ratio"]), most)


def _logs(values: Sequence[float]) -> list[float]:
    # logs: a ratio is as far from 1 at a half as at two
    return [math.log(value) if value > 0 else -math.inf for value in values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tests(fault: FaultRecord, policy: PolicyConfig) -> Iterator[float]:
    if not fault.ratios:
        return
    yield _p_above(_logs(fault.ratios), math.log(policy.max_gradient_ratio))
    yield _p_share(fault, policy.max_share)


def _p_share(fault: FaultRecord, limit: float) -> float:
    if not fault.share_se > 0 or fault.share_looks < 3:
        return 1.0
    from scipy.stats import t  # heavy: 1.2 s of CPU

    return float(t.sf((fault.share - limit) / fault.share_se, fault.share_looks - 1))


def _p_above(values: Sequence[float], limit: float) -> float:
    return p_values(dict(enumerate(values)), limit)[0]


def _p_beyond(values: Sequence[float], limit: float) -> float:
    """Return the p-value of a mean within -limit to limit; both ends are tried."""
    above = p_values(dict(enumerate(values)), limit)[0]
    below = p_values(dict(enumerate(values)), -limit)[1]
    return min(1.0, 2 * min(above, below))


def _has_parents(record: AssayRecord, arm: RecordedArm) -> bool:
    run = arm.runs.get(record.seed)
    files = run.manifest.files if run and run.manifest else {}
    return bool(record.parents) and all(
        files.get(name) == checksum for name, checksum in record.parents.items()
    )
