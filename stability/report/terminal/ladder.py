"""The ladder in the terminal: a table with one line an arm, and below it what the table says.

A narrow terminal gets fewer columns rather than broken ones, and is told which: the sparkline
leaves first, then W1, then the seeds' ranges, then the late ratio or else the held-out loss.
Leaves out where the numbers come from (`analysis.ladder`) and every judgement
(`analysis.ladder_sentences`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.intervals import FEWEST
from stability.analysis.ladder import Ladder, Row
from stability.analysis.ladder_sentences import candidate_sentences, messages, notes
from stability.analysis.number_text import MISSING
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.terminal.sparkline import Sparks, evenly, log_scale
from stability.report.terminal.tables import BAD, OPEN, add_row, first_that_fits, ruled_table
from stability.report.view.error_bars import written_with_bar
from stability.report.view.ladder import (
    LOSSES,
    Number,
    has_held_out,
    is_candidate,
    is_unpaired,
    numbers,
)
from stability.report.view.plain_text import as_text, readable, shortened

__all__ = ["DriftSparks", "drift_sparks", "print_ladder"]

CHANGE_WIDTH = 22
"""What changed gets at least this much room before any column is added that can be left out."""
ARM_WIDTH = 24
NARROW_CHANGE_WIDTH, NARROW_ARM_WIDTH = 12, 16
"""The same where every column that can be left out has been: a name of an arm is not broken for a
sentence that can wrap."""
YARDSTICK_WIDTH, NARROW_YARDSTICK_WIDTH = 24, 12
"""The most characters of the yardstick's name in a heading; the caption has the whole name."""
STEPS = 12
"""A sparkline of more steps than this is thinned."""
STATE_STYLE = {"finished": "", "failed": BAD, "running": ""}


class DriftSparks:
    """The relative L2 drift of a study's arms over the steps, mean of the seeds, on one scale."""

    def __init__(self, study: RecordedStudy, sparks: Sparks) -> None:
        self._recorded = study.drift_steps
        self._steps = evenly(self._recorded, STEPS)
        self._values = {arm.name: _means(arm, self._steps) for arm in study.candidates}
        # unpaired arms lie decades away and would press the others into one block
        paired = {arm.name for arm in study.candidates if not is_unpaired(arm)}
        values = [v for name in paired or self._values for v in self._values[name] if v is not None]
        self._scale = log_scale(values)
        self._sparks = sparks

    def line(self, arm: str) -> str:
        """Return the sparkline of `arm`; empty for the baseline, which has no drift."""
        return "" if arm == BASELINE else self._sparks.line(self._values[arm], self._scale)

    def caption(self) -> str:
        """Say at which steps and on which scale."""
        some = len(self._steps) < len(self._recorded)
        thinned = f" ({len(self._steps)} of {len(self._recorded)})" if some else ""
        steps = ", ".join(str(step) for step in self._steps)
        return f"drift by step: at {steps}{thinned}; {self._scale}; {self._sparks.key()}."


def drift_sparks(study: RecordedStudy, console: Console) -> DriftSparks | None:
    """Return the sparklines of a study for a terminal; None while no drift is on record."""
    return DriftSparks(study, Sparks.for_console(console)) if study.drift_steps else None


