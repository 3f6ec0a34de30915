"""What a comparison of two runs comes to: a line for each thing compared, and one sentence.

Leaves out what is compared (`pair_contract`, `witness_contract`).
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["OTHER_WEIGHTS", "PairProof", "ProofLine", "Sameness", "compared", "sameness_of"]

Sameness = Literal["same", "different by design", "different", "unknown"]
"""Two records of one thing; `different` breaks the contract, `unknown` is not on record."""

FINAL_WEIGHTS = "hashes.final_weights"
NO_EFFECT = "the change had no effect on the weights: both end in the same bits"
"""What is evaluated may have been changed all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofLine:
    """One thing that was compared, and what each of the two runs says of it."""

    field: str
    first: str
    second: str
    sameness: Sameness
    says: str = ""
    """What follows in words, where the two values alone don't tell."""
    changes: str = ""
    """What a declared change did, in words, where its name does not tell."""

    @property
    def sentence(self) -> str:
        """The line in words."""
        return self.says or f"{self.field} is {self.first} in one, {self.second} in the other"


OTHER_WEIGHTS = ProofLine(
    field="names of weights",
    first="some",
    second="others",
    sameness="different by design",
    changes="drift is over the weights that both have, which begin as the same bits",
)
"""Of two runs of which one has weights that the other has not, by a declared change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairProof:
    """Two runs, the axes in which they differ, and every comparison in the order of a run."""

    first: str
    second: str
    axes: tuple[str, ...]
    lines: tuple[ProofLine, ...]
    is_of_scripts: bool = False
    """Whether what computes is the user's own: a flag may change more in it than is seen."""
    standing: str = ""
    """How the parts of the contract stand, where checkpoints were adopted: nothing else is seen."""

    @property
    def breach(self) -> ProofLine | None:
        """The first comparison that breaks the contract."""
        return next((line for line in self.lines if line.sameness == "different"), None)

    @property
    def unproven(self) -> list[str]:
        """What is not on record, in words or by its name."""
        return [line.says or line.field for line in self.lines if line.sameness == "unknown"]

    @property
    def unproven_text(self) -> str:
        """What is not proven, in a clause; empty if all is."""
        if not self.unproven:
            return ""
        return self.standing or f"not on record: {', '.join(self.unproven)}"

    @property
    def had_no_effect(self) -> bool:
        """Whether something was changed, and both runs end in the same bits nonetheless."""
        same = {line.field for line in self.lines if line.sameness == "same"}
        return bool(self.axes) and FINAL_WEIGHTS in same

    @property
    def state(self) -> Literal["holds", "no pair", "unproven"]:
        """What the proof comes to, in the words of `stability verify`."""
        if self.breach is not None:
            return "no pair"
        return "unproven" if self.unproven else "holds"

    @property
    def sentence(self) -> str:
        """What the proof comes to, in one sentence."""
        if self.breach is not None:
            return f"no pair: {self.breach.sentence}"
        if self.standing:
            return f"two series of checkpoints: {self.standing}"
        said = f"a pair: they differ in {self.axes[0]} alone" if self.axes else "an A/A pair"
        if self.axes and self.is_of_scripts:
            said = f"a pair: {self.axes[0]} differs, and nothing else that was seen"
        if len(self.axes) > 1:
            said = f"a confounded pair: they differ in {', '.join(self.axes)}"
        for line in self.lines:
            said += f"; {line.changes}" if line.changes else ""
        if self.had_no_effect:
            said += f"; {NO_EFFECT}"
        return f"{said}; {self.unproven_text}" if self.unproven else said

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "first": self.first,
            "second": self.second,
            "axes": list(self.axes),
            "is_pair": self.breach is None,
            "state": self.state,
            "had_no_effect": self.had_no_effect,
            "standing": self.standing,
            "sentence": self.sentence,
            "lines": [asdict(line) for line in self.lines],
        }


def compared(field: str, a: Any, b: Any, *, is_free: bool = False) -> ProofLine:
    """Return the line that compares a with b; `is_free` where they may differ by design."""
    # a hash that only one run has is not on record yet; of anything else that is a difference
    is_unknown = a is None and b is None
    is_unknown |= field.startswith("hashes.") and not is_free and (a is None or b is None)
    sameness = "unknown" if is_unknown else sameness_of(a, b, is_free)
    return ProofLine(field=field, first=_short(a), second=_short(b), sameness=sameness)


def sameness_of(a: Any, b: Any, is_free: bool) -> Sameness:
    """Return what two records of one thing come to; `is_free` where they may differ by design."""
    if a == b:
        return "same"
    return "different by design" if is_free else "different"


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 32 else f"{text[:16]}..."
