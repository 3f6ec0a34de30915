"""One arm in the terminal: what changed, how each seed went, drift, growth, parameters, layers.

It fits 80 columns. Leaves out where the figures come from (`analysis.arm_summary`). Heads,
positions and gradients are on the page alone.
"""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stability.analysis.arm_growth import ArmGrowth
from stability.analysis.arm_summary import ArmSummary, BySteps
from stability.analysis.number_text import (
    MISSING,
    finely,
    plain,
    scientific,
    three_figures,
    times,
)
from stability.analysis.operator_places import OperatorPlace
from stability.config.schema import BASELINE
from stability.records.metric_table import LAYER_METRICS
from stability.report.terminal.sparkline import Scale, Sparks, evenly, linear_scale, log_scale
from stability.report.terminal.tables import (
    BAD,
    FINE,
    OPEN,
    add_names,
    add_numbers,
    add_row,
    plain_table,
    ruled_table,
)
from stability.report.view.error_bars import growth_cells, growth_sentence, written_with_bar
from stability.report.view.plain_text import as_text

__all__ = ["print_arm", "print_growth"]

DRIFT_STEPS, LAYER_STEPS = 9, 10
"""More steps than this are thinned."""
MOST_METRICS = 3
"""Of each layer, so that they fit 80 columns."""
TOP = 10
"""How many parameters, sentences of what was found, and events are shown."""
WIDE = 110
"""From this width on the relative L2 shows its interval."""
STATE_STYLE = {"finished": FINE, "failed": BAD, "running": "bold"}
WRITE = {None: scientific, 1.0: times, 0.0: "{:+.2g}".format}
"""How a metric is written, by its centre."""


def print_arm(view: ArmSummary, console: Console) -> None:
    """Print all that is on record about an arm."""
    console.print(as_text(f"\n{view.row.arm}: {view.row.change}", "bold"))
    console.print(as_text(view.sentence))
    if view.diff:
        console.print()
        console.print(_diff_table(view))
    console.print()
    console.print(_seed_table(view))
    _print_drifts(view, console)
    if view.growth:
        console.print()
        print_growth([view.growth], console)
    _print_parameters(view, console)
    _print_worst(view, console)
    _print_layers(view, console)
    _print_events(view, console)


def print_growth(rows: list[ArmGrowth], console: Console) -> None:
    """Print how fast chaos grows, and a row for each arm that drifts; nothing if none does."""
    moving = [row for row in rows if row.slope.n and row.slope.mean != 0]
    if not moving:
        return
    console.print(as_text(growth_sentence(moving[0].dynamics)))
    table = plain_table(["arm"], ["ahead of the\nnudges", "slope per step", "chaos\nfrom"])
    for row in moving:
        add_row(table, *growth_cells(row))
    console.print(table)
    level, count = moving[0].slope.level, moving[0].slope.n
    seeds = "1 seed" if count == 1 else f"{count} seeds"
    caption = (
        f"mean [{level:.0%} interval] of {seeds}. ahead: the drift over the nudges' while they "
        "grow exponentially; slope: over the whole run.\nchaos from: the step from which an "
        "arm can't be told from the 1-ULP nudge."
    )
    console.print(as_text(caption, "dim"))


def _diff_table(view: ArmSummary) -> Table:
    table = ruled_table(["config", "baseline", "this arm"], [])
    for path, values in view.diff.items():
        add_row(table, path, *(json.dumps(value, ensure_ascii=False) for value in values))
    return table


def _seed_table(view: ArmSummary) -> Table:
    shown = {"final loss": (view.row.final_loss.per_seed, plain)}
    if view.row.held_out_loss.n:
        shown["held-out loss"] = (view.row.held_out_loss.per_seed, finely)
    table = ruled_table([], ["seed", "step", *shown])
    table.add_column("state", no_wrap=True)
    add_names(table, "")
    for run in view.seeds:
        add_row(
            table,
            str(run.seed),
            f"{run.step} of {view.steps}",
            *(
                write(losses[run.seed]) if run.seed in losses else MISSING
                for losses, write in shown.values()
            ),
            as_text(run.state, style=STATE_STYLE.get(run.state, OPEN)),
            run.message,
        )
    return table


def _print_drifts(view: ArmSummary, console: Console) -> None:
    for note in view.notes:
        console.print(as_text(f"\nnote: {note}"))
    recorded = sorted({step for values in view.drifts.values() for step in values})
    if not recorded:
        if view.row.arm != BASELINE:
            said = "\nno drift on record yet: no step has been compared with the baseline"
            console.print(as_text(said))
        return
    steps, sparks = evenly(recorded, DRIFT_STEPS), Sparks.for_console(console)
    metrics = sorted(view.drifts, key=lambda name: name != "rel_l2")
    table = ruled_table([], ["step", *metrics], gap=0)
    for step in steps:
        cells = [_drift(view, metric, step, console.width >= WIDE) for metric in metrics]
        add_row(table, str(step), *cells)
    table.add_section()
    means = {metric: _means(view.drifts[metric], steps) for metric in metrics}
    lines = [sparks.line(values, _log_scale(values)) for values in means.values()]
    add_row(table, "", *lines)
    console.print(as_text("\ndrift from the baseline's weights, over all of them", "bold"))
    console.print(table)
    some = f"{len(steps)} of {len(recorded)} steps; " if len(steps) < len(recorded) else ""
    caption = (
        f"{some}mean over the seeds. Below: each column over the steps, on its own log scale; "
        f"{sparks.key()}."
    )
    console.print(as_text(caption, "dim"))


