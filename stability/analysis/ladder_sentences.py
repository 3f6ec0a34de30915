"""What the ladder says, in plain sentences that claim no more than the numbers do.

Tiny differences grow exponentially and then saturate, so a drift may be nothing but chaos. The
rule: a drift is told from chaos only if the interval of its ratio to the 1-ULP nudge's drift lies
above 1, as in a verdict. With too few seeds for an interval, the nudge must have gone less than
half as far (CHAOS_SHARE). The verdict itself is left to `verdict`.
"""

import math
from collections.abc import Callable, Sequence

from stability.analysis.intervals import paired_interval
from stability.analysis.ladder import Ladder, Row
from stability.analysis.number_text import MISSING, scientific, span, times
from stability.analysis.rerun_floor import below_floor, floor_note
from stability.analysis.seed_values import SeedValues
from stability.config.arms import INDEPENDENT_AXES
from stability.config.schema import BASELINE

__all__ = [
    "CHAOS_SHARE",
    "candidate_sentences",
    "messages",
    "notes",
    "sentence",
    "swamped_by_chaos",
]

CHAOS_SHARE = 0.5
"""If the nudge has gone this share of an arm's drift, most of that drift is chaos. With fewer than
3 seeds the arm then can't be told from chaos."""


def sentence(ladder: Ladder, arm: str) -> str:
    """Return what the ladder says about `arm`, in one or two plain sentences.

    ValueError if the study has no such arm.
    """
    row = ladder.row(arm)
    if row is None:
        names = ", ".join(row.arm for row in ladder.rows)
        raise ValueError(f"arm must be one of {names}, got {arm!r}")
    if arm == BASELINE:
        return f"{arm} is what every other arm is compared with."
    if not row.rel_l2.early.n and not row.rel_l2.last.n:
        if row.until < ladder.early_step:
            return f"{arm} ends at step {row.until}, before the first drift that is compared here."
        return f"{arm} has no drift on record at step {ladder.early_step} yet{_because(row)}."
    if row.rel_l2.last.is_zero and (row.rel_l2.early.is_zero or not row.rel_l2.early.n):
        return (
            f"{arm} has exactly the baseline's weights at step {ladder.last_step} "
            f"({_seeds(row.rel_l2.last)})."
        )
    said = f"{arm} moves the weights {_distances(ladder, row)} ({_seeds(_best(row))})"
    chaos = below_floor(ladder, row) or _chaos(ladder, row)
    return f"{said}; {chaos}." if chaos else f"{said}."


def candidate_sentences(ladder: Ladder) -> list[str]:
    """Return the sentence of each candidate: the arms that change the attention."""
    return [sentence(ladder, row.arm) for row in ladder.rows_on("attention")]


def notes(ladder: Ladder) -> list[str]:
    """Return what a reader must know before trusting the numbers; empty if nothing is amiss."""
    found = [*ladder.drift_notes, floor_note(ladder)]
    found += [_aa_note(row) for row in ladder.rows_on("none")]
    found += [_no_effect_note(ladder, row) for row in ladder.rows if row.axis != "none"]
    found += [_floor_note(row, ladder.last_step) for row in ladder.rows]
    found.append(_ends_note(ladder))
    if ladder.last_step < max((row.until for row in ladder.rows if row.arm != BASELINE), default=0):
        found.append(f"No arm has reached step {ladder.steps} yet; the last figures are earlier.")
    if ladder.yardstick and ladder.row(ladder.yardstick) is None:
        found.append(f"The yardstick {ladder.yardstick} is no arm of this study: no ratios.")
    return [note for note in found if note]


def _ends_note(ladder: Ladder) -> str:
    """Tell of arms that end early by plan, and so have no last figure."""
    ended = [f"{row.arm} at step {row.until}" for row in ladder.rows if row.until < ladder.steps]
    return f"Planned to end early: {', '.join(ended)}." if ended else ""


def messages(ladder: Ladder) -> list[str]:
    """Return what happened to each arm that has not finished in all seeds."""
    return [f"{row.arm}: {row.message}." for row in ladder.rows if row.message]


def swamped_by_chaos(ladder: Ladder, row: Row, *, early: bool) -> SeedValues:
    """Return nudge drift / arm drift if the arm can't be told from chaos, else no values.

    There are none for the nudge itself either, and none without a nudge arm.
    """
    nudges = ladder.rows_on("nudge")
    if not nudges or row.axis == "nudge":
        return SeedValues()
    share = nudge_share(ladder, row, early=early)
    inverse = {seed: 1 / value for seed, value in share.per_seed.items() if value}
    surely = paired_interval(inverse).low  # NaN with too few seeds for an interval
    is_lost = share.mean >= CHAOS_SHARE if math.isnan(surely) else surely <= 1
    return share if share.n and is_lost else SeedValues()


def nudge_share(ladder: Ladder, row: Row, *, early: bool) -> SeedValues:
    """Return nudge drift / arm drift, seed by seed; no values without a nudge arm."""
    nudges = ladder.rows_on("nudge")
    if not nudges:
        return SeedValues()
    nudge = nudges[0].rel_l2
    return nudge.early.over(row.rel_l2.early) if early else nudge.last.over(row.rel_l2.last)


