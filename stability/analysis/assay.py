"""Whether wrong candidates would have been seen: what the planted faults of a study have shown.

A candidate passes only where the same instruments, on the same candidate, find each planted fault
at the levels at which its table says that it must be found. Where one is missed, or none was
planted, there is NO ASSAY: nothing was found, and it is not known that something would have been.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ArmAssay", "AssayState"]

AssayState = Literal["sensitive", "blind", "not measured", "not applicable"]
"""`blind`: a fault was missed. `not applicable`: the arm changes nothing a fault is planted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmAssay:
    """What planted faults say of the sight of the instruments on one arm."""

    state: AssayState
    sentence: str
    """The finding in one sentence for a reader, with what was missed."""
    missed: Sequence[str] = ()
    """Each fault with the level at which it was missed: `dk_gain at the operator`."""
    faults: int = 0
    """How many faults were planted."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "missed": list(self.missed)
        }
