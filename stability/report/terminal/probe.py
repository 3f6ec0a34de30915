"""A probe in the terminal: what is wrong, then a line a layer, then what happened.

Each figure is shown at the step where it was largest, because an error that comes and goes must not
hide behind the last step. Leaves out what is wrong and how that is told (`analysis.probe_answer`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.locate import locate, sentences
from stability.analysis.looks import OperatorLimits
from stability.analysis.number_text import MISSING
from stability.analysis.probe_answer import ProbeAnswer, answer_of_probe, failures_of
from stability.analysis.probe_records import RecordedProbe, read_probe
from stability.analysis.study_records import RecordedStudy
from stability.records.events import Event
from stability.records.metric_names import is_made_here, watch_name
from stability.report.terminal.tables import (
    ALARM,
    BAD,
    OPEN,
    add_numbers,
    add_row,
    first_that_fits,
    ruled_table,
)
from stability.report.view.plain_text import as_text, readable

__all__ = ["event_lines", "located_lines", "print_found", "print_probe", "shown_lines"]

SHOWN = 8
"""Located places and events that are printed; the page has all of them."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table: a metric of one result, its heading, and its number format."""

    what: str
    metric: str
    title: str
    form: str


WORST = "worst"
"""Stands for the result in which a layer is worst."""
COLUMNS = (
    _Column(WORST, "error_ratio", "worst\nratio", ".3g"),
    _Column(WORST, "gain", "worst\ngain", "+.2%"),
    _Column(WORST, "golden_bias_ulp", "worst bias\nin ULP", "+.2g"),
    _Column("out", "rel_fro", "error\nof out", ".1e"),
    _Column("out", "error_ratio", "ratio\nout", ".3g"),
    _Column("dq", "error_ratio", "ratio\ndq", ".3g"),
    _Column("dv", "error_ratio", "ratio\ndv", ".3g"),
    _Column("dq", "rel_fro", "error\nof dq", ".1e"),
    _Column("dv", "rel_fro", "error\nof dv", ".1e"),
    _Column("out", "bias_ulp", "bias of out\nin ULP", "+.2g"),
    _Column("total", "rel_fro", "error\nin all", ".1e"),
    _Column("carried", "rel_fro", "carried\nin", ".1e"),
    _Column("dk", "error_ratio", "ratio\ndk", ".3g"),
)
"""The most important first, because a narrow terminal leaves out the last ones: the worst of all
results against FP64. With a golden on record the gradients' ratios to it take the place of their
relative errors."""


def print_probe(folder: Path, console: Console) -> ProbeAnswer:
    """Print the probe recorded in `folder`, and return its answer; ValueError as `read_probe`."""
    probed = read_probe(folder)
    record = probed.record
    console.print()
    names = ", ".join(record.shadows)
    console.print(as_text(f"{record.model}: {names} beside {_name(record.primary)}", "bold"))
    caught = len(probed.layers or record.layers)
    layers = "1 layer" if caught == 1 else f"{caught} layers"
    console.print(as_text(f"{layers}, {probed.looked_at} looked at", "dim"))
    if probed.open_end:
        console.print(as_text(probed.open_end, OPEN))
    console.print()
    answer = answer_of_probe(probed)
    for line in shown_lines(answer):
        styles = (
            ALARM * (line in answer.failures),
            OPEN * (line in answer.unseen),
            "dim" * (line in answer.unsure),
        )
        console.print(as_text(line, "".join(styles)))
    for shadow in probed.shadows:
        console.print()
        if shadow:
            console.print(as_text(shadow, "bold"))
        columns = [column for column in COLUMNS if _wanted(probed, shadow, column)]
        fewer = (columns[:count] for count in range(len(columns), min(len(columns), 2) - 1, -1))
        tables = (_table(probed, shadow, shown) for shown in fewer)
        console.print(first_that_fits(tables, console)[1])
    console.print()
    console.print(as_text(_caption(probed), "dim"))
    for line in event_lines(probed.events):
        console.print(line)
    return answer


def print_found(study: RecordedStudy, console: Console) -> None:
    """Print what stands out in the runs of a study, and what happened in them; often nothing."""
    limits = OperatorLimits.of(study.policy)  # what the verdict allows does not stand out
    for arm in study.arms:
        for seed, run in arm.runs.items():
            where = f"{arm.name}, seed {seed}"
            for line in failures_of(run.metrics, (), (), ()):
                console.print(as_text(f"{where}: {line}", ALARM))
            for line in sentences(locate(run.metrics, limits))[:SHOWN]:
                console.print(as_text(f"{where}: {line}"))
            for line in event_lines(run.events):
                console.print(Text.assemble(f"{where}  ", line) if line.plain else line)


def located_lines(probed: RecordedProbe) -> list[str]:
    """Return what is wrong as sentences, the worst first, or one that says that nothing is."""
    return shown_lines(answer_of_probe(probed))


