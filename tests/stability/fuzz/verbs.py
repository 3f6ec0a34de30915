"""Calls a verb of the command line in this process, and says what it must never do.

A verb ends in time, with an exit code and without a traceback. Where it refuses, it says so in one
line that names a file which is damaged. It prints no character that a terminal obeys.
"""

import contextlib
import io
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.cli.output import WRONG
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.report.live.study_index import StudyIndex
from stability.report.live.study_summary import outline_of_study, summary_of_study
from stability.report.view.plain_text import readable
from stability.study.checkpoints import lay_fork, resume_from
from tests.stability.fuzz.records import CANDIDATE, CONTROL

__all__ = ["READERS", "Answer", "Reader", "call", "complaints", "numbers_in", "readers_of"]

SECONDS = 30
"""A verb takes 3 on a free machine: longer is a hang."""
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")
"""With a decimal point or an exponent; not the middle of a checksum or a version."""
QUOTED = re.compile(r"b'[^'\n]*'|b\"[^\"\n]*\"")
"""Bytes of a file, shown as such."""

Words = list[str] | Callable[[], object]


@dataclass(frozen=True)
class Answer:
    """What a verb said; `code` is -1 where it raised, and `trouble` says what."""

    code: int
    out: str
    err: str
    trouble: str = ""


@dataclass(frozen=True)
class Reader:
    """A verb with its words, or a function that reads as a part of one does."""

    name: str
    words: Callable[[Path], Words]


class _Hang(BaseException):
    """The verb has not ended in time."""


def _ring(*_: object) -> None:
    raise _Hang


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(words: Words, seconds: float = SECONDS) -> Answer:
    """Run a verb, or a function that reads; what it prints is encoded as for a terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    err.reconfigure(errors="backslashreplace")
    code, trouble = -1, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _alarm(seconds):
                code = main(words) if isinstance(words, list) else _read(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else -1
        except _Hang:
            trouble = f"no end after {seconds} s: {traceback.format_exc()[-600:]}"
        except BaseException:
            trouble = traceback.format_exc()[-1500:]
    return Answer(code, _text(out), _text(err), trouble)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def _read(function: Callable[[], object]) -> int:
    """Call a reader as `stability` calls a verb: these two are told in a line, others are bugs."""
    try:
        function()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{readable(' '.join(str(error).split()))}\n")
        return WRONG
    return 0


def complaints(answer: Answer, damaged: Mapping[Path, str]) -> list[str]:
    """Return what is wrong with an answer about a study in which these files are damaged."""
    found = [answer.trouble] if answer.trouble else []
    said = answer.out + answer.err
    if "Traceback" in said:
        found.append(f"a traceback is printed: {said[-800:]}")
    if OBEYED.search(said):
        at = OBEYED.search(said).start()  # pyright: ignore[reportOptionalMemberAccess]
        found.append(
            f"a character is printed that a terminal obeys: {said[max(0, at - 60) : at + 20]!r}"
        )
    if answer.code == WRONG:
        lines = said.splitlines() if not answer.err else answer.err.splitlines()
        if len(lines) != 1:
            found.append(f"must be told in one line, is told in {len(lines)}: {said[:500]}")
        if not any(name in said for path, how in damaged.items() for name in _names(path, how)):
            found.append(f"names no damaged file: {said[:500]}")
    return found


def _names(path: Path, how: str) -> Iterator[str]:
    """Give what a line may call a damaged record: its file, its folder; of one that is gone more.

    Where nothing is left, a verb can only say what the study has not on record.
    """
    yield path.name
    yield path.parent.name
    if how == "gone":
        yield "tiny"


def numbers_in(text: str) -> set[str]:
    """Return the numbers that a verb has printed."""
    return set(NUMBER.findall(QUOTED.sub("", text)))


def _study(*words: str) -> Callable[[Path], Words]:
    verb, *rest = words
    return lambda root: [verb, str(root / "tiny"), *rest]


def _run_of(root: Path, arm: str) -> RunPaths:
    return RunPaths.for_run(root / "tiny", arm, 0)


def _figure(*words: str) -> Callable[[Path], Words]:
    return lambda root: [
        "figure",
        str(root / "tiny"),
        *words,
        "--out",
        str(root.parent / "out.svg"),
    ]


def _pair(verb: str, *words: str) -> Callable[[Path], Words]:
    return lambda root: [
        verb,
        *(str(_run_of(root, arm).root) for arm in (CONTROL, "baseline")),
        *words,
    ]


def _candidate(verb: str) -> Callable[[Path], Words]:
    runs = ("baseline", CANDIDATE)
    return lambda root: [verb, *(str(_run_of(root, arm).root) for arm in runs)]


def _resume(root: Path) -> Words:
    run = _run_of(root, CANDIDATE)
    return lambda: resume_from(run, read_manifest(run.manifest), lambda _: None)


def _fork(root: Path) -> Words:
    target = RunPaths(root.parent / "fork" / "seed-0")
    return lambda: lay_fork(_run_of(root, CANDIDATE), target, 4, 1e-8)


def _dashboard(root: Path) -> Words:
    def look() -> None:
        index = StudyIndex(root)
        index.find()
        recorded = read_study(root / "tiny")
        outline_of_study(recorded)
        summary_of_study(recorded)

    return look


READERS: Sequence[Reader] = (
    Reader("show", _study("show")),
    Reader("show --json", _study("show", "--json")),
    Reader("show --arm", _study("show", "--arm", CANDIDATE)),
    Reader("show --arm --json", _study("show", "--arm", CANDIDATE, "--json")),
    Reader("verify", _study("verify")),
    Reader("verify --json", _study("verify", "--json")),
    Reader("verify of two runs", _pair("verify")),
    Reader("verify of a candidate", _candidate("verify")),
    Reader("verdict", _study("verdict")),
    Reader("verdict --json", _study("verdict", "--json")),
    Reader("compare", _pair("compare")),
    Reader("compare --json", _pair("compare", "--json")),
    Reader("figure ladder", _figure()),
    Reader("figure drift", _figure("--what", "drift")),
    Reader("figure heatmap", _figure("--what", "heatmap")),
    Reader("figure waterfall", _figure("--what", "waterfall")),
    Reader("report", _study("report")),
    Reader("workspace --json", _study("workspace", "--json")),
    Reader("dashboard", _dashboard),
    Reader("resume", _resume),
    Reader("fork", _fork),
    Reader("show of a probe", lambda root: ["show", str(root / "probe")]),
    Reader("report of a probe", lambda root: ["report", str(root / "probe")]),
)


def readers_of(draw: Random, count: int) -> list[Reader]:
    """Return `count` readers, each as often as any other."""
    return draw.sample(list(READERS), count)
