"""Two runs side by side in the terminal: their contract, their weights, a fork and a bisection.

Leaves out what is proven (`analysis.pair_contract`), what is compared with what
(`analysis.weight_comparison`) and the forks themselves (`study`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from stability.analysis.number_text import scientific
from stability.analysis.pair_proof import PairProof
from stability.analysis.sketch_comparison import SketchComparison
from stability.analysis.study_check import DriftCheck, PairCheck
from stability.analysis.weight_comparison import WeightComparison
from stability.records.metric_names import ALL_WEIGHTS
from stability.records.metric_table import DRIFT_METRICS, Metric
from stability.report.terminal.tables import (
    ALARM,
    FINE,
    OPEN,
    add_row,
    first_that_fits,
    plain_table,
    ruled_table,
)
from stability.report.view.plain_text import as_text, in_width, readable

__all__ = [
    "print_checks",
    "print_comparison",
    "print_drift_check",
    "print_fork",
    "print_halvings",
    "print_proof",
    "print_sketched",
]

SAMENESS_STYLE = {
    "same": FINE,
    "different by design": "",
    "different": ALARM,
    "unknown": OPEN,
}
NAME_WIDTH = 40
"""Longer names are folded rather than that a column is left out."""
LISTED = 8
OWN_WORD = "losses and what a probe saw are the runs' own word"
NOTHING = (
    "nothing is proven: the study has no arm beside its baseline, so there is no pair; record one "
    "with `stability record --arm NAME`, or add it to the study's file"
)
CAPTION = """\
rel_l2: |a - b| / |b|. w1: 1-D Wasserstein distance, blind to position;
over_std: over b's spread. sign flips: share of values that change sign."""


