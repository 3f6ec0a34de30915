"""Forks in the terminal: how far one went from its parent, and what a bisection found.

Leaves out the forks themselves (`study.fork`, `study.bisect`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.number_text import scientific

__all__ = ["print_fork", "print_halvings"]


class _Halving(Protocol):
    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def drift(self) -> float: ...


def print_fork(name: str, at: int, drifts: Mapping[int, float], console: Console) -> None:
    """Print the drift of a fork from its parent, by step."""
    table = Table(box=None, header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("steps since", justify="right")
    table.add_column("drift from the parent", justify="right")
    for step, drift in drifts.items():
        table.add_row(str(step), str(step - at), scientific(drift))
    console.print(table)
    console.print(f"\n{name}: drift is relative L2", highlight=False, markup=False, soft_wrap=True)


def print_halvings(found: Sequence[_Halving], at: int, until: int, console: Console) -> None:
    """Print each fork of a bisection, and which parts carry the change."""
    whole, carrier = found[0], found[-1]
    table = Table(box=None, header_style="bold")
    table.add_column("changed alone")
    table.add_column("drift", justify="right", no_wrap=True)
    table.add_column("of the whole", justify="right", no_wrap=True)
    for each in dict.fromkeys(found):
        share = _share(each.drift, whole.drift)
        style = "bold" if each == carrier else ""
        table.add_row(Text(", ".join(each.parts)), _drift(each.drift), f"{share:.0%}", style=style)
    console.print(table)
    share = _share(carrier.drift, whole.drift)
    parts = ", ".join(carrier.parts)
    said = f"{parts} alone carr{'ies' if len(carrier.parts) == 1 else 'y'} {share:.0%} of the drift"
    if carrier.parts == whole.parts and len(whole.parts) > 1:
        said = "neither half carries most of the drift alone: the parts act together"
    if not whole.drift:
        said = "the change moves no weight"
    console.print(
        f"\n{said}, from step {at} to {until}.", highlight=False, markup=False, soft_wrap=True
    )


def _share(drift: float, whole: float) -> float:
    """Return the share of the whole's drift; a divergence is all of a divergence."""
    if math.isinf(whole):
        return float(math.isinf(drift))
    return drift / whole if whole else 0.0


def _drift(drift: float) -> str:
    return "diverged" if math.isinf(drift) else scientific(drift)
