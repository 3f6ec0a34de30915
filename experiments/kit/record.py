"""What an experiment found: its numbers, its stated tests, and the machine and commit it ran on.

The record is a JSON file with a checksum. The figure and the table of experiments are drawn from it
alone, so that neither can show a number that is not on disk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from experiments.kit.stated_tests import StatedTest
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
    """Makes the explanation, and is called only if a published statement does not hold."""

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
        """`yes` if every published statement holds, `no` if none does, else `in part`.

        `nothing published` if all that is stated are controls.
        """
        held = [test.holds for test in self.stated if not test.control]
        if not held:
            return "nothing published"
        return "yes" if all(held) else "in part" if any(held) else "no"

    @property
    def controls_hold(self) -> bool:
        """Whether every control came out as stated: without that the rest proves nothing."""
        return all(test.holds for test in self.stated if test.control)


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
        raise ValueError(f"{path}: tests must each have {', '.join(sorted(tests))}")
    content["rows"] = [
        {name: _number(value) for name, value in row.items()} for row in content["rows"]
    ]
    return ExperimentRecord(**content)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NON_FINITE else value
