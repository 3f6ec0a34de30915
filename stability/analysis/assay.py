"""Whether wrong candidates would have been seen: what the planted faults of a study have shown.

A candidate passes only where the same instruments, on the same candidate, find each planted fault
at the levels at which its table says that it must be found. A fault is found at the operator where
one of the figures of one result is surely beyond the policy's limit, over looks and layers, and in
the gradient where the ratio of errors or the share that repeats is, or where it is no number at
all. A figure that is beyond its limit without the fault as well shows nothing of it. "Surely" is
the error rate of one look of the study, shared by the figures that are tried and, in the gradient,
by the stages at which they are (Bonferroni). The test of a share assumes what `metrics.coherence`
does; where errors share nothing a limit of 0.01 is surely exceeded, by simulation with 3 to 100
directions and 4,000 draws each, in at most 0.10 % at 3 looks, 0.18 % at 6 and 0.05 % at 12 and 24,
at a nominal 0.117 %. Where a fault is missed, or none was planted, there is NO ASSAY: nothing was
found, and it is not known that something would have been.

The faults are planted in the first seed, by `study.assay`. That training sees harm is shown by the
arm that is broken on purpose (`verdict`), which has to carry the fault that the table asks training
to see: an arm that is broken otherwise, however grossly, shows nothing of a small error of an
attention. Leaves out the outcome: a fault that the loss would show takes more training than a study
has.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attention_kernels.testing.fault_names import FAULT_LEVELS
from stability.analysis.evidence import Level, LevelEvidence
from stability.analysis.intervals import FEWEST, mean_interval, p_values
from stability.analysis.number_text import nats
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.axes import axes_of, touches
from stability.config.commands import GRADIENT_NEEDS, is_command
from stability.config.convert import to_dict
from stability.config.study import PolicyConfig
from stability.records.assay import (
    LISTED,
    STAGES,
    AssayRecord,
    FaultRecord,
    is_listed,
    read_assay,
)

__all__ = [
    "ArmAssay",
    "AssayState",
    "arm_assay",
    "assay_troubles",
    "faults_due",
    "found_at",
    "is_settled",
    "stale_part",
    "why_training_is_unshown",
    "why_unplanted",
    "would_have_shown",
]

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
    if not touches(arm.diff, ("attention",)):
        return ArmAssay(
            state="not applicable",
            sentence="the arm names no attention on which faults could be planted",
        )
    try:
        record = read_assay(study.folder, arm.name)
    except ValueError as error:
        return ArmAssay(state="not measured", sentence=f"the assay can't be read: {error}")
    precision = _precision(study, arm)
    trouble = why_training_is_unshown(study)
    if record is None:
        trouble = trouble or _not_planted(study, arm)
    else:
        trouble = trouble or _not_its_own(study, record, arm) or stale_part(record, precision)
    if record is None or trouble:
        return ArmAssay(state="not measured", sentence=trouble)
    return _judged(record, faults_due(precision), policy)


def assay_troubles(study: RecordedStudy) -> list[str]:
    """Return a sentence for each assay on record that is not the one that was made of its run."""
    found = []
    for arm in study.arms:
        listed = [
            run
            for run in arm.runs.values()
            if run.manifest is not None and LISTED in run.manifest.hashes
        ]
        try:
            record = read_assay(study.folder, arm.name)
        except ValueError as error:
            found.append(str(error))
            continue
        if record is None and listed:
            found.append(f"{arm.name}: its run lists an assay, which is missing")
        elif record is not None and (said := _not_its_own(study, record, arm)):
            found.append(f"{arm.name}: {said}")
    return found


def why_unplanted(config: Mapping[str, Any]) -> str:
    """Return why faults are never planted on a run of `config`, as a clause; mostly empty.

    On a command's attention they are where the study's own evidence looks at both levels.
    """
    if not is_command(config) or config.get("probe", {}).get("gradient_every"):
        return ""
    return (
        "no faults were planted on it: nothing looks at the whole model's gradient there; give it "
        f"a probe with gradient_every, for which {GRADIENT_NEEDS}"
    )


def _not_planted(study: RecordedStudy, arm: RecordedArm) -> str:
    first = arm.runs.get(next(iter(study.seeds), 0))
    config = to_dict(first.manifest.config) if first and first.manifest else {}
    again = "; record it again" if is_command(config) else ""
    return why_unplanted(config) or f"no faults were planted on it{again}"


def _judged(
    record: AssayRecord, due: Mapping[str, Sequence[str]], policy: PolicyConfig
) -> ArmAssay:
    missed = list(_missed(record, due, look_alpha(policy.alpha), policy))
    if missed:
        lost = len({name.split()[0] for name in missed})
        were = "was" if lost == 1 else "were"
        said = f"{lost} of {len(due)} planted faults {were} missed: {', '.join(missed)}"
        shown = [
            _shown_in_gradient(x, policy) for x in record.faults if _gradient(x.name) in missed
        ]
        return ArmAssay(
            state="blind",
            sentence="; ".join([said, *(each for each in shown if each)]),
            missed=missed,
            faults=len(due),
        )
    counts = {level: sum(level in levels for levels in due.values()) for level in _WHERE}
    where = [f"{count} {_WHERE[level]}" for level, count in counts.items() if count]
    return ArmAssay(
        state="sensitive",
        sentence=f"all {len(due)} planted faults were found: {', '.join(where)}",
        faults=len(due),
    )


def faults_due(precision: str) -> dict[str, tuple[str, ...]]:
    """Return the faults that must be planted on a candidate of `precision`, with their levels.

    Training is asked of the arm that is broken on purpose. At 64-true there is no gradient that is
    finer than the candidate's, and an out that is not rounded has no bias of its rounding.
    """
    is_exact = precision == "64-true"
    levels = ("operator",) if is_exact else ("operator", "gradient")
    return {
        name: tuple(level for level in asked if level in levels)
        for name, asked in FAULT_LEVELS.items()
        if not (is_exact and name == "bias_tenth_ulp")
    }


def stale_part(record: AssayRecord, precision: str) -> str:
    """Return which fault of today's table the record lacks, as a clause; empty if it has all.

    A record of faults that could not be planted, or not as often as they have to be, says why.
    """
    if record.own.error:
        return f"no faults could be planted on it: {record.own.error}"
    due = faults_due(precision)
    if record.stages != STAGES and any("gradient" in asked for asked in due.values()):
        return "faults were planted on it by another version, on other batches; run it again"
    if failed := [fault for fault in record.faults if fault.error]:
        names = ", ".join(fault.name for fault in failed)
        return f"{names} could not be looked at again: {failed[0].error}"
    levels = {fault.name: fault.levels for fault in record.faults}
    lacking = [
        name
        for name, asked in due.items()
        if not set(asked) <= set(levels.get(name, ())) or name not in levels
    ]
    if not lacking:
        return ""
    return f"not every fault was planted on it: {', '.join(lacking)} is lacking; run it again"


def found_at(
    level: str, fault: FaultRecord, own: FaultRecord, alpha: float, policy: PolicyConfig
) -> bool:
    """Return whether a fault is surely beyond a limit of `policy` at `level`.

    A figure that is beyond its limit without the fault as well shows nothing of it; at the operator
    that is in `own`.
    """
    if level == "operator":
        tests = list(_operator_tests(fault, own, policy))
        return bool(tests) and min(tests) <= alpha / len(tests)
    return any(beyond <= alpha / _TRIES for beyond, _ in _gradient_tests(fault, policy))


def is_settled(policy: PolicyConfig, fault: FaultRecord) -> bool:
    """Return whether more looks at the gradient can be spared: a fault is found, or surely missed.

    So is one of which no figure shows anything, because of the candidate's own, after half of the
    stages: noise alone makes that in few looks.
    """
    alpha = look_alpha(policy.alpha) / _TRIES
    tests = _gradient_tests(fault, policy)
    if any(beyond <= alpha for beyond, _ in tests) or all(within <= alpha for _, within in tests):
        return True
    many = fault.share_looks >= STAGES[len(STAGES) // 2]
    return many and all(_hidden(fault, policy))


def would_have_shown(levels: Mapping[Level, LevelEvidence]) -> str:
    """Return what the study's own intervals exclude, as the end of a sentence.

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


