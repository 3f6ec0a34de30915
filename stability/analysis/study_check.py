"""Every pair that a study planned, checked against its records and its snapshots.

A pair holds if both runs are there, are those that the study planned, have ended where they should,
have every file as their manifests list it, keep the pair contract, and have drifts that come from
the snapshots on disk. Some drifts are computed anew and must be those on record. Planned is what
`study.json` or the sealed protocol says; what is not on disk counts as missing. Leaves out the
contract itself (`pair_contract`) and how it is shown (`report.terminal.pairs`).
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from stability.analysis.drift_parents import (
    check_drifts,
    is_kept,
    listed_snapshot,
    parents_by_line,
)
from stability.analysis.pair_contract import prove_pair
from stability.analysis.pair_proof import PairProof
from stability.analysis.run_consistency import OWN_RECORD
from stability.analysis.study_plan import Unplanned, planned_pairs, unplanned
from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.commands import is_adopted
from stability.config.schema import BASELINE
from stability.records.events import read_log_and_events
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_names import NONFINITE_WEIGHTS, WEIGHT_HISTOGRAM, drift_name
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.remade_drifts import read_remade
from stability.records.run_files import damage, misplacement, read_run_snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DriftCheck",
    "PairCheck",
    "PairState",
    "check_drifts_of",
    "check_pairs",
]

PairState = Literal["holds", "missing", "foreign", "damaged", "no pair", "stale", "unproven"]

TOLERANCE = 1e-9
"""Relative, of a drift computed anew. Everything is summed in FP64, in an order that no number of
threads changes: on one machine the bits are equal. Another one's vector width adds 2**15 values at
a time in another order, which moves a sum by 2**15 * 2**-53 = 4e-12 of the sum of sizes at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCheck:
    """One planned pair, and the first thing that says that it can't be relied on."""

    arm: str
    seed: int
    state: PairState
    said: str
    """What was found; of a pair that holds, in which axis it differs."""
    recomputed: tuple[int, ...] = ()
    """The steps at which its drifts were computed anew."""
    sketched: tuple[int, ...] = ()
    """The steps at which a snapshot was dropped, and its drift agrees with the sketches."""
    proof: PairProof | None = None
    """Every comparison of the two runs; None if they could not be compared."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        proof = self.proof.to_dict() if self.proof else None
        lists = {"recomputed": list(self.recomputed), "sketched": list(self.sketched)}
        return {**asdict(self), **lists, "proof": proof}


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftCheck:
    """What the drifts between two runs come to."""

    state: PairState | Literal["not looked at"]
    said: str
    recomputed: tuple[int, ...] = ()
    """The steps at which they were computed anew."""
    sketched: tuple[int, ...] = ()
    """The steps at which a snapshot was dropped, and the drift agrees with the sketches."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        lists = {"recomputed": list(self.recomputed), "sketched": list(self.sketched)}
        return {**asdict(self), **lists}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """One planned pair; its baseline's damage is found once for all of its candidates."""

    study: RecordedStudy
    arm: str
    seed: int
    baseline: RecordedRun
    run: RecordedRun


class _PairError(Exception):
    """Ends the check of a pair."""

    def __init__(self, state: PairState, said: str) -> None:
        super().__init__(said)
        self.state: PairState = state


def check_pairs(study: RecordedStudy, *, every_drift: bool = False) -> list[PairCheck]:
    """Return a check of each planned pair, in the order of the study.

    Of each pair one drift, drawn at random, is computed anew; all of them with `every_drift`.
    """
    find_damage = cache(damage)  # a baseline has many candidates
    found = []
    for arm, seed in planned_pairs(study):
        runs = [one.runs.get(seed) if (one := study.arm(n)) else None for n in (BASELINE, arm)]
        if runs[0] is None or runs[1] is None:
            said = "the sealed protocol planned it, the study has it no more"
            found.append(PairCheck(arm=arm, seed=seed, state="missing", said=said))
            continue
        pair = _Pair(study=study, arm=arm, seed=seed, baseline=runs[0], run=runs[1])
        found.append(_check(pair, find_damage, every_drift=every_drift))
    return found