def _drift(view: ArmSummary, metric: str, step: int, is_wide: bool) -> str:
    values = view.drifts[metric].get(step)
    if values is None:
        return MISSING
    if is_wide and metric == "rel_l2":
        return written_with_bar(values, scientific, relative=True)
    return scientific(values.mean)


def _means(values: BySteps, steps: Sequence[int]) -> list[float | None]:
    return [values[step].mean if step in values else None for step in steps]


def _log_scale(values: Sequence[float | None]) -> Scale:
    return log_scale(value for value in values if value is not None)


def _print_parameters(view: ArmSummary, console: Console) -> None:
    if not view.parameters:
        return
    moved = [(name, values) for name, values in view.parameters if not values.is_zero]
    console.print(as_text(f"\nmost drifted parameters at step {view.last_step}", "bold"))
    if not moved:
        said = f"none: all {len(view.parameters)} are exactly the baseline's"
        console.print(as_text(said))
        return
    table = ruled_table(["parameter"], ["relative L2"])
    for name, values in moved[:TOP]:
        add_row(table, name, written_with_bar(values, scientific, relative=True))
    console.print(table)
    if len(view.parameters) > TOP:
        console.print(as_text(f"{min(TOP, len(moved))} of {len(view.parameters)}", "dim"))


def _print_worst(view: ArmSummary, console: Console) -> None:
    """Print where each result errs most, the worst first; nothing if no look had a golden."""
    if view.found:
        console.print()
    for line in view.found[:TOP]:
        console.print(as_text(line, OPEN))
    if len(view.found) > TOP:
        console.print(as_text(f"the first {TOP} of {len(view.found)}; --json has all", "dim"))
    if not view.worst:
        return
    table = ruled_table(["result", "figure"], ["mean", "limit", "largest", "at step"])
    add_names(table, "in")
    for one in view.worst:
        add_row(
            table,
            one.what,
            one.kind,
            _figure(one, one.mean),
            _figure(one, one.limit).removeprefix("+"),
            _figure(one, one.wildest),
            str(one.wildest_at),
            one.where,
            style=BAD if one.of_limit > 1 else "",
        )
    console.print(as_text("\nworst place of each result against FP64, the worst first", "bold"))
    console.print(table)
    looks = max(one.looks for one in view.worst)
    caption = (
        "error: that of plain attention on the same inputs, times so much; gain: how much too "
        "large; bias: mean signed error, in ULPs, or in k ULPs where plain attention errs by k "
        f"roundings. mean: of {looks} looks; largest: of a single look, and its step. A mean "
        "beyond its limit may be chance: `stability verdict` says what is sure."
    )
    console.print(as_text(caption, "dim"))


def _figure(one: OperatorPlace, value: float) -> str:
    if one.kind == "error":
        return f"{three_figures(value)}x"
    return f"{value:+.2g}" if one.kind == "bias" else f"{100 * value:+.2g}%"


def _print_layers(view: ArmSummary, console: Console) -> None:
    """Print the deviation of each layer's output; nothing if no probe looked at the arm."""
    recorded = sorted({s for found in view.layers.values() for v in found.values() for s in v})
    if not recorded:
        return
    steps, sparks = evenly(recorded, LAYER_STEPS), Sparks.for_console(console)
    there = (m for m in LAYER_METRICS if any(found[m] for found in view.layers.values()))
    # against FP64 where there is a golden: those come first
    metrics = list(there)[:MOST_METRICS]
    scales = {metric: _layer_scale(view, metric) for metric in metrics}
    table = ruled_table(["layer"], [])
    for metric in metrics:
        add_numbers(table, metric.replace("golden_", "golden\n"))
        table.add_column("by step", no_wrap=True)
    for layer, found in view.layers.items():
        cells = []
        for metric, scale in scales.items():
            last = found[metric].get(recorded[-1])
            cells.append(WRITE[LAYER_METRICS[metric].centre](last.mean) if last else MISSING)
            cells.append(sparks.line(_means(found[metric], steps), scale))
        add_row(table, layer, *cells)
    heading = f"\ndeviation of each layer's output, at step {recorded[-1]}"
    console.print(as_text(heading, "bold"))
    console.print(table)
    some = f"{len(steps)} of {len(recorded)} steps" if len(steps) < len(recorded) else "all steps"
    caption = (
        "candidate against baseline attention on the same inputs, mean over the seeds. Over the "
        f"steps {steps[0]} to {steps[-1]}, {some}, all layers alike: "
        f"{'; '.join(f'{metric} on a {scale}' for metric, scale in scales.items())}; "
        f"{sparks.key()}."
    )
    console.print(as_text(caption, "dim"))


def _layer_scale(view: ArmSummary, metric: str) -> Scale:
    values = [each.mean for found in view.layers.values() for each in found[metric].values()]
    return (log_scale if LAYER_METRICS[metric].scale == "log" else linear_scale)(values)


def _print_events(view: ArmSummary, console: Console) -> None:
    events = [(run.seed, event) for run in view.seeds for event in run.events]
    if not events:
        return
    events.sort(key=lambda pair: (pair[1].step, pair[0]))
    table = ruled_table(["step", "seed", "kind", "what happened"], [])
    for seed, event in events[:TOP]:
        text = f"{event.layer}: {event.text}" if event.layer else event.text
        add_row(table, str(event.step), str(seed), event.kind, text)
    console.print(as_text("\nevents", "bold"))
    console.print(table)
    if len(events) > TOP:
        console.print(as_text(f"the first {TOP} of {len(events)}; --json has all", "dim"))
