"""A summary of a study or a probe for the list of all: how far it is, its answers, a small ladder.

A study that can't be read has a summary too, which says why. Leaves out the markup, which is the
template's.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import get_args

from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.ladder_sentences import candidate_sentences
from stability.analysis.probe_records import RecordedProbe
from stability.analysis.study_records import RecordedRun, RecordedStudy, RunState
from stability.analysis.verdict import answer_of
from stability.report.live.small_ladder import SmallLadder, small_ladder
from stability.report.terminal.probe import located_lines
from stability.report.view.palette import arm_styles

__all__ = ["Summary", "answers", "summary_of_error", "summary_of_probe", "summary_of_study"]

NAMED = 2
"""How many of the runs in training are named; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What the list of studies shows of one study or probe."""

    title: str
    size: str
    state: str
    is_bad: bool = False
    is_running: bool = False
    done: float = 1.0
    """The share of all runs' updates that have been made."""
    answers: tuple[str, ...] = ()
    ladder: SmallLadder | None = None
    """None for a probe: only studies can be compared."""


def summary_of_error(name: str, error: str) -> Summary:
    """Return the summary of a study or probe that can't be read."""
    return Summary(title=name, size="", state=f"can't be read: {error}", is_bad=True)


def summary_of_probe(probed: RecordedProbe) -> Summary:
    """Return the summary of a probe."""
    return Summary(
        title=f"{probed.record.model}: {', '.join(probed.record.shadows)}",
        size=f"probe, {_count(probed.layers, 'layer')}",
        state=f"looked at {len(probed.steps())} of {probed.record.steps} steps",
        answers=tuple(located_lines(probed)),
    )


def summary_of_study(study: RecordedStudy) -> Summary:
    """Return the summary of a study, also of one that has not ended or begun."""
    ladder = ladder_of(study)
    runs = [run for arm in study.arms for run in arm.runs.values()]
    states = [run.state for run in runs]
    counts = {state: states.count(state) for state in get_args(RunState) if state in states}
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    reached = sum(_reached(run, study.steps) for run in runs)
    return Summary(
        title=study.question,
        size=", ".join(
            [_count(study.arms, "arm"), _count(study.seeds, "seed"), f"{study.steps} steps each"]
        ),
        state=f"{said} of {_count(runs, 'run')}{_being_trained(study)}",
        is_bad=not {"failed", "diverged", "interrupted"}.isdisjoint(states),
        is_running="running" in states,
        done=reached / (study.steps * len(runs)) if study.steps and runs else 0.0,
        answers=answers(study, ladder),
        ladder=small_ladder(ladder, arm_styles([arm.name for arm in study.arms])),
    )


def answers(study: RecordedStudy, ladder: Ladder) -> tuple[str, ...]:
    """Return the verdict by the study's own policy, else a sentence on each candidate's drift."""
    answer = answer_of(study)
    if answer and answer.outcome != "OPEN":
        return (str(answer),)
    said = tuple(candidate_sentences(ladder))
    return said or ("No arm of this study changes the attention; the ladder shows its controls.",)


def _being_trained(study: RecordedStudy) -> str:
    """Return how far the runs in training are, e.g. `; now nudge, seed 1, at step 80`."""
    running = [
        f"{arm.name}, seed {seed}, at step {_reached(run, study.steps)}"
        for arm in study.arms
        for seed, run in arm.runs.items()
        if run.state == "running"
    ]
    if not running:
        return ""
    more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
    return f"; now {'; '.join(running[:NAMED])}{more}"


def _reached(run: RecordedRun, steps: int) -> int:
    return steps if run.state == "finished" else max(run.loss(), default=0)


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
