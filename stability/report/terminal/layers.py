"""Deviation of each layer's output in the terminal: the last figure, and all as a sparkline.

Leaves out heads and positions (`probe_table`), and gradients (the report).
"""

from rich import box
from rich.console import Console
from rich.table import Table

from stability.analysis.arm_view import LAYER_METRICS, ArmView, BySteps
from stability.analysis.spread import MISSING, scientific, times
from stability.report.terminal.sparkline import Scale, Sparks, evenly, linear_scale, log_scale
from stability.report.view.plain_text import as_text

__all__ = ["print_layers"]

MOST = 10
"""More steps than this are thinned."""
WRITE = {"rel_fro": scientific, "error_ratio": times, "bias_ulp": "{:+.2g}".format}


def print_layers(view: ArmView, console: Console) -> None:
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
            line = _line(found[metric], steps, sparks, scales[metric])
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


def _scale(view: ArmView, metric: str) -> Scale:
    values = [spread.mean for found in view.layers.values() for spread in found[metric].values()]
    return linear_scale(values) if metric == "bias_ulp" else log_scale(values)


def _last(values: BySteps, metric: str, step: int) -> str:
    return WRITE[metric](values[step].mean) if step in values else MISSING


def _line(values: BySteps, steps: list[int], sparks: Sparks, scale: Scale) -> str:
    return sparks.line([values[s].mean if s in values else None for s in steps], scale)