def _means(arm: RecordedArm, steps: Iterable[int]) -> list[float | None]:
    drifts = {seed: run.drift("rel_l2") for seed, run in arm.runs.items()}
    found = [SeedValues({s: v[step] for s, v in drifts.items() if step in v}) for step in steps]
    return [values.mean if values.n else None for values in found]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns that can be left out."""

    ranges: bool = False
    w1: bool = False
    """With the range of the final loss."""
    sparks: bool = False
    held_out: bool = True
    """Where there is a loss on held-out text."""
    late_ratio: bool = True
    """Late in a run every drift is like the others, so of the two ratios the early one tells."""


LAYOUTS = (
    _Layout(ranges=True, w1=True, sparks=True),
    _Layout(ranges=True, w1=True),
    _Layout(ranges=True, sparks=True),
    _Layout(ranges=True),
    _Layout(sparks=True),
    _Layout(),
    _Layout(late_ratio=False),
    _Layout(held_out=False),
    _Layout(late_ratio=False, held_out=False),
)
"""From the widest to the narrowest, which is taken even where it does not fit."""
NARROW = LAYOUTS[-4:]


def print_ladder(ladder: Ladder, console: Console, sparks: DriftSparks | None = None) -> None:
    """Print the table, how to read it, and what it says about the candidates.

    `sparks` draws each arm's drift over the steps, where there is room.
    """
    layouts = [layout for layout in LAYOUTS if sparks or not layout.sparks]
    place, table = first_that_fits((_table(ladder, each, sparks) for each in layouts), console)
    layout = layouts[place]
    console.print()
    console.print(table)
    console.print()
    caption = _caption(ladder, layout, sparks)
    left_out = _left_out(ladder, layout, layouts[0])
    if left_out:
        caption += f"\nno room in {console.width} columns for: {', '.join(left_out)}."
    console.print(as_text(caption, style="dim"))
    for text in candidate_sentences(ladder):
        console.print()
        console.print(as_text(text))
    remarks = [*notes(ladder), *messages(ladder)]
    if remarks:
        console.print()
    for text in remarks:
        console.print(as_text(f"note: {text}", style="dim"))


def _table(ladder: Ladder, layout: _Layout, sparks: DriftSparks | None) -> Table:
    heads = _heads(ladder, layout)
    table = ruled_table(["arm", "what changed"], [*heads.values()], gap=2 if layout.w1 else 1)
    longest = max(cell_len(readable(row.arm)) for row in ladder.rows)
    is_narrow = layout in NARROW
    table.columns[0].min_width = min(NARROW_ARM_WIDTH if is_narrow else ARM_WIDTH, longest)
    table.columns[1].min_width = NARROW_CHANGE_WIDTH if is_narrow else CHANGE_WIDTH
    if layout.sparks:
        table.add_column(Text("drift\nby step"), no_wrap=True)
    for row in ladder.rows:
        drawn = [sparks.line(row.arm)] if layout.sparks and sparks else []
        cells = [*_cells(row, layout, heads), *drawn]
        add_row(table, *cells, style=STATE_STYLE.get(row.state, OPEN))
    return table


def _heads(ladder: Ladder, layout: _Layout) -> Mapping[str, str]:
    """Return the heading of each number that is shown, by its name in `view.ladder`."""
    early, last = f"step {ladder.early_step}", f"step {ladder.last_step}"
    heads = {"final_loss": "final\nloss"}
    if layout.held_out and has_held_out(ladder):
        heads["held_out_loss"] = "held-out\nloss"
    heads |= {
        "drift_early": f"drift\n{early}",
        "drift_last": f"drift\n{last}",
    }
    if layout.w1:
        heads["w1_last"] = f"W1\n{last}"
    if ladder.yardstick:
        # a long name of the yardstick would take the room of the arms' own
        most = NARROW_YARDSTICK_WIDTH if layout in NARROW else YARDSTICK_WIDTH
        name = f"x {shortened(ladder.yardstick, most)}"
        heads["ratio_early"] = f"{name}\n{early}"
        if layout.late_ratio:
            heads["ratio_last"] = f"{name}\n{last}"
    return heads


def _cells(row: Row, layout: _Layout, shown: Iterable[str]) -> list[Text]:
    change = row.change if row.state == "finished" else f"{row.change} [{row.state}]"
    found = numbers(row)
    return [
        as_text(row.arm, style="bold" if is_candidate(row) else ""),
        as_text(change),
        *(_cell(name, found[name], layout) for name in shown),
    ]


def _cell(name: str, number: Number, layout: _Layout) -> Text:
    values, write = number
    if not values.n:
        return Text(MISSING)
    is_loss = name in LOSSES
    if layout.w1 if is_loss else layout.ranges:
        return Text(written_with_bar(values, write, relative=not is_loss))
    return Text(write(values.mean))


def _left_out(ladder: Ladder, layout: _Layout, widest: _Layout) -> list[str]:
    """Return what the table would show besides if there were room."""
    has_ranges = len(ladder.seeds) > 1
    lacking = {
        "drift by step": widest.sparks and not layout.sparks,
        "W1": widest.w1 and not layout.w1,
        "ranges of the losses": has_ranges and widest.w1 and not layout.w1,
        "ranges of the drifts": has_ranges and widest.ranges and not layout.ranges,
        "held-out loss": has_held_out(ladder) and not layout.held_out,
        f"x {ladder.yardstick} at step {ladder.last_step}": ladder.yardstick
        and not layout.late_ratio,
    }
    return [name for name, is_lacking in lacking.items() if is_lacking]


def _caption(ladder: Ladder, layout: _Layout, sparks: DriftSparks | None) -> str:
    of = _seeds(ladder)
    lines = [f"drift: distance from the baseline's weights, relative L2 over all of them, {of}."]
    if layout.w1:
        lines.append(
            "W1: 1-D Wasserstein distance of the weights' values, in units of the weights."
        )
    if layout.ranges and len(ladder.seeds) >= FEWEST:
        lines[-1] += " [ ]: 90% interval of the mean."
    elif layout.ranges and len(ladder.seeds) > 1:
        lines[-1] += " ±: half of the seeds' range."
    if ladder.yardstick:
        lines.append(
            f"x {ladder.yardstick}: drift over {ladder.yardstick}'s at the same step and seed."
        )
    if layout.sparks and sparks:
        lines.append(sparks.caption())
    lines.append(f"final loss: {_tail(ladder.steps)}.")
    if layout.held_out and has_held_out(ladder):
        lines.append("held-out loss: at the last step, on text that no arm trains on.")
    return "\n".join(lines)


def _seeds(ladder: Ladder) -> str:
    """Return how many seeds a drift is of, which are not all where some have none."""
    planned = len(ladder.seeds)
    known = max((max(row.rel_l2.early.n, row.rel_l2.last.n) for row in ladder.rows), default=0)
    if 0 < known < planned:
        return f"of {known} of {planned} seeds"
    return f"mean of {planned} seeds" if planned > 1 else "1 seed"


def _tail(steps: int) -> str:
    return "that of the only step" if steps == 1 else f"mean of the last tenth of {steps} steps"
