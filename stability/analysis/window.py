"""The step at which candidates are judged: early enough that chaos has not caught up.

Tiny differences grow until every change of the numerics has drifted alike; from then on E is 1 give
or take, whatever the candidate does. The rule sees the controls only, 1-ULP nudges of the baseline
and reruns where they differ from it, and never a candidate, so that no step is picked for its
result: it takes the last snapshot before the first one at which any control of any seed has
|log E| above the policy's limit.

A restless snapshot of the first ten updates is passed over and does not end the window: there Adam
moves each weight by the sign of its gradient, so that the few weights whose gradient is rounding
alone decide what E is. In a GPT of 2 layers and width 64 the largest |log E| of nine nudges was
0.065 at step 1, 0.043 at step 5 and 0.024 at step 10, and rose again from step 20 on. The rule does
not look at how far a nudge has moved: by the same signs a nudge is half of the baseline's distance
to the reference after a single update, while its E is 1 within 0.003 in a model of 5 layers.

What the rule picked at the first look is frozen in `window.json` and read by all later ones. A step
named in the policy, sealed before the first run, takes the rule's place. Leaves out the file
(`records.window`) and when it is written (`study.window`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stability.analysis.excess import log_excess_of
from stability.config.schema import BASELINE
from stability.records.distances import DistanceMatrix, SeedDistances
from stability.records.window import WindowRecord

SETTLING = 10
"""Updates in which a control may leave the limit and come back: 1 / (1 - beta1) of Adam."""

__all__ = [
    "SETTLING",
    "Window",
    "nearness_of",
    "pick_window",
    "window_changes",
    "window_of",
    "window_record",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The judged step, and the log excess of the controls that it rests on."""

    step: int
    """0 if no step can be judged."""
    reason: str
    """Why this step, or why none; a clause without its full stop."""
    controls: tuple[str, ...]
    seeds: tuple[int, ...]
    log_excess: Mapping[int, Mapping[tuple[str, int], float]]
    """By step, then by control and seed; those that are the baseline to the bit are left out."""

    def largest_at(self, step: int) -> float:
        """Return the largest |log E| of a control at `step`; NaN if one is NaN or there is none."""
        values = [abs(value) for value in self.log_excess.get(step, {}).values()]
        return math.nan if not values or any(map(math.isnan, values)) else max(values)


def pick_window(
    distances: Mapping[int, SeedDistances],
    controls: Sequence[str],
    reference: str,
    limit: float,
) -> Window:
    """Return the step that the rule picks from the `controls` of all seeds in `distances`."""
    seeds = tuple(sorted(distances))
    table: dict[int, dict[tuple[str, int], float]] = {}
    step, reason = 0, ""
    for candidate in _steps(distances):
        found, trouble = _log_excess(distances, controls, reference, candidate)
        if not trouble:
            table[candidate] = found
            trouble = _restless(found, limit)
        reason = f"at step {candidate} {trouble}" if trouble else ""
        if not trouble:
            step = candidate
        elif candidate > SETTLING:
            break
    return Window(
        step=step,
        reason=reason or ("no control leaves the limit" if step else "there is no snapshot"),
        controls=tuple(controls),
        seeds=seeds,
        log_excess=table,
    )


def _restless(found: Mapping[tuple[str, int], float], limit: float) -> str:
    """Return which control is furthest beyond the limit; empty if none is."""
    arm, seed = max(found, key=lambda key: _size(found[key]))
    size = _size(found[arm, seed])
    if size <= limit:
        return ""
    return f"{arm} has |log E| {size:.3f} with seed {seed}, above {limit:g}"


def _steps(distances: Mapping[int, SeedDistances]) -> list[int]:
    # step 0 is before any update: no arm has made an error yet, and E is 0 / 0
    return sorted({step for found in distances.values() for step in found.weights if step > 0})


def _log_excess(
    distances: Mapping[int, SeedDistances], controls: Sequence[str], reference: str, step: int
) -> tuple[dict[tuple[str, int], float], str]:
    """Return log E of each control that has moved, by seed; or what a seed lacks for it."""
    found: dict[tuple[str, int], float] = {}
    for seed, recorded in distances.items():
        matrix = recorded.weights.get(step)
        names = matrix.parents if matrix else ()
        for arm in (BASELINE, reference, *controls):
            if arm not in names:
                return {}, f"{arm} has no snapshot with seed {seed}"
        assert matrix is not None
        if matrix.between(BASELINE, reference) == 0:
            return {}, f"{BASELINE} and {reference} are equal to the bit with seed {seed}"
        # a control that is the baseline to the bit has E = 1 and says nothing about chaos
        moved = [arm for arm in controls if matrix.between(arm, BASELINE) != 0]
        if not moved:
            return {}, f"no control differs from the {BASELINE} with seed {seed}"
        for arm in moved:
            value = log_excess_of(matrix, arm, reference)
            found[arm, seed] = math.nan if value is None else value
    return found, ""