def _check(pair: _Pair, find_damage: Any, *, every_drift: bool) -> PairCheck:
    proof, recomputed, sketched = None, (), ()
    try:
        for run in (pair.baseline, pair.run):
            _check_run(pair, run, find_damage)
        proof = prove_pair(pair.baseline.paths, pair.run.paths, find_damage)
        # a record that contradicts itself is told of last: what is wrong with its pair tells more
        is_own = proof.breach is not None and proof.breach.field.startswith(OWN_RECORD)
        if said := pair.run.breach if proof.breach is None or is_own else proof.sentence:
            raise _PairError("no pair", said)
        strange = [found for run in (pair.baseline, pair.run) if (found := _unplanned(pair, run))]
        if contradicted := [found.said for found in strange if found.is_contradicted]:
            raise _PairError("no pair", f"no pair: {contradicted[0]}")
        recomputed = tuple(_recompute(pair.baseline, pair.run, every_drift=every_drift))
        sketched = tuple(_by_sketch(pair.baseline, pair.run))
        _check_drifts(pair.baseline, pair.run, (*recomputed, *sketched))
        if is_own:
            raise _PairError("no pair", proof.sentence)
        if unproven := _unproven(proof, strange):
            raise _PairError("unproven", unproven)
        state, said = "holds", proof.sentence
    except _PairError as trouble:
        state, said = trouble.state, str(trouble)
    except (ValueError, OSError) as error:
        state, said = "damaged", str(error)
    return PairCheck(
        arm=pair.arm,
        seed=pair.seed,
        state=state,
        said=said,
        recomputed=recomputed,
        sketched=sketched,
        proof=proof,
    )


def _unproven(proof: PairProof, strange: Sequence[Unplanned]) -> str:
    """Return what is not proven of a pair, with roles that nothing on record tells."""
    roles = ", ".join(found.said for found in strange)
    if proof.unproven:
        return f"{proof.unproven_text}, {roles}" if roles else proof.unproven_text
    return f"not on record: {roles}" if roles else ""


def _check_run(pair: _Pair, run: RecordedRun, find_damage: Any) -> None:
    """Check that a run is there, is the one that was planned, is whole and has come to its end."""
    name, paths = f"{run.paths.arm}, seed {run.seed}", run.paths
    if not paths.manifest.exists():
        trained = "adopted" if is_adopted(pair.study.base) else "trained"
        left = "has files but no manifest" if paths.root.exists() else f"has not been {trained}"
        raise _PairError("missing", f"{name} {left}")
    manifest = read_manifest(paths.manifest)
    stranger = misplacement(paths, manifest, pair.study.name)
    if stranger:
        raise _PairError("foreign", f"in the place of {name}: {stranger}")
    found = find_damage(paths)
    if found:
        raise _PairError("damaged", found[0])
    if manifest.state not in ENDED:
        said = f": {run.message}" if run.message else ""
        raise _PairError("missing", f"the end of {name}, {run.state} at step {manifest.step}{said}")
    arm = pair.study.arm(run.paths.arm)
    planned = arm.until if arm else pair.study.steps
    if manifest.state == "finished" and manifest.step != planned:
        raise _PairError(
            "missing",
            f"the end of {name}, which says that it finished at step {manifest.step} of {planned}",
        )
    _check_snapshots(pair, name, run, manifest, planned)


def _unplanned(pair: _Pair, run: RecordedRun) -> Unplanned | None:
    arm = pair.study.arm(run.paths.arm)
    return unplanned(pair.study, arm, read_manifest(run.paths.manifest)) if arm else None