def _distances(ladder: Ladder, row: Row) -> str:
    steps = (ladder.early_step, ladder.last_step)
    if row.arm == ladder.yardstick or not (row.ratio.early.n or row.ratio.last.n):
        early, last = (_with_range(s, scientific) for s in (row.rel_l2.early, row.rel_l2.last))
        tail = ", and is the yardstick" if row.arm == ladder.yardstick else ""
        if row.rel_l2.early.n and not row.rel_l2.last.n:
            return f"by {early} (relative L2) at step {steps[0]}{tail}"
        return f"by {early} (relative L2) at step {steps[0]} and {last} at step {steps[1]}{tail}"
    early, last = (_with_range(s, times) for s in (row.ratio.early, row.ratio.last))
    if row.ratio.early.n and not row.ratio.last.n:
        return f"{early} as far as {ladder.yardstick} does at step {steps[0]}"
    return (
        f"{early} as far as {ladder.yardstick} does at step {steps[0]} "
        f"and {last} at step {steps[1]}"
    )


def _with_range(values: SeedValues, write: Callable[[float], str]) -> str:
    if not values.n:
        return MISSING
    ends = span(values, write, " to ")
    return f"{write(values.mean)} ({ends})" if ends else write(values.mean)


def _chaos(ladder: Ladder, row: Row) -> str:
    if row.axis == "nudge":
        return ""
    nudges = ladder.rows_on("nudge")
    if not any(nudge.rel_l2.early.n or nudge.rel_l2.last.n for nudge in nudges):
        return "no nudge arm says how much of that is chaos"
    early = swamped_by_chaos(ladder, row, early=True)
    last = swamped_by_chaos(ladder, row, early=False)
    if early.n:
        return (
            f"already at step {ladder.early_step} the 1-ULP nudge has itself gone "
            f"{times(early.mean)} as far, so neither figure can be told from chaos"
        )
    if last.n:
        return (
            f"by step {ladder.last_step} the 1-ULP nudge has itself gone {times(last.mean)} as "
            "far, so only the early figure can be told from chaos"
        )
    if row.rel_l2.last.n and not any(nudge.rel_l2.last.n for nudge in nudges):
        return (
            f"the nudge ends before step {ladder.last_step}, so nothing says how much of the last "
            "figure is chaos"
        )
    share = nudge_share(ladder, row, early=True)
    if share.n and share.mean >= CHAOS_SHARE:
        return (
            f"at step {ladder.early_step} the 1-ULP nudge has gone {times(share.mean)} as far, so "
            "most of that is chaos, though surely not all"
        )
    return ""


def _best(row: Row) -> SeedValues:
    return max(row.rel_l2.early, row.rel_l2.last, key=lambda values: values.n)


def _seeds(values: SeedValues) -> str:
    return "1 seed, so no spread" if values.n == 1 else f"{values.n} seeds"


def _because(row: Row) -> str:
    return f" ({row.message})" if row.message else ""


def _aa_note(row: Row) -> str:
    drifts = [values for values in (row.rel_l2.early, row.rel_l2.last) if values.n]
    if not drifts:
        return ""
    if all(values.is_zero for values in drifts):
        return f"A/A is zero: {row.arm} ends in the baseline's bits ({_seeds(drifts[-1])})."
    return ""


def _no_effect_note(ladder: Ladder, row: Row) -> str:
    """Tell of a change that changed nothing: most often it has not reached what was trained."""
    drifts = row.rel_l2.last if row.rel_l2.last.n else row.rel_l2.early
    zeros = [str(seed) for seed, drift in drifts.per_seed.items() if drift == 0]
    if row.arm == BASELINE or not zeros:
        return ""
    evaluated = _other_evaluation(row, ladder.row(BASELINE), zeros)
    return (
        f"The change had no effect on the weights: {row.arm} changes {row.axis} and ends in the "
        f"baseline's bits ({_seed_list(zeros)}){evaluated}."
    )


def _other_evaluation(row: Row, baseline: Row | None, seeds: Sequence[str]) -> str:
    """Say where the same weights were evaluated to another loss: evaluation alone was changed."""
    before = baseline.held_out_loss.per_seed if baseline else {}
    others = [
        str(seed)
        for seed, loss in row.held_out_loss.per_seed.items()
        if str(seed) in seeds and seed in before and loss != before[seed]
    ]
    if not others:
        return ""
    return f"; its held-out loss is another ({_seed_list(others)}), so it changes the evaluation"


def _seed_list(seeds: Sequence[str]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}"


def _floor_note(row: Row, step: int) -> str:
    floor, w1 = row.w1_floor.last, row.w1.last
    if row.axis not in INDEPENDENT_AXES or not w1.n:
        return ""
    note = (
        f"{row.arm} starts from independently drawn weights: two such draws differ by a W1 of "
        "their own"
    )
    if not floor.n:
        return f"{note}, and no arm with another init seed was compared at step 0 to measure it."
    relation = "below" if w1.mean < floor.mean else "above"
    return (
        f"{note}, {scientific(floor.mean)} at step 0; its W1 of {scientific(w1.mean)} at step "
        f"{step} is {relation} it{' and says nothing' if relation == 'below' else ''}."
    )