def _times(ratio: float) -> str:
    """Return a ratio of errors before "the baseline's"; one below 1 is a share of it."""
    return f"{100 * ratio:.3g} % of" if ratio < 1 else f"{ratio:.3g} times"


def _loss_beyond(difference: float) -> str:
    """Return the least loss, as a difference from the baseline's in nats, that is excluded."""
    if difference < 0:
        return f"any worse loss, and one not at least {nats(-difference).lstrip('+')} nats better"
    return f"a loss {nats(difference).lstrip('+')} nats worse"


_SEEN: tuple[tuple[Level, str, Callable[[float], str]], ...] = (
    ("operator", "gain_excluded", lambda value: f"a gain error of {100 * value:.2g} % in a layer"),
    ("operator", "head_gain_excluded", lambda value: f"one of {100 * value:.2g} % in a head"),
    ("operator", "golden_bias_ulp_excluded", lambda value: f"a mean bias of {value:.2g} ULP"),
    (
        "gradient",
        "ratio_high",
        lambda value: f"a gradient error above {_times(value)} the baseline's",
    ),
    ("training", "excess_high", lambda value: f"E {value:.2f}" if value else "any E above 0"),
    ("outcome", "difference_high", _loss_beyond),
)
"""Level, the figure that is the far end of its interval, and how it is said; a head's only where
heads were judged."""