def _check_snapshots(
    pair: _Pair, name: str, run: RecordedRun, manifest: Manifest, until: int
) -> None:
    # one that has diverged is stopped before it keeps its last state
    last = manifest.step - 1 if manifest.state == "diverged" else until
    steps = {0, until, *(step for step in pair.study.planned_snapshots if step <= until)}
    if is_adopted(pair.study.base) and "init_weights" not in manifest.hashes:
        steps.remove(0)  # a series may begin later: its start is unknown, which the proof says
    lost = [s for s in sorted(steps) if s <= last and not listed_snapshot(run.paths, manifest, s)]
    if lost:
        raise _PairError("missing", f"the snapshot of {name} at step {lost[0]}")


def check_drifts_of(
    baseline: RunPaths, candidate: RunPaths, *, every_drift: bool = False
) -> DriftCheck:
    """Check the drifts of `candidate` from `baseline`, two folders of whole runs that are a pair.

    They are those of the pair only where it is the candidate of that baseline, in one study's
    folder: else they were measured from another run, and nothing is said of them.
    """
    if not _is_baseline_of(baseline, candidate):
        return DriftCheck(
            state="not looked at",
            said=f"those on record of {candidate.arm}, seed {candidate.seed}, are not from "
            f"{baseline.root}",
        )
    recomputed: tuple[int, ...] = ()
    try:
        run, other = _read_drifts(baseline, candidate)
        recomputed = tuple(_recompute(other, run, every_drift=every_drift))
        sketched = tuple(_by_sketch(other, run))
        _check_drifts(other, run, (*recomputed, *sketched))
    except _PairError as trouble:
        return DriftCheck(state=trouble.state, said=str(trouble), recomputed=recomputed)
    except (ValueError, OSError) as error:
        return DriftCheck(state="damaged", said=str(error), recomputed=recomputed)
    said = "all come from the snapshots on disk" if recomputed else "none is on record yet"
    if sketched:
        here = "those of snapshots on disk come from them, and " if recomputed else ""
        steps = ", ".join(map(str, sketched))
        said = f"{here}those at step {steps}, whose snapshots were dropped, are checked by sketch"
    return DriftCheck(state="holds", said=said, recomputed=recomputed, sketched=sketched)


def _is_baseline_of(baseline: RunPaths, candidate: RunPaths) -> bool:
    place = RunPaths.for_run(candidate.root.parent.parent, BASELINE, candidate.seed)
    return baseline.root == place.root != candidate.root


def _read_drifts(baseline: RunPaths, candidate: RunPaths) -> tuple[RecordedRun, RecordedRun]:
    """Return the candidate with the drifts that may be taken, and its baseline, without its log."""
    ours, theirs = (read_manifest(paths.manifest) for paths in (candidate, baseline))
    content, _ = read_log_and_events(candidate.metrics)
    try:
        remade = read_remade(candidate.root.parent.parent, candidate.seed)
    except ValueError:  # those that it stood for are stale, and told of
        remade = []
    checked = check_drifts(
        content.metrics,
        parents_by_line(content.kept),
        (candidate, ours),
        (baseline, theirs),
        [row for row in remade if row.arm == candidate.arm],
    )
    run = RecordedRun(
        paths=candidate,
        seed=candidate.seed,
        manifest=ours,
        metrics=checked.metrics,
        stale=checked.stale,
        remade=checked.remade,
        unproven=checked.unproven,
        error="",
    )
    other = RecordedRun(paths=baseline, seed=baseline.seed, manifest=theirs, metrics={}, error="")
    return run, other


def _check_drifts(baseline: RecordedRun, run: RecordedRun, recomputed: tuple[int, ...]) -> None:
    """Check that each drift which two snapshots allow is on record, and comes from them."""
    for step, said in sorted(run.stale.items()):
        raise _PairError("stale", f"drift at step {step}: {said}")
    there = run.drift("rel_l2")
    for step in _shared_steps(baseline, run):
        # of a run that is still going, the drift may be on its way to the log
        if step not in there and run.manifest and run.manifest.state in ENDED:
            raise _PairError("missing", f"drift at step {step}, of which both have a snapshot")
    # what was computed anew, and is the same, needs no parents to be believed
    unproven = [step for step in run.unproven if step not in recomputed]
    if unproven:
        steps = ", ".join(map(str, unproven))
        raise _PairError(
            "unproven",
            f"drift at step {steps} does not say what it was computed from; --all computes it anew",
        )


