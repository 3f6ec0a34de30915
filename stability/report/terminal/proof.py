"""A proof of the pair contract in the terminal.

Leaves out what is proven (`analysis.pair_contract`).
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.pair_contract import PairProof

__all__ = ["print_proof", "print_proofs"]

_STYLE = {
    "same": "green",
    "different by design": "cyan",
    "different": "bold red",
    "unknown": "yellow",
}


def print_proof(proof: PairProof, console: Console) -> None:
    """Print every comparison of two runs, and what they come to."""
    table = Table(box=None, header_style="bold")
    for name in ("compared", _name(proof.first), _name(proof.second), ""):
        table.add_column(Text(name), no_wrap=name in ("compared", ""), overflow="fold")
    for line in proof.lines:
        sameness = Text(line.sameness, style=_STYLE[line.sameness])
        table.add_row(Text(line.field), Text(line.first), Text(line.second), sameness)
    console.print(table)
    console.print(f"\n{proof.sentence}", highlight=False, markup=False, soft_wrap=True)


def print_proofs(proofs: list[PairProof], console: Console) -> None:
    """Print a line for each pair of a study."""
    table = Table(box=None, header_style="bold")
    for name in ("run", "contract"):
        table.add_column(name, no_wrap=name == "run")
    for proof in proofs:
        style = _STYLE["different" if proof.breach else "same"]
        table.add_row(Text(_name(proof.second)), Text(proof.sentence, style=style))
    console.print(table)
    broken = sum(proof.breach is not None for proof in proofs)
    console.print(
        f"\n{len(proofs) - broken} of {len(proofs)} pairs keep the contract", highlight=False
    )


def _name(run: str) -> str:
    return "/".join(Path(run).parts[-2:])