_WHERE = {"operator": "at the operator", "gradient": "in the gradient"}


def _missed(
    record: AssayRecord, due: Mapping[str, Sequence[str]], alpha: float, policy: PolicyConfig
) -> Iterator[str]:
    for fault in record.faults:
        for level in due.get(fault.name, ()):
            if not found_at(level, fault, record.own, alpha, policy):
                yield f"{fault.name} {_WHERE[level]}"


def _gradient(fault: str) -> str:
    return f"{fault} {_WHERE['gradient']}"


def _shown_in_gradient(fault: FaultRecord, policy: PolicyConfig) -> str:
    """Return what a fault has shown that was missed there, and which limit would have found it.

    Seeds add nothing, since it is planted in the first alone. Empty where nothing was measured.
    """
    logs = _logs(fault.ratios)
    if len(logs) < FEWEST or not all(map(math.isfinite, logs)):
        return ""
    # one of the figures and stages that are tried, as in `found_at`
    low = mean_interval(dict(enumerate(logs)), 1 - 2 * look_alpha(policy.alpha) / _TRIES).low
    said = (
        f"the error of {fault.name} there is {_times(math.exp(_mean(logs)))} the baseline's (limit "
        f"{policy.max_gradient_ratio:g}), and a share of {fault.share:.2g} repeats (limit "
        f"{policy.max_share:g}), which more seeds do not change"
    )
    # rounded down: at the bound itself it is not surely beyond
    limit = math.floor(10 * math.exp(low)) / 10
    if any(_hidden(fault, policy)):
        return f"{said}, and the candidate without it is beyond a limit there itself"
    if not 1 < limit < policy.max_gradient_ratio:
        return said
    if _hidden(fault, replace(policy, max_gradient_ratio=limit))[0]:
        return said  # the candidate would not hold there
    return f"{said}: a study with max_gradient_ratio {limit:.1f} in its policy would find it"


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
    return [-math.inf if value == 0 else math.log(value) for value in values]


def _mean(values: Sequence[float]) -> float:
    # of nothing it is no number, which is within no limit
    return sum(values) / len(values) if values else math.nan


_TRIES = 2 * len(STAGES)
"""How often a fault is tried in the gradient: two figures at each stage."""

_UNKNOWN = (1.0, 1.0)


def _gradient_tests(fault: FaultRecord, policy: PolicyConfig) -> tuple[tuple[float, float], ...]:
    """Return p-values for the ratio and the share: that each is within its limit, and beyond it.

    (1, 1) of a figure that tells nothing.
    """
    ratio_hidden, share_hidden = _hidden(fault, policy)
    most = math.log(policy.max_gradient_ratio)
    return (
        _UNKNOWN if ratio_hidden or not fault.ratios else _p_ratio(fault.ratios, most),
        _UNKNOWN if share_hidden else _p_share(fault, policy.max_share),
    )


