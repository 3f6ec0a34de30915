"""How attention's errors spread: over their sizes in ULPs, and along the sequence.

Leaves out everything by layer, head and step (`probe_charts`).
"""

import math
from collections.abc import Sequence

from stability.analysis.layer_tables import LayerTable
from stability.analysis.probe_records import Observed
from stability.metrics.ulp import ULP_EDGES
from stability.records.metric_names import ULP_HISTOGRAM, deviation_name
from stability.report.page.chart import Chart, Section, choices_of, make_figure
from stability.report.page.deviation_charts import DEVIATION_METRICS, layer_lines

__all__ = ["histogram_section", "position_section"]


def histogram_section(observed: Sequence[Observed]) -> Section | None:
    """Return the shares of errors by size in ULPs, a line for each layer."""
    traces = []
    for one in observed:
        for what in one.compared:
            table = {}
            for layer in one.layers:
                counts = one.counts(deviation_name(layer, what, ULP_HISTOGRAM, shadow=one.shadow))
                total = sum(counts)
                if total and len(counts) == len(_BINS):
                    table[layer] = {i: count / total for i, count in enumerate(counts)}
            meta = {**one.choice, "what": what}
            for trace in layer_lines(LayerTable.of_steps(table), meta) if table else ():
                drawn = [float(f"{y:.7g}") or None for y in trace["y"].tolist()]
                hover = "%{x}: %{y:.4%}"
                traces.append({**trace, "x": list(_BINS), "y": drawn, "hovertemplate": hover})
    if not traces:
        return None
    least = min(y for trace in traces for y in trace["y"] if y)
    chart = Chart(
        key="histogram",
        title="Errors in units of the last place",
        caption=(
            "Share of all values of all steps that were looked at. Two results of one format "
            "differ by whole ULPs, so between 0.5 and 1 there is next to nothing."
        ),
        good="a narrow peak that is the same on both sides of zero.",
        bad="one side higher than the other: a bias; long tails: cancellation or a wrong mask.",
        figure=make_figure(
            traces,
            height=430,
            xaxis={"type": "category", "title": {"text": "error in ULPs"}},
            yaxis={
                "type": "log",
                "title": {"text": "share of values"},
                "dtick": 1,
                "range": [math.floor(math.log10(least)) - 0.1, 0.1],
            },
        ),
    )
    return Section(
        key="histogram",
        title="How large, in which direction",
        intro="",
        charts=(chart,),
        choices=choices_of(traces),
    )


def _bins() -> tuple[str, ...]:
    edges = [f"{edge:g}" for edge in ULP_EDGES]
    inner = [f"{a} to {b}" for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007 reads plainer
    return (f"below {edges[0]}", *inner, f"above {edges[-1]}")


_BINS = _bins()


def position_section(observed: Sequence[Observed]) -> Section | None:
    """Return the error along the sequence, a line for each layer."""
    traces = []
    for one in observed:
        ranges = one.parts("positions")
        names = [part.removeprefix("positions_").replace("_", " to ") for part in ranges]
        for what in one.compared:
            for metric in DEVIATION_METRICS:
                table = {}
                for layer in one.layers:
                    values = [one.worst(layer, what, metric, part) for part in ranges]
                    if any(value is not None for value in values):
                        table[layer] = {i: v or math.nan for i, v in enumerate(values)}
                meta = {**one.choice, "what": what, "metric": metric}
                for trace in layer_lines(LayerTable.of_steps(table), meta) if table else ():
                    hover = "%{y:.6g} at positions %{x}"
                    traces.append({**trace, "x": names, "hovertemplate": hover})
    if not traces:
        return None
    chart = Chart(
        key="positions",
        title="Along the sequence",
        caption="The largest over the steps that were looked at.",
        good="flat, or falling where a longer softmax averages more.",
        bad="a jump at one range: a block's edge, a mask, a window.",
        figure=make_figure(
            traces,
            height=430,
            xaxis={"type": "category", "title": {"text": "positions"}},
            yaxis={"title": {"text": "deviation"}},
        ),
    )
    return Section(
        key="positions",
        title="Which positions",
        intro="",
        charts=(chart,),
        choices=choices_of(traces),
    )
