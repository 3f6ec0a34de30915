"""What an experiment found: its numbers, its stated tests, and the machine and commit it ran on.

The record is a JSON file with a checksum. The figure and the table of experiments are drawn from it
alone, so that neither can show a number that is not on disk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from experiments.kit.stated_tests import DECISIONS, Decision, StatedTest
from stability.records.sealed_json import NON_FINITE, jsonable, read_sealed, write_sealed

__all__ = [
    "ExperimentRecord",
    "Findings",
    "read_experiment",
    "write_experiment",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What an experiment's `measure` returns."""

    measured: str
    """A sentence or two with the measured figures that stand beside the published ones."""
    published: Sequence[StatedTest]
    """What the source states, in the order of the source."""
    controls: Sequence[StatedTest]
    """What nobody published: these check the instrument, or show where a disagreement comes from.
    `tests` marks them."""
    rows: Sequence[Mapping[str, Any]]
    """Every measured number, as JSON values; the figure is drawn from these alone."""
    explanation: str = ""
    """Why published and measured figures differ: which control shows it, and its figures."""
    explain: InitVar[Callable[[], str] | None] = None
    """Makes the explanation, and is called only if a published statement is refuted or undecided.
    """

    def __post_init__(self, explain: Callable[[], str] | None) -> None:
        if explain and not all(test.holds for test in self.published):
            object.__setattr__(self, "explanation", explain())

    @property
    def tests(self) -> list[StatedTest]:
        """The published statements and then the controls, each marked as one."""
        return [*self.published, *(replace(test, control=True) for test in self.controls)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentRecord:
    """One run of an experiment."""

    name: str
    size: str
    settings: dict[str, Any]
    measured: str
    explanation: str
    tests: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    """Of the code that ran; ends in "-changed" if tracked files differed from it; "" if unknown."""
    seconds: float
    stated: tuple[StatedTest, ...] = field(init=False)
    """`tests` as objects."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stated", tuple(StatedTest(**test) for test in self.tests))

    @property
    def agrees(self) -> str:
        """What the published statements say together; an undecided one is no disagreement.

        `yes` if all hold, `no` if all are refuted, `in part` if some hold and some are refuted, and
        `undecided` if none of them is decided. `yes, where decided` and `no, where decided` if some
        are undecided and the rest agree with each other. `nothing published` if all that is stated
        are controls.
        """
        found = {word for word, times in self.decisions.items() if times}
        if not found:
            return "nothing published"
        if {"holds", "refuted"} <= found:
            return "in part"
        if found == {"undecided"}:
            return "undecided"
        return ("yes" if "holds" in found else "no") + ", where decided" * ("undecided" in found)

    @property
    def decisions(self) -> dict[Decision, int]:
        """How many of the published statements hold, are refuted, and are undecided."""
        words = [test.decision for test in self.stated if not test.control]
        return {word: words.count(word) for word in DECISIONS}

    @property
    def controls(self) -> Decision:
        """`holds` if every control does, `refuted` if one is, else `undecided`.

        Unless they hold, the rest proves nothing.
        """
        words = {test.decision for test in self.stated if test.control}
        return "refuted" if "refuted" in words else "undecided" if "undecided" in words else "holds"


def write_experiment(path: Path, record: ExperimentRecord) -> None:
    """Write `record`, whole or not at all, with its checksum."""
    content = asdict(record)
    del content["stated"]
    write_sealed(path, jsonable(content))


def read_experiment(path: Path) -> ExperimentRecord:
    """Return the record at `path`; ValueError if it is missing, damaged or not such a record.

    A number in `rows` that JSON does not have is a number again.
    """
    content = read_sealed(path, writer="`stability experiment`")
    names = {each.name for each in fields(ExperimentRecord) if each.init}
    if set(content) != names:
        odd = sorted(set(content) ^ names)
        raise ValueError(f"{path}: must be the record of an experiment; see {', '.join(odd)}")
    tests = {each.name for each in fields(StatedTest)}
    if not all(isinstance(test, dict) and set(test) == tests for test in content["tests"]):
        raise ValueError(
            f"{path}: tests must each have {', '.join(sorted(tests))}; a record without their "
            "decision can't tell refuted from undecided, so run the experiment again"
        )
    odd = {test["decision"] for test in content["tests"]} - {*DECISIONS}
    if odd:
        raise ValueError(
            f"{path}: decision of tests must be one of {', '.join(DECISIONS)}, got "
            f"{', '.join(sorted(map(repr, odd)))}"
        )
    content["rows"] = [
        {name: _number(value) for name, value in row.items()} for row in content["rows"]
    ]
    return ExperimentRecord(**content)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NON_FINITE else value
