"""Trials: in each a seed decides which records are damaged, how, and which verbs read them.

Where one record is damaged and not sealed again, its numbers may be on record no more, so none but
those of the whole study may be printed, or of the study without that file, or without its run. A
record under a right seal may say any number, and several at once leave too many studies to compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.stability.fuzz.records import Copy, ends_in_its_own_words
from tests.stability.fuzz.verbs import (
    READERS,
    Answer,
    Reader,
    call,
    complaints,
    numbers_in,
    readers_of,
)

__all__ = ["Fuzzer", "Report"]

USERS = "qkv.safetensors"
"""A file of the user's, which nothing of ours seals: it is compared as it is."""
MOST = 12
"""Records that are damaged in one trial; in a third of the trials it is one."""


@dataclass
class Report:
    """What a number of trials came to."""

    trials: int = 0
    records: int = 0
    calls: int = 0
    compared: int = 0
    """Calls whose numbers were held against those on record."""
    found: list[str] = field(default_factory=list)
    """Each complaint with its seed, what was damaged and how, and the verb."""


class Fuzzer:
    """Runs trials on a copy of the records, and knows what verbs print of whole ones."""

    def __init__(self, copy: Copy, verbs: int, seconds: float = 60.0) -> None:
        self._copy = copy
        self._verbs = verbs
        self._seconds = seconds
        self._known: dict[tuple[str, Path | None], set[str]] = {}

    def run(self, seeds: Sequence[int]) -> Report:
        """Return what the trials of these seeds came to."""
        report = Report()
        for seed in seeds:
            self.trial(seed, report)
        return report

    def trial(self, seed: int, report: Report) -> None:
        """Damage records as the seed says, and let some verbs read them."""
        draw = Random(seed)
        count = 1 if draw.random() < 1 / 3 else draw.randint(2, MOST)
        readers = readers_of(draw, self._verbs)
        with self._copy.damaged(draw, count) as done:
            answers = [(each, self._call(each)) for each in readers]
        report.trials += 1
        report.records += len(done)
        report.calls += len(answers)
        names = [path.relative_to(self._copy.folder).as_posix() for path in done]
        where = f"seed {seed}, {', '.join(map(': '.join, zip(names, done.values(), strict=True)))}"
        is_compared = len(done) == 1 and not any(map(ends_in_its_own_words, done.values()))
        is_compared = is_compared and names[0] != USERS
        for reader, answer in answers:
            wrong = complaints(answer, done)
            if is_compared:
                report.compared += 1
                strange = self._strange(reader, numbers_in(answer.out), next(iter(done)))
                if strange:
                    wrong.append(f"prints numbers that are not on record: {sorted(strange)}")
            report.found += [f"{where}, {reader.name}: {each}" for each in wrong]

    def _strange(self, reader: Reader, printed: set[str], damaged: Path) -> set[str]:
        strange = printed - self._numbers(reader, None)
        for gone in (damaged, *(p for p in damaged.parents if p.name.startswith("seed-"))):
            strange = strange and strange - self._numbers(reader, gone)
        return strange

    def _numbers(self, reader: Reader, gone: Path | None) -> set[str]:
        """Return the numbers that a verb prints of the records without one file, or one run."""
        key = (reader.name, gone)
        if key not in self._known:
            with self._copy.without(*([gone] if gone else [])):
                self._known[key] = numbers_in(self._call(reader).out)
        return self._known[key]

    def _call(self, reader: Reader) -> Answer:
        return call(reader.words(self._copy.folder), self._seconds, reader.stubs)

    def whole(self) -> Report:
        """Return what all verbs say of undamaged records: they must have nothing to refuse."""
        report = Report(trials=1)
        for reader in READERS:
            answer = self._call(reader)
            report.calls += 1
            wrong = complaints(answer, {})
            if answer.code not in (0, 1, 3, 4):
                wrong.append(f"exit code {answer.code}: {answer.err}")
            report.found += [f"undamaged, {reader.name}: {each}" for each in wrong]
        return report
