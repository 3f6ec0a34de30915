"""One operator that a training ran, with its dtypes and whose it was: a row of a witness.

Loaded in the processes of recorded trainings as well (`recorder.inside`), so on Python 3.9 and by
nothing but the standard library. Leaves out how rows are found (`probe.executed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Literal, Tuple

__all__ = ["ExecutedRow", "Part", "Pass"]

Part = Literal["linear", "attention", "optimizer", "unowned"]
"""Which claim an operator belongs to: `linear` is every product outside attention and optimizer.
`unowned` are those of a backward that belong to no module, as a tensor's hook or a node made before
the look: nobody's claim, but compared between the runs of a pair."""
Pass = Literal["forward", "backward", "update"]


@dataclass(frozen=True, order=True)  # slots came with Python 3.10
class ExecutedRow:
    """One operator with the dtypes that it was called with and what it returned."""

    part: Part
    module: str
    """The dotted path of the module, or `layer_<i>.attention`; empty for the model itself."""
    during: Pass
    operator: str
    """torch's name, e.g. `aten::mm`; `call` is an attention function as a whole."""
    operands: Tuple[str, ...]
    """Dtypes of what is multiplied; of q, k and v, and what else a fused operator was given."""
    result: str

    @property
    def values(self) -> List[Any]:
        """The fields in order, as JSON has them."""
        whose = [self.part, self.module, self.during]
        return [*whose, self.operator, list(self.operands), self.result]