def print_proof(proof: PairProof, console: Console) -> None:
    """Print every comparison of two runs, and what they come to."""
    table = plain_table(["compared", _run_name(proof.first), _run_name(proof.second), ""], [])
    # where there is little room the values need it: a name or a list of packages would take it all
    longest = max(len(line.field) for line in proof.lines)
    table.columns[0].width = min(longest, max(NAME_WIDTH, console.width // 3))
    table.columns[-1].width = max(map(len, " ".join(SAMENESS_STYLE).split()))
    for line in proof.lines:
        sameness = as_text(line.sameness, style=SAMENESS_STYLE[line.sameness])
        add_row(table, line.field, line.first, line.second, sameness)
    console.print(table)
    _conclude(proof.sentence, console)
    if proof.state == "unproven":
        _conclude(f"unproven: {proof.standing or ', '.join(proof.unproven)}", console)


def print_drift_check(check: DriftCheck, console: Console) -> None:
    """Print what the drifts between two runs come to, below their proof."""
    anew = f"; {_anew(len(check.recomputed))}" if check.state == "holds" else ""
    state = "hold" if check.state == "holds" else check.state
    _conclude(f"drifts: {state}: {check.said}{anew}", console)


def print_checks(
    checks: Sequence[PairCheck], console: Console, troubles: Sequence[str] = ()
) -> None:
    """Print a line for each planned pair, each reason once, what else is wrong, how many hold."""
    if not checks:
        for trouble in [*troubles, NOTHING]:
            _conclude(trouble, console)
        return
    table = plain_table(["run", "pair", ""], [])
    for column in table.columns[:2]:
        column.no_wrap = True
    reasons: dict[str, list[str]] = {}
    for check in checks:
        name, holds = f"{check.arm}/seed-{check.seed}", check.state == "holds"
        style = SAMENESS_STYLE["same" if holds else "different"]
        add_row(table, name, as_text(check.state, style=style), check.said if holds else "")
        if not holds:
            said = check.said.removeprefix(f"{check.state}: ")
            reasons.setdefault(f"{check.state}: {said}", []).append(name)
    console.print(table)
    # one damaged file may spoil every pair of its arm; a path in a column is cut in many pieces
    lines = [f"{_first_of(names)}: {reason}" for reason, names in reasons.items()]
    if lines:
        _conclude("\n".join(lines), console)
    for trouble in troubles:
        _conclude(trouble, console)
    counts = Counter(check.state for check in checks)
    holding = counts.pop("holds", 0)
    others = "".join(f"; {count} {state}" for state, count in counts.items())
    but = ", but see above" if troubles else ""
    _conclude(f"{holding} of {len(checks)} planned pairs keep the contract{others}{but}", console)
    anew = sum(len(check.recomputed) for check in checks)
    sketched = sum(len(check.sketched) for check in checks)
    _conclude(f"{_anew(anew, sketched)}; {OWN_WORD}", console)


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _anew(count: int, sketched: int = 0) -> str:
    said = f"{_count(range(count), 'drift')} computed anew from snapshots, as on record"
    if sketched:
        # a sketch is of all weights together
        said += (
            f"; {_count(range(sketched), 'drift')} of dropped snapshots checked by sketch, rel_l2 "
            "of all weights alone"
        )
    return said


def print_comparison(
    found: WeightComparison, top: int, console: Console, contract: str = ""
) -> None:
    """Print "all", the `top` parameters of the largest `rel_l2`, and what was not compared.

    `contract` is what the pair contract says of two runs; it comes first.
    """
    moved = sorted(
        (name for name in found.drifts if name != ALL_WEIGHTS), key=lambda n: _rank(found, n)
    )
    metrics = list(DRIFT_METRICS.values())
    fewer = (metrics[:count] for count in range(len(metrics), 0, -1))
    shown = [ALL_WEIGHTS, *moved[:top]]
    _, table = first_that_fits((_drift_table(found, shown, some) for some in fewer), console)
    _print_sides(found.a, found.b, contract, console)
    console.print(table)
    if left_out := moved[top:]:
        largest = scientific(found.drifts[left_out[0]]["rel_l2"])
        more = _count(left_out, "more parameter")
        console.print(as_text(f"{more} of at most rel_l2 {largest}: see --top"))
    console.print()
    for line in _not_compared(found):
        console.print(as_text(line))
    console.print(as_text(CAPTION, style="dim"))


def print_sketched(
    found: SketchComparison, again: str, console: Console, contract: str = ""
) -> None:
    """Print what sketches tell of two sets of weights, how surely, and what they can't tell.

    `again` is the command that compares the weights themselves.
    """
    _print_sides(found.a, found.b, contract, console)
    table = plain_table(["all weights, by sketch"], [""])
    add_row(table, "equal, by their hash", "yes" if found.equal else "no")
    add_row(table, "|a - b|", scientific(found.l2))
    add_row(table, "rel_l2 = |a - b| / |b|", scientific(found.rel_l2))
    add_row(table, "cosine", _drift_cell(DRIFT_METRICS["cosine"], found.cosine))
    console.print(table)
    whose = " and ".join(found.dropped)
    _conclude(
        f"By sketch, since the study's keep has dropped the snapshot of {whose}: a distance is "
        f"{found.relative_sd:.2%} off (one sd, at most), the cosine {found.cosine_sd:.4f}, and far "
        "less of weights near one another. Single parameters, W1 and sign flips are not known; "
        "this trains anew what was dropped, to the same bits, and shows them:",
        console,
    )
    console.print(as_text(again), soft_wrap=True)
    if math.isnan(found.l2):
        _conclude("nan: weights that are not finite, or too large for a sketch", console)


def _print_sides(a: str, b: str, contract: str, console: Console) -> None:
    console.print()
    console.print(as_text(a, style="bold"))
    console.print(as_text(f"against {b}", style="bold"))
    if contract:
        console.print(as_text(contract))
    console.print()


def _rank(found: WeightComparison, name: str) -> tuple[bool, float]:
    """Return the key that sorts parameters by falling `rel_l2`, NaN before all."""
    value = found.drifts[name]["rel_l2"]
    return (False, 0.0) if math.isnan(value) else (True, -value)


def _drift_table(found: WeightComparison, names: Sequence[str], metrics: Sequence[Metric]) -> Table:
    table = ruled_table(["parameter"], [metric.short or metric.name for metric in metrics], gap=2)
    longest = min(NAME_WIDTH, max(len(name) for name in names))
    table.columns[0].width = max(longest, len("parameter"))
    for name in names:
        cells = [_drift_cell(metric, found.drifts[name][metric.name]) for metric in metrics]
        add_row(table, name, *cells, style="bold" if name == ALL_WEIGHTS else "")
    return table


def _drift_cell(metric: Metric, value: float) -> str:
    if metric.complement and math.isfinite(value):
        return "1 (exact)" if value == 1 else f"{value:.6f}"
    return scientific(value)


def _not_compared(found: WeightComparison) -> Iterator[str]:
    """Yield a line for each reason not to compare parameters, with the first names of it."""
    shapes = [f"{name} {a} and {b}" for name, (a, b) in found.shapes_differ.items()]
    reasons = [f"{name} ({reason})" for name, reason in found.not_compared.items()]
    tied = [f"{name} ({stands} stands for it)" for name, stands in found.tied.items()]
    for kind, names in (
        ("of a tensor that has another, counted once", tied),
        ("only in a", found.only_in_a),
        ("only in b", found.only_in_b),
        ("of different shapes", shapes),
        ("not comparable", reasons),
    ):
        if names:
            more = f", and {len(names) - LISTED} more: see --json" if len(names) > LISTED else ""
            yield f"{_count(names, 'name')} {kind}: {', '.join(names[:LISTED])}{more}"


def print_fork(
    name: str, at: int, drifts: Mapping[int, float], console: Console, other: str = "the parent"
) -> None:
    """Print the drift of a fork from its parent, or from `other`, by step."""
    table = plain_table([], ["step", "steps since", f"drift from {other}"])
    for step, drift in drifts.items():
        add_row(table, str(step), str(step - at), scientific(drift))
    console.print(table)
    _conclude(f"{name}: drift is relative L2", console)


class _Halving(Protocol):
    """A fork of a bisection: `study.bisect.Halving`, which a report does not import."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def drift(self) -> float: ...


def print_halvings(found: Sequence[_Halving], at: int, until: int, console: Console) -> None:
    """Print each fork of a bisection, and which parts carry the change."""
    whole, carrier = found[0], found[-1]
    table = plain_table(["changed alone"], ["drift", "of the whole"])
    for each in dict.fromkeys(found):
        drift = "diverged" if math.isinf(each.drift) else scientific(each.drift)
        share = f"{_share(each.drift, whole.drift):.0%}"
        add_row(table, ", ".join(each.parts), drift, share, style="bold" * (each == carrier))
    console.print(table)
    carries = "carries" if len(carrier.parts) == 1 else "carry"
    share = _share(carrier.drift, whole.drift)
    said = f"{', '.join(carrier.parts)} alone {carries} {share:.0%} of the drift"
    if carrier.parts == whole.parts and len(whole.parts) > 1:
        said = "neither half carries most of the drift alone: the parts act together"
    if not whole.drift:
        said = "the change moves no weight"
    _conclude(f"{said}, from step {at} to {until}.", console)


def _share(drift: float, whole: float) -> float:
    """Return the share of the whole's drift; a divergence is all of a divergence."""
    if math.isinf(whole):
        return float(math.isinf(drift))
    return drift / whole if whole else 0.0


def _conclude(sentence: str, console: Console) -> None:
    """Print a sentence below a table; outside of a terminal in one line, however long it is."""
    text = readable(sentence)
    said = in_width(text, console.width) if console.is_terminal else text
    # wrapped here, where rich would break a path that is to be copied
    console.print(as_text(f"\n{said}"), soft_wrap=True)


def _run_name(run: str) -> str:
    return "/".join(Path(run).parts[-2:])


def _count(names: Sized, noun: str) -> str:
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''}"
