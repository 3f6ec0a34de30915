"""Deviation of each layer's output in the terminal: the last figure, and all as a sparkline.

Leaves out heads and positions (`probe_table`), and gradients (the report).

One arm in the terminal: what changed, how each seed went, drift, growth, parameters, layers.

Fits 80 columns; nothing is drawn that is not on record. Leaves out where the figures come from
(`analysis.arm_summary`).
"""

import json
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from stability.analysis.arm_summary import LAYER_METRICS, ArmSummary, BySteps
from stability.analysis.number_text import MISSING, plain, scientific, times
from stability.config.schema import BASELINE
from stability.report.terminal.growth import print_growth
from stability.report.terminal.ladder import spread_cell
from stability.report.terminal.sparkline import Scale, Sparks, evenly, linear_scale, log_scale
from stability.report.view.plain_text import as_text

__all__ = ["print_arm", "print_layers"]

MOST = 10
"""More steps than this are thinned."""
WRITE = {"rel_fro": scientific, "error_ratio": times, "bias_ulp": "{:+.2g}".format}


def print_layers(view: ArmSummary, console: Console) -> None:
    """Print a line for each layer; nothing if no probe looked at the arm."""
    recorded = sorted({s for found in view.layers.values() for v in found.values() for s in v})
    if not recorded:
        return
    steps, sparks = evenly(recorded, MOST), Sparks.for_console(console)
    scales = {metric: _scale(view, metric) for metric in LAYER_METRICS}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    for metric in LAYER_METRICS:
        table.add_column(metric, justify="right", no_wrap=True)
        table.add_column("by step", no_wrap=True)
    for layer, found in view.layers.items():
        cells = []
        for metric in LAYER_METRICS:
            line = _layer_line(found[metric], steps, sparks, scales[metric])
            cells += [_last(found[metric], metric, recorded[-1]), line]
        table.add_row(as_text(layer), *cells)
    heading = f"\ndeviation of each layer's output, at step {recorded[-1]}"
    console.print(as_text(heading, style="bold"))
    console.print(table, highlight=False)
    some = f"{len(steps)} of {len(recorded)} steps" if len(steps) < len(recorded) else "all steps"
    caption = (
        "candidate against baseline attention on the same inputs, mean over the seeds. Over the "
        f"steps {steps[0]} to {steps[-1]}, {some}, all layers alike: "
        f"{'; '.join(f'{metric} on a {scale}' for metric, scale in scales.items())}; "
        f"{sparks.key()}."
    )
    console.print(as_text(caption, style="dim"), highlight=False)


def _scale(view: ArmSummary, metric: str) -> Scale:
    values = [spread.mean for found in view.layers.values() for spread in found[metric].values()]
    return linear_scale(values) if metric == "bias_ulp" else log_scale(values)


def _last(values: BySteps, metric: str, step: int) -> str:
    return WRITE[metric](values[step].mean) if step in values else MISSING


def _layer_line(values: BySteps, steps: list[int], sparks: Sparks, scale: Scale) -> str:
    return sparks.line([values[s].mean if s in values else None for s in steps], scale)


STEPS = 9
"""More steps than this with a drift are thinned."""
TOP = 10
"""How many parameters, and how many events, are shown."""
STATE_STYLE = {"finished": "green", "failed": "red", "running": "cyan"}
WIDE = 110
"""From this width on the relative L2 shows its interval."""


def print_arm(view: ArmSummary, console: Console) -> None:
    """Print all that is on record about an arm."""
    _line(console, f"\n{view.row.arm}: {view.row.change}", "bold")
    _line(console, view.sentence)
    _print_diff(view, console)
    _print_seeds(view, console)
    _print_drifts(view, console)
    if view.growth:
        _print_growth(view, console)
    _print_parameters(view, console)
    print_layers(view, console)
    _print_events(view, console)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(as_text(text, style=style), highlight=False)