def _size(value: float) -> float:
    # weights that are NaN are as far as can be
    return math.inf if math.isnan(value) else abs(value)


def nearness_of(
    window: Window,
    distances: Mapping[int, SeedDistances],
    nudges: Sequence[str],
    reference: str,
) -> tuple[int, float] | None:
    """Return where a reference this near to the baseline left no step, and how near; else None.

    The step is the first one at which E of a nudge is on record, the distance that of the reference
    over that of the furthest nudge, both from the baseline: their geometric mean over seeds, if it
    is 1 or less. Then E measures by less than chaos moves, as from a baseline in FP32. None as well
    where the rule ended at a step that lacks a snapshot, which is another reason.
    """
    steps = _steps(distances)
    later = [step for step in steps if step > SETTLING]
    known = [
        step
        for step in steps
        if step in window.log_excess and all(step in x.weights for x in distances.values())
    ]
    if window.step or not known or (later and later[0] not in known):
        return None
    near = [_over_nudge(found.weights[known[0]], nudges, reference) for found in distances.values()]
    if not all(0 < each < math.inf for each in near):
        return None
    nearness = math.exp(math.fsum(map(math.log, near)) / len(near))
    return (known[0], nearness) if nearness <= 1 else None


def _over_nudge(matrix: DistanceMatrix, nudges: Sequence[str], reference: str) -> float:
    """Return the reference's distance from the baseline over the furthest nudge's, 0 if unknown."""
    own = matrix.kept_between(BASELINE, reference)
    furthest = max((matrix.kept_between(nudge, BASELINE) or 0.0 for nudge in nudges), default=0.0)
    return own / furthest if own and furthest else 0.0


def window_record(
    window: Window, distances: Mapping[int, SeedDistances], reference: str, limit: float
) -> WindowRecord:
    """Return the record that freezes `window`, with the files that it was picked from."""
    arms = (BASELINE, reference, *window.controls)
    return WindowRecord(
        step=window.step,
        reason=window.reason,
        limit=limit,
        reference=reference,
        controls=list(window.controls),
        seeds=list(window.seeds),
        log_excess=[
            {"step": step, "arm": arm, "seed": seed, "log_excess": value}
            for step, values in window.log_excess.items()
            for (arm, seed), value in values.items()
        ],
        parents=[
            {"seed": seed, "step": step, "files": _files(distances[seed], step, arms)}
            for seed in window.seeds
            for step in window.log_excess
        ],
    )


def window_of(record: WindowRecord) -> Window:
    """Return the window that a record froze."""
    table: dict[int, dict[tuple[str, int], float]] = {}
    for row in record.log_excess:
        # NaN stands as text in JSON
        found = table.setdefault(row["step"], {})
        found[row["arm"], row["seed"]] = float(row["log_excess"])
    return Window(
        step=record.step,
        reason=record.reason,
        controls=tuple(record.controls),
        seeds=tuple(record.seeds),
        log_excess=table,
    )


def window_changes(
    record: WindowRecord,
    distances: Mapping[int, SeedDistances],
    controls: Sequence[str],
    reference: str,
    limit: float,
) -> list[str]:
    """Return in what a frozen window is not what the rule makes of its own seeds today.

    Not empty means that it was written by hand, or that what it rests on was trained or chosen
    anew: what follows from it is exploratory. `distances` are those of all seeds of the study, with
    their parents checked.
    """
    changes = []
    if record.limit != limit:
        changes.append(f"window.json: limit is {record.limit:g}, the policy's {limit:g}")
    if record.reference != reference:
        changes.append(f"window.json: reference is {record.reference}, the study's {reference}")
    if sorted(record.controls) != sorted(controls):
        changes.append(
            f"window.json: controls are {', '.join(record.controls)}, the study's "
            f"{', '.join(controls)}"
        )
    arms = (BASELINE, record.reference, *record.controls)
    for row in record.parents:
        found = _files(distances.get(row["seed"]), row["step"], arms)
        other = [arm for arm in row["files"] if found.get(arm) != row["files"][arm]]
        if other:
            changes.append(
                f"window.json: rests on other weights of {other[0]} with seed {row['seed']} at "
                f"step {row['step']} than are there"
            )
            break
    if not changes:
        seeds = {seed: distances[seed] for seed in record.seeds if seed in distances}
        again = pick_window(seeds, record.controls, record.reference, record.limit)
        if again.step != record.step:
            changes.append(f"window.json: step is {record.step}, the rule picks {again.step}")
    return changes


def _files(found: SeedDistances | None, step: int, arms: Sequence[str]) -> dict[str, str]:
    matrix = found.weights.get(step) if found else None
    return {arm: matrix.parents[arm] for arm in arms if arm in matrix.parents} if matrix else {}
