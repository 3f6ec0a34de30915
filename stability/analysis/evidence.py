"""What the evidence on one level says of one arm: the form in which four levels reach a verdict.

A candidate is judged on four levels (operator, gradient, training, outcome), each in a module of
its own, by figures that have nothing in common. All of them answer in the one form below, so that
the verdict can be formed by intersection: PASS only where every level holds, FAIL where one is
surely harmed. A level can also be silent, and then it says why: it does not apply to what the arm
changes, or it was not measured.

Two p-values go with each answer, because "no harm was found" and "harm is excluded" are two
findings. `p_harmed` is the chance of evidence as strong as this if the harm does not exceed its
limit; `p_holds` is that chance if it does. A fact that leaves nothing to chance, such as weights
that are NaN, has the p-value 0. Leaves out how a level is measured and how levels are combined
(`verdict`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stability.records.figure_table import FIGURES, figure_of

__all__ = [
    "LEVELS",
    "Level",
    "LevelEvidence",
    "LevelState",
    "agreeing",
    "listed",
    "silent_level",
]

Level = Literal["operator", "gradient", "training", "outcome"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""In the order in which an error spreads: from one attention call to the result of training."""

LevelState = Literal["holds", "harmed", "undecided", "not applicable", "not measured"]
"""`not applicable`: the change can't be seen there, and the verdict rests on the other levels.
`not measured`: it could be, and was not; no verdict can pass without it."""

_SILENT = {
    "not applicable": "The level does not apply: ",
    "not measured": "Nothing was measured: ",
}
"""How the sentence of a level begins that says nothing, by its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelEvidence:
    """What one level says of one arm."""

    level: Level
    state: LevelState
    sentence: str
    """The finding as a plain sentence with the worst place, the figure, its interval `[low, high]`
    and its limit; what may follow it is description. Each sentence ends in a full stop."""
    cell: str = ""
    """The same in at most 16 characters, for the table of four levels by arms: `E 1.02`."""
    decides: str = ""
    """What would decide it, without a full stop; empty where it is decided."""
    p_harmed: float = math.nan
    """How likely such evidence is if the harm stays within its limit; NaN where there is none."""
    p_holds: float = math.nan
    """How likely such evidence is if the harm exceeds its limit; NaN where there is none."""
    seeds_decide: bool = True
    """Whether more seeds may decide it, as far as its own evidence knows, where it is undecided."""
    in_part: str = ""
    """Where not all was seen: what was, and what is left out, as the sentence ends."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind the sentence by name, e.g. `error_ratio`, `gain`, `excess_low`."""

    def __post_init__(self) -> None:
        unknown = {figure_of(name) for name in self.figures} - FIGURES[self.level].keys()
        assert not unknown, f"{self.level}: {unknown} stand in no table of figures"

    @property
    def reason(self) -> str:
        """The text, for a reader who has read the state before it."""
        return self.text.removeprefix(_SILENT.get(self.state, ""))

    @property
    def text(self) -> str:
        """The sentence, and what would decide it."""
        return f"{self.sentence} To decide it: {self.decides}." if self.decides else self.sentence

    @property
    def likely_seeds(self) -> int:
        """How many seeds `decides` asks for, by their scatter; 0 where it names no number."""
        found = re.search(r"at this scatter \(--seeds (\d+)\)", self.decides)
        return int(found[1]) if found else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name; NaN and infinities are still numbers."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "figures": dict(self.figures)
        }


def silent_level(
    level: Level, state: LevelState, reason: str, decides: str = "", *, cell: str = ""
) -> LevelEvidence:
    """Return the evidence of a level that says nothing; `reason` is a clause without full stop."""
    sentence = f"{_SILENT[state]}{reason}."
    return LevelEvidence(level=level, state=state, sentence=sentence, cell=cell, decides=decides)


def listed(levels: Sequence[Level]) -> str:
    """Return levels as a subject: `the gradient level`, `the operator and outcome levels`."""
    *first, last = levels
    names = f"{', '.join(first)} and {last}" if first else last
    return f"the {names} level{'s' if first else ''}"


def agreeing(levels: Sequence[Level], verb: Literal["is", "does", "holds"]) -> str:
    """Return the form of a verb that agrees with levels as a subject."""
    return verb if len(levels) == 1 else {"is": "are", "does": "do", "holds": "hold"}[verb]