def _table(names: Iterable[str], figures: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(as_text(name), overflow="fold")
    for name in figures:
        table.add_column(as_text(name), justify="right", no_wrap=True)
    return table


def _print_diff(view: ArmSummary, console: Console) -> None:
    if not view.diff:
        return
    table = _table(["config", "baseline", "this arm"], [])
    for path, values in view.diff.items():
        written = (json.dumps(value, ensure_ascii=False) for value in values)
        table.add_row(as_text(path), *(as_text(value) for value in written))
    console.print()
    console.print(table, highlight=False)


def _print_seeds(view: ArmSummary, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("seed", "step", "final loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("", overflow="fold")
    losses = view.row.final_loss.per_seed
    for run in view.seeds:
        table.add_row(
            str(run.seed),
            f"{run.step} of {view.steps}",
            plain(losses[run.seed]) if run.seed in losses else MISSING,
            as_text(run.state, style=STATE_STYLE.get(run.state, "yellow")),
            as_text(run.message),
        )
    console.print()
    console.print(table, highlight=False)


def _print_drifts(view: ArmSummary, console: Console) -> None:
    recorded = sorted({step for values in view.drifts.values() for step in values})
    if not recorded:
        if view.row.arm != BASELINE:
            _line(console, "\nno drift on record yet: no step has been compared with the baseline")
        return
    steps, sparks = evenly(recorded, STEPS), Sparks.for_console(console)
    metrics = sorted(view.drifts, key=lambda name: name != "rel_l2")
    table = _table([], ["step", *metrics])
    table.padding = (0, 0, 0, 0)
    for step in steps:
        cells = [_drift(view, metric, step, console.width >= WIDE) for metric in metrics]
        table.add_row(str(step), *cells)
    table.add_section()
    lines = [_drift_line(view.drifts[metric], steps, sparks) for metric in metrics]
    table.add_row("", *lines)
    _line(console, "\ndrift from the baseline's weights, over all of them", "bold")
    console.print(table, highlight=False)
    some = f"{len(steps)} of {len(recorded)} steps; " if len(steps) < len(recorded) else ""
    _line(
        console,
        f"{some}mean over the seeds. Below: each column over the steps, on its own log scale; "
        f"{sparks.key()}.",
        "dim",
    )


def _drift(view: ArmSummary, metric: str, step: int, wide: bool) -> str:
    spread = view.drifts[metric].get(step)
    if spread is None:
        return MISSING
    if wide and metric == "rel_l2":
        return spread_cell(spread, scientific, relative=True)
    return scientific(spread.mean)


def _drift_line(values: BySteps, steps: list[int], sparks: Sparks) -> str:
    means = [values[step].mean if step in values else None for step in steps]
    return sparks.line(means, log_scale(mean for mean in means if mean is not None))


def _print_growth(view: ArmSummary, console: Console) -> None:
    growth = view.growth
    assert growth is not None
    console.print()
    if growth.rate.n:
        print_growth([growth], console)
    elif view.last_step:
        _line(console, "no growth law: the drift has no early phase in which it grows", "dim")


def _print_parameters(view: ArmSummary, console: Console) -> None:
    moved = [(name, spread) for name, spread in view.parameters if not spread.is_zero]
    if not view.parameters:
        return
    _line(console, f"\nmost drifted parameters at step {view.last_step}", "bold")
    if not moved:
        _line(console, f"none: all {len(view.parameters)} are exactly the baseline's")
        return
    table = _table(["parameter"], ["relative L2"])
    for name, spread in moved[:TOP]:
        table.add_row(as_text(name), spread_cell(spread, scientific, relative=True))
    console.print(table, highlight=False)
    if len(view.parameters) > TOP:
        _line(console, f"{min(TOP, len(moved))} of {len(view.parameters)}", "dim")


def _print_events(view: ArmSummary, console: Console) -> None:
    events = [(run.seed, event) for run in view.seeds for event in run.events]
    if not events:
        return
    events.sort(key=lambda pair: (pair[1].step, pair[0]))
    table = _table(["step", "seed", "kind", "what happened"], [])
    for seed, event in events[:TOP]:
        text = f"{event.layer}: {event.text}" if event.layer else event.text
        table.add_row(str(event.step), str(seed), event.kind, as_text(text))
    _line(console, "\nevents", "bold")
    console.print(table, highlight=False)
    if len(events) > TOP:
        _line(console, f"the first {TOP} of {len(events)}; --json has all", "dim")