def _shared_steps(baseline: RecordedRun, run: RecordedRun) -> list[int]:
    """Return the steps at which the manifests of both runs list a snapshot."""
    # a listed file that is not on disk has been told of as damage
    return [
        step
        for step in snapshot_steps(run.paths)
        if all(is_kept(of.paths, of.manifest, step) for of in (run, baseline))
    ]


def _by_sketch(baseline: RecordedRun, run: RecordedRun) -> Iterator[int]:
    """Hold `rel_l2` against the sketches where a snapshot was dropped, and give the steps.

    One that can't be theirs ends it.
    """
    from stability.analysis.sketch_check import agrees, sketched_weights  # heavy: torch

    told = run.drift("rel_l2")
    for step in sorted(told):
        ends = [(of.paths, of.manifest) for of in (run, baseline) if of.manifest]
        if all(is_kept(*of, step) for of in ends):
            continue
        found = [weights for of in ends if (weights := sketched_weights(*of, step))]
        if len(found) < 2 or found[0].sketch.outline != found[1].sketch.outline:
            raise _PairError("missing", f"the sketch at step {step} of a snapshot that was dropped")
        estimate = found[0].relative_distance(found[1])
        # a distance over a norm: two estimates
        if not agrees(told[step], estimate, errors=2):
            raise _PairError(
                "damaged",
                f"rel_l2 at step {step} is {told[step]} on record, {estimate:.4g} by the sketches",
            )
        yield step


def _recompute(baseline: RecordedRun, run: RecordedRun, *, every_drift: bool) -> Iterator[int]:
    """Compute drifts anew from the snapshots, and give the steps; one that is another ends it."""
    from stability.metrics.drift import drift, weights_of_both  # heavy: torch

    steps = [step for step in _shared_steps(baseline, run) if step in run.drift("rel_l2")]
    if not every_drift and steps:
        steps = [random.SystemRandom().choice(steps)]
    for step in steps:
        own, other = (read_run_snapshot(of.paths, step) for of in (run, baseline))
        _check_weights(run, step, own)
        if run.manifest and touches(run.manifest.diff, CHANGES_WEIGHTS):
            own, other = weights_of_both(own, other)
        found = drift(own, other)
        for parameter, values in found.items():
            for metric, value in values.items():
                name = drift_name(parameter, metric)
                told = run.series(name).get(step)
                if told is None or not _same(told, value):
                    raise _PairError(
                        "damaged",
                        f"{name} at step {step} is {told} on record, {value} from the snapshots",
                    )
        yield step


def _check_weights(run: RecordedRun, step: int, state: "Mapping[str, Tensor]") -> None:
    """Check that the log tells of the weights at a step what the snapshot holds."""
    from stability.metrics.instability import count_nonfinite  # heavy: torch
    from stability.metrics.weight_counts import weight_counts

    weights = [weight for weight in state.values() if weight.is_floating_point()]
    told = run.series(NONFINITE_WEIGHTS).get(step)
    bad = float(count_nonfinite(weights)) if weights else 0.0
    counts = run.counts.get(WEIGHT_HISTOGRAM, {}).get(step)
    if told not in (None, bad):
        said = f"{NONFINITE_WEIGHTS} at step {step} is {told} on record, {bad} from the snapshot"
        raise _PairError("damaged", said)
    if counts is not None and list(counts) != weight_counts(weights):
        said = f"{WEIGHT_HISTOGRAM} at step {step} is not that of the snapshot"
        raise _PairError("damaged", said)


def _same(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=TOLERANCE)