def _hidden(fault: FaultRecord, policy: PolicyConfig) -> tuple[bool, bool]:
    """Return whether the candidate itself is beyond the limit of the ratio, and of the share.

    It is by twice its standard error, or where it is no number.
    """
    ratio = not fault.own_ratios or _is_beyond(
        _logs(fault.own_ratios), math.log(policy.max_gradient_ratio)
    )
    return ratio, not fault.own_share - 2 * fault.own_share_se <= policy.max_share


def _is_beyond(logs: Sequence[float], limit: float) -> bool:
    if not all(value < math.inf for value in logs):
        return True
    if -math.inf in logs:  # an exact candidate
        return False
    mean, n = _mean(logs), len(logs)
    square = sum((value - mean) ** 2 for value in logs) / max(1, n - 1)
    return mean - 2 * math.sqrt(square / n) > limit


def _p_ratio(ratios: Sequence[float], limit: float) -> tuple[float, float]:
    # without the fault they are finite: no gradient that is not can be within a limit
    if not all(map(math.isfinite, ratios)):
        return 0.0, 1.0
    return p_values(dict(enumerate(_logs(ratios))), limit)


def _p_share(fault: FaultRecord, limit: float) -> tuple[float, float]:
    if not fault.share_se > 0 or fault.share_looks < FEWEST:
        return _UNKNOWN
    from scipy.stats import t  # heavy: 1.2 s of CPU

    statistic, freedom = (fault.share - limit) / fault.share_se, fault.share_looks - 1
    return float(t.sf(statistic, freedom)), float(t.cdf(statistic, freedom))


def _p_above(values: Sequence[float], limit: float) -> float:
    return p_values(dict(enumerate(values)), limit)[0]


def _p_beyond(values: Sequence[float], limit: float) -> float:
    """Return the p-value of a mean within -limit to limit; both ends are tried."""
    above = p_values(dict(enumerate(values)), limit)[0]
    below = p_values(dict(enumerate(values)), -limit)[1]
    return min(1.0, 2 * min(above, below))


def _precision(study: RecordedStudy, arm: RecordedArm) -> str:
    changed = arm.diff.get("precision")
    return str(changed[-1] if changed else study.base.get("precision", ""))


def _not_its_own(study: RecordedStudy, record: AssayRecord, arm: RecordedArm) -> str:
    """Return why a record is not one of this arm's weights; empty if it is."""
    if record.arm != arm.name:
        return f"faults were planted on {record.arm}, not on it; run it again"
    run = arm.runs.get(record.seed)
    files = run.manifest.all_files if run and run.manifest else {}
    if not record.parents or any(files.get(name) != sha for name, sha in record.parents.items()):
        return "faults were planted on other weights than those on record; run it again"
    if run and run.manifest and not is_listed(study.folder, arm.name, run.manifest.hashes):
        return "its assay is another file than the one that its run lists; run it again"
    if run and run.manifest and not record.is_of(run.manifest.resolved, run.manifest.environment):
        return "faults were planted on another source of its attention than it was trained with"
    return ""


def why_training_is_unshown(study: RecordedStudy) -> str:
    """Return that no arm carries the fault that training must see; empty if one does.

    Where no arm is broken on purpose at all, the verdict says so itself.
    """
    broken = [arm for arm in study.arms if arm.role == "broken"]
    if not broken or any(map(_shows_training, broken)):
        return ""
    return (
        f"{broken[0].name} is broken by something else than {_TRAINED} alone on an attention, so "
        "nothing shows that training sees an attention's error of 1 %"
    )


def _shows_training(arm: RecordedArm) -> bool:
    fault = arm.diff.get("attention.fault", ("", ""))[-1]
    # of another change at once it would not be known which of them was seen
    return fault == _TRAINED and axes_of(arm.diff) == ["attention"]


_TRAINED = next(name for name, levels in FAULT_LEVELS.items() if "training" in levels)