def shown_lines(answer: ProbeAnswer) -> list[str]:
    """Return the first sentences of what was found and one that counts the rest, then what is not
    known: the noise and what is unseen."""
    lines = list(answer.said[:SHOWN])
    if len(answer.said) > SHOWN:
        lines.append(f"and {len(answer.said) - SHOWN} more places")
    lines += answer.unsure[:SHOWN]
    lines += answer.unseen[:SHOWN]
    if len(answer.unseen) > SHOWN:
        lines.append(f"and {len(answer.unseen) - SHOWN} more that were not seen")
    return lines


def event_lines(events: Iterable[Event]) -> list[Text]:
    """Return a line for each of the first events, and one that counts the rest."""
    events = list(events)
    if not events:
        return []
    lines = [Text()]
    for event in events[:SHOWN]:
        where = f"step {event.step}" + (f", {event.layer}" if event.layer else "")
        style = BAD if event.kind == "alert" else OPEN
        lines.append(Text.assemble((event.kind, style), as_text(f"  {where}: {event.text}")))
    if len(events) > SHOWN:
        lines.append(Text(f"and {len(events) - SHOWN} more", style="dim"))
    return lines


def _table(probed: RecordedProbe, shadow: str, shown: Sequence[_Column]) -> Table:
    table = ruled_table(["layer"], [column.title for column in shown], gap=2)
    layers = probed.layers_of(shadow)
    table.columns[0].min_width = max(map(cell_len, map(readable, layers)), default=0)
    logits = {layer: probed.by_step(watch_name("max_logit", layer=layer)) for layer in layers}
    if any(logits.values()):
        add_numbers(table, "max\nlogit")
    for layer in layers:
        cells = [_cell(probed, shadow, layer, column) for column in shown]
        if any(logits.values()):
            cells.append(_largest(logits[layer].values(), ".3g"))
        add_row(table, layer, *cells)
    return table


def _wanted(probed: RecordedProbe, shadow: str, column: _Column) -> bool:
    if probed.record.golden and column.what in ("dq", "dv") and column.metric == "rel_fro":
        return False
    return any(
        probed.series(layer, what, column.metric, shadow=shadow)
        for layer in probed.layers
        for what in _results(probed, column)
    )


def _results(probed: RecordedProbe, column: _Column) -> list[str]:
    """Return the results that a column is of; of the worst, all that are made in the layer."""
    return list(filter(is_made_here, probed.compared)) if column.what == WORST else [column.what]


def _cell(probed: RecordedProbe, shadow: str, layer: str, column: _Column) -> str:
    if column.what == WORST:
        return _worst(probed, shadow, layer, column)
    values = probed.series(layer, column.what, column.metric, shadow=shadow)
    if column.metric != "bias_ulp" or not values:
        return _largest(values.values(), column.form)
    errors = probed.series(layer, column.what, "bias_ulp_se", shadow=shadow)
    finite = [step for step in values if math.isfinite(values[step])]
    if not finite:
        return MISSING
    step = max(finite, key=lambda at: abs(values[at]) / (errors[at] or math.inf))
    return f"{values[step]:{column.form}} ±{errors[step]:.1g}"


def _worst(probed: RecordedProbe, shadow: str, layer: str, column: _Column) -> str:
    """Return the worst value of all results, and whose it is; of a gain or bias the mean's."""
    found = {}
    for what in _results(probed, column):
        values = probed.series(layer, what, column.metric, shadow=shadow).values()
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            # a single look of these is mostly noise
            mean = sum(finite) / len(finite) / _unit(probed, shadow, layer, what, column.metric)
            found[what] = max(finite) if column.metric == "error_ratio" else mean
    if not found:
        return MISSING
    what = max(found, key=lambda name: abs(found[name]))
    return f"{found[what]:{column.form}} {what}"


def _unit(probed: RecordedProbe, shadow: str, layer: str, what: str, metric: str) -> float:
    """Return how many ULPs a bias is shown in units of: where the baseline errs by more, more."""
    if metric != "golden_bias_ulp":
        return 1.0
    found = probed.series(layer, what, "baseline_over_rounding", shadow=shadow).values()
    finite = [value for value in found if math.isfinite(value)]
    return max(1.0, sum(finite) / len(finite)) if finite else 1.0


def _largest(values: Iterable[float], form: str) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return format(max(finite, key=abs), form) if finite else MISSING


def _caption(probed: RecordedProbe) -> str:
    lines = ["error: |candidate - baseline| / |baseline|, at the step where it was largest."]
    if probed.record.golden:
        lines.append("ratio: |candidate - FP64| / |baseline - FP64|; flash-attn's tests allow 2.")
        lines.append("gain: slope on FP64, less 1; bias: mean signed error against FP64, in ULPs,")
        lines.append("or in k ULPs where the baseline errs by k roundings; means over the looks.")
    if "total" in probed.compared:
        lines.append(
            "in all: in the candidate's own stream; carried in: what that stream's inputs add."
        )
    return "\n".join(lines)


def _name(description: dict[str, object]) -> str:
    profile = description.get("profile")
    return f"{description.get('implementation', '?')}" + (f":{profile}" if profile else "")
