"""One arm of a study as its records tell it: what changed, how each seed went, what was measured.

Every number keeps its value for each seed. The other arms are left to `ladder`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stability.analysis.arm_growth import ArmGrowth, arm_growth
from stability.analysis.drift_notes import drift_notes
from stability.analysis.ladder import Ladder, Row
from stability.analysis.ladder_sentences import sentence
from stability.analysis.locate import locate, sentences
from stability.analysis.looks import OperatorLimits
from stability.analysis.operator_places import OperatorPlace, worst_places
from stability.analysis.place_table import JUDGED
from stability.analysis.probe_answer import failures_of
from stability.analysis.probe_records import natural_order
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import (
    RecordedArm,
    RecordedRun,
    RecordedStudy,
    RunState,
    find_arm,
)
from stability.config.axes import Group, groups_of
from stability.config.schema import BASELINE
from stability.config.study import PolicyConfig
from stability.records.events import Event
from stability.records.metric_names import ALL_WEIGHTS, deviation_name, parse_deviation, parse_drift
from stability.records.metric_table import DRIFT_METRICS, LAYER_METRICS
from stability.records.sealed_json import jsonable

__all__ = ["ArmSummary", "BySteps", "SeedSummary", "groups_of_arm", "summarise_arm"]

BySteps = Mapping[int, SeedValues]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedSummary:
    """How the run of one seed went."""

    seed: int
    state: RunState
    step: int
    """The last step on record; 0 for a run that has not begun."""
    message: str
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """One arm, in the order in which one asks about it."""

    row: Row
    """Its row on the ladder."""
    sentence: str
    steps: int
    """How many the study planned."""
    diff: Mapping[str, list[Any]]
    """Dotted config path -> [baseline's value, this arm's value]."""
    groups: list[Group]
    """What its change is about."""
    seeds: tuple[SeedSummary, ...]
    notes: tuple[str, ...]
    """Which of its drifts are left out, and which prove nothing."""
    drifts: Mapping[str, BySteps]
    """Of all weights, by metric; empty for the baseline."""
    growth: ArmGrowth | None
    parameters: tuple[tuple[str, SeedValues], ...]
    """Each parameter's relative L2 at the last step with a drift, the most drifted first."""
    found: tuple[str, ...]
    """What stands out in its attention beyond the study's limits: which layer, which result, from
    which step; a sentence for each place and seed. Failures come first."""
    worst: tuple[OperatorPlace, ...]
    """Of each result its worst figure of each kind, the worst of all first; empty without a
    golden."""
    layers: Mapping[str, Mapping[str, BySteps]]
    """Deviation of each layer's output, by LAYER_METRICS; empty without a probe."""

    @property
    def last_step(self) -> int:
        """The last step with a drift on record; 0 if there is none."""
        return max((step for values in self.drifts.values() for step in values), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; a number that is none stands as text."""
        row = self.row
        return {
            "arm": row.arm,
            "axis": row.axis,
            "groups": self.groups,
            "change": row.change,
            "state": row.state,
            "sentence": self.sentence,
            "diff": dict(self.diff),
            "seeds": [asdict(seed) for seed in self.seeds],
            "notes": list(self.notes),
            "final_loss": row.final_loss.to_dict(),
            "rel_l2": row.rel_l2.to_dict(),
            "ratio": row.ratio.to_dict(),
            "drift": {metric: _by_step(values) for metric, values in self.drifts.items()},
            "growth": _growth(self.growth) if self.growth else None,
            "parameters": {name: spread.to_dict() for name, spread in self.parameters},
            "found": list(self.found),
            "worst": [_place(one) for one in self.worst],
            "deviation/out": {
                layer: {metric: _by_step(values) for metric, values in found.items()}
                for layer, found in self.layers.items()
            },
        }


def _growth(growth: ArmGrowth) -> dict[str, Any]:
    return jsonable({**asdict(growth), "doubling_time": growth.dynamics.doubling_time})


def _place(one: OperatorPlace) -> dict[str, Any]:
    return jsonable(
        {
            "result": one.what,
            "figure": JUDGED[one.kind],
            "place": one.where,
            "mean": one.mean,
            "limit": one.limit,
            "of_limit": one.of_limit,
            "largest": one.wildest,
            "largest_at": one.wildest_at,
        }
    )


def summarise_arm(study: RecordedStudy, ladder: Ladder, name: str) -> ArmSummary:
    """Return what is on record about the arm `name`. ValueError as `find_arm`."""
    arm = find_arm(study, name)
    row = ladder.row(name)
    assert row is not None, "a ladder has a row for each arm"
    drifts = _drifts(arm)
    last = max((step for values in drifts.values() for step in values), default=0)
    return ArmSummary(
        row=row,
        sentence=sentence(ladder, name),
        steps=arm.until,
        diff=arm.diff,
        groups=groups_of_arm(study, arm),
        seeds=tuple(_seed(run) for run in arm.runs.values()),
        notes=drift_notes(study, [arm]),
        drifts=drifts,
        growth=arm_growth(study, arm) if name != BASELINE else None,
        parameters=_parameters(arm, last),
        found=_found(arm, study.policy),
        worst=worst_places(arm, study.policy),
        layers=_layers(arm),
    )


def groups_of_arm(study: RecordedStudy, arm: RecordedArm) -> list[Group]:
    """Return what an arm's change is about, another number of processes included."""
    baseline = study.arm(BASELINE)
    theirs = baseline.runs if baseline else {}
    is_other = any(
        run.manifest and other.manifest and run.manifest.ranks != other.manifest.ranks
        for seed, run in arm.runs.items()
        if (other := theirs.get(seed))
    )
    return groups_of(arm.diff, is_other_layout=is_other)


def _seed(run: RecordedRun) -> SeedSummary:
    reached = [run.manifest.step if run.manifest else 0, *run.loss()]
    return SeedSummary(
        seed=run.seed,
        state=run.state,
        step=max(reached),
        message=run.message,
        events=run.events,
    )


def _names(arm: RecordedArm) -> list[str]:
    """Return the metrics that some run of `arm` has on record, in the order of the logs."""
    return list(dict.fromkeys(name for run in arm.runs.values() for name in run.metrics))


def _drifts(arm: RecordedArm) -> Mapping[str, BySteps]:
    found = [parts for name in _names(arm) if (parts := parse_drift(name))]
    recorded = [parts.metric for parts in found if parts.parameter == ALL_WEIGHTS]
    return {
        metric.shown_as: _values_by_step(
            {
                seed: {step: metric.shown(value) for step, value in run.drift(metric.name).items()}
                for seed, run in arm.runs.items()
            }
        )
        for metric in DRIFT_METRICS.values()
        if metric.name in recorded
    }


def _parameters(arm: RecordedArm, step: int) -> tuple[tuple[str, SeedValues], ...]:
    found: dict[str, SeedValues] = {}
    for name in _names(arm):
        parts = parse_drift(name)
        if not parts or parts.metric != "rel_l2" or parts.parameter == ALL_WEIGHTS:
            continue
        values = {seed: run.series(name) for seed, run in arm.runs.items()}
        at_step = {seed: series[step] for seed, series in values.items() if step in series}
        if at_step:
            found[parts.parameter] = SeedValues(at_step)
    # NaN first: a parameter that is no longer a number is what a reader looks for
    return tuple(
        sorted(found.items(), key=lambda item: (item[1].mean == item[1].mean, -item[1].mean))
    )


def _found(arm: RecordedArm, policy: PolicyConfig) -> tuple[str, ...]:
    limits = OperatorLimits.of(policy)
    return tuple(
        f"seed {seed}: {said}"
        for seed, run in arm.runs.items()
        for said in (
            *failures_of(run.metrics, (), (), ()),
            *sentences(locate(run.metrics, limits)),
        )
    )


def _layers(arm: RecordedArm) -> Mapping[str, Mapping[str, BySteps]]:
    probed = {
        (parts.layer, parts.shadow)
        for name in _names(arm)
        if (parts := parse_deviation(name)) and parts.what == "out" and not parts.part
    }
    first = min((shadow for _, shadow in probed), default="")  # the report, too, shows one shadow
    layers = sorted((layer for layer, shadow in probed if shadow == first), key=natural_order)
    return {
        layer: {
            metric: _values_by_step(
                {
                    seed: run.series(deviation_name(layer, "out", metric, shadow=first))
                    for seed, run in arm.runs.items()
                }
            )
            for metric in LAYER_METRICS
        }
        for layer in layers
    }


def _values_by_step(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, SeedValues]:
    """Return the seeds' values at each step that some seed has."""
    steps: Iterable[int] = {step for values in by_seed.values() for step in values}
    return {
        step: SeedValues({seed: values[step] for seed, values in by_seed.items() if step in values})
        for step in sorted(steps)
    }


def _by_step(values: BySteps) -> dict[str, Any]:
    return {str(step): at_step.to_dict() for step, at_step in values.items()}
