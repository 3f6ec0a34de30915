"""A summary of a study or a probe for the list of all: how far it is, its answers, a small ladder.

A study that can't be read has a summary too, which says why. Leaves out the markup, which is the
template's.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from stability.analysis.answer import answer_of
from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.ladder_sentences import candidate_sentences
from stability.analysis.number_text import EXACT_ZERO, MISSING, scientific, times
from stability.analysis.probe_records import RecordedProbe
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedRun, RecordedStudy, RunState, read_study
from stability.report.terminal.probe import located_lines
from stability.report.view.error_bars import bar_ends, written_bar
from stability.report.view.ladder import is_candidate, is_unpaired, rungs, rungs_of_each
from stability.report.view.palette import ArmStyle, arm_styles
from stability.report.view.unlisted import unlisted_runs

__all__ = [
    "Summary",
    "answers",
    "outline_of_study",
    "read_summary",
    "small_ladder",
    "summary_of_error",
    "summary_of_probe",
    "summary_of_study",
]

STATE_WORDS: dict[str, str] = {"missing": "to come"}
"""What is said of runs in a state, where that is not its name: none of these has been lost."""
UNFINISHED = "the same command again goes on from here"
FAILED = "its page has each run's error; the same command again tries those runs anew"
NAMED = 2
"""How many of the runs in training are named; the others are counted."""
EDGE = 4.0
"""Free room at both ends of the small ladder's axis, in percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mean over the seeds on the axis, with the ends of its error bar."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRung:
    """One arm; a mark is None where there is nothing to draw."""

    arm: str
    is_candidate: bool
    colour: str
    early: Mark | None
    last: Mark | None
    text: str
    small: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallLadder:
    """One mark an arm on a log axis; places are in percent of the width, for the template to draw.

    `yardstick_at` is the place of the ratio 1, None if the axis shows drifts.
    """

    measure: str
    yardstick_at: float | None
    rungs: tuple[SmallRung, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What the list of studies shows of one study or probe."""

    title: str
    size: str
    state: str
    next: str = ""
    """What the reader can do about it; mostly empty."""
    is_bad: bool = False
    is_running: bool = False
    done: float = 1.0
    """The share of all runs' updates that have been made."""
    answers: tuple[str, ...] = ()
    ladder: SmallLadder | None = None
    """None for a probe: only studies can be compared."""
    unlisted: str = ""
    """Runs on disk that the study no longer has; mostly empty."""
    is_outline: bool = False
    """Whether it was made without the logs, so that answers and ladder are still to come."""


def summary_of_error(name: str, error: str) -> Summary:
    """Return the summary of a study or probe that can't be read."""
    return Summary(title=name, size="", state=f"can't be read: {error}", is_bad=True)


def summary_of_probe(probed: RecordedProbe) -> Summary:
    """Return the summary of a probe."""
    return Summary(
        title=f"{probed.record.model}: {', '.join(probed.record.shadows)}",
        size=f"probe, {_count(probed.layers, 'layer')}",
        state=probed.open_end or f"looked at {probed.looked_at}",
        answers=tuple(located_lines(probed)),
    )


def summary_of_study(study: RecordedStudy) -> Summary:
    """Return the summary of a study, also of one that has not ended or begun."""
    ladder = ladder_of(study)
    return replace(
        outline_of_study(study),
        is_outline=False,
        answers=answers(study, ladder),
        ladder=small_ladder(ladder, arm_styles([arm.name for arm in study.arms])),
    )


def read_summary(study_dir: Path) -> Summary:
    """Return the summary of the study in a folder; ValueError as `read_study`."""
    return summary_of_study(read_study(study_dir))


def outline_of_study(study: RecordedStudy) -> Summary:
    """Return what can be said of a study that was read without its logs."""
    runs = [run for arm in study.arms for run in arm.runs.values()]
    states = [run.state for run in runs]
    counts = {state: states.count(state) for state in get_args(RunState) if state in states}
    said = ", ".join(f"{n} {STATE_WORDS.get(state, state)}" for state, n in counts.items())
    planned = sum(arm.until * len(arm.runs) for arm in study.arms)
    reached = sum(_reached(run, arm.until) for arm in study.arms for run in arm.runs.values())
    is_same = all(arm.until == study.steps for arm in study.arms)
    return Summary(
        title=study.question,
        size=", ".join(
            [
                _count(study.arms, "arm"),
                _count(study.seeds, "seed"),
                f"{study.steps} steps each" if is_same else f"up to {study.steps} steps",
            ]
        ),
        state=f"{said} of {_count(runs, 'run')}{_being_trained(study)}",
        next=_next(states),
        is_bad=not {"failed", "diverged", "interrupted", "stopped"}.isdisjoint(states),
        is_running="running" in states,
        done=reached / planned if planned else 0.0,
        unlisted=unlisted_runs(study),
        is_outline=True,
    )


def _next(states: Collection[str]) -> str:
    """Return what there is to do about a study that nobody trains and that is not whole."""
    if "running" in states:
        return ""
    if "failed" in states:
        return FAILED
    return "" if {"stopped", "interrupted", "missing"}.isdisjoint(states) else UNFINISHED


def answers(study: RecordedStudy, ladder: Ladder) -> tuple[str, ...]:
    """Return the verdict by the study's own policy, else a sentence on each candidate's drift.

    What makes the study exploratory comes first, also before there is a verdict.
    """
    answer = answer_of(study)
    if answer and answer.outcome != "OPEN":
        return answer.sentences
    said = tuple(candidate_sentences(ladder)) or (
        "No arm of this study names an attention; the ladder shows how far each has drifted.",
    )
    return (answer.exploratory, *said) if answer and answer.exploratory else said


def _being_trained(study: RecordedStudy) -> str:
    """Return how far the runs in training are, e.g. `; now nudge, seed 1, at step 80`."""
    running = [
        f"{arm.name}, seed {seed}, at step {_reached(run, arm.until)}"
        for arm in study.arms
        for seed, run in arm.runs.items()
        if run.state == "running"
    ]
    if not running:
        return ""
    more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
    return f"; now {'; '.join(running[:NAMED])}{more}"


def _reached(run: RecordedRun, steps: int) -> int:
    if run.state == "finished":
        return steps
    # the manifest's step is that of its last snapshot: the log is ahead of it
    return max(run.loss(), default=run.manifest.step if run.manifest else 0)


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def small_ladder(ladder: Ladder, styles: Mapping[str, ArmStyle]) -> SmallLadder:
    """Return the ladder in ratio to its yardstick, or as drifts where there is no ratio."""
    if not any(row.rel_l2.early.n or row.rel_l2.last.n for row in ladder.rows):
        return SmallLadder(measure="", yardstick_at=None, rungs=())
    shown = rungs_of_each([ladder], lambda row: row.ratio)[0]
    has_ratio = any(rung.measured.early.n or rung.measured.last.n for rung in shown)
    shown = shown if has_ratio else rungs(ladder)
    write = times if has_ratio else scientific
    # this axis has no edge to name an arm at: all unpaired ones have their number alone
    drawn = [rung for rung in shown if not is_unpaired(rung.row)]
    both = [each for rung in drawn for each in (rung.measured.early, rung.measured.last)]
    axis = _LogAxis(both, [1.0] if has_ratio else [])
    small = []
    for rung in shown:
        early, last = rung.measured.early, rung.measured.last
        told = early if early.n else last
        is_zero = rung.row.rel_l2.early.is_zero or rung.row.rel_l2.last.is_zero
        small.append(
            SmallRung(
                arm=rung.row.arm,
                is_candidate=is_candidate(rung.row),
                colour=styles[rung.row.arm].colour,
                early=axis.mark(early) if rung in drawn else None,
                last=axis.mark(last) if rung in drawn else None,
                text=EXACT_ZERO if is_zero else write(told.mean) if told.n else MISSING,
                small=written_bar(told, write),
            )
        )
    unit = f"drift in units of {ladder.yardstick}'s" if has_ratio else "drift (relative L2)"
    return SmallLadder(
        measure=f"{unit}; hollow and number: step {ladder.early_step}, filled: {ladder.last_step}",
        yardstick_at=axis.place(1.0) if has_ratio else None,
        rungs=tuple(small),
    )


class _LogAxis:
    """A log axis over all that is to be drawn, from 0 to 100 percent."""

    def __init__(self, drawn: Iterable[SeedValues], also: list[float]) -> None:
        points = [point for each in drawn for point in (*bar_ends(each), each.mean)]
        logs = [math.log10(point) for point in [*points, *also] if 0 < point < math.inf]
        self._low = min(logs, default=0.0)
        self._width = max(logs, default=0.0) - self._low or 1.0

    def place(self, value: float) -> float:
        share = (math.log10(value) - self._low) / self._width
        return round(EDGE + (100 - 2 * EDGE) * share, 2)

    def mark(self, values: SeedValues) -> Mark | None:
        low, high = bar_ends(values)
        if not values.n or not 0 < low <= high < math.inf:
            return None
        return Mark(low=self.place(low), mean=self.place(values.mean), high=self.place(high))
