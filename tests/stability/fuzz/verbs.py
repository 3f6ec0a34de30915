"""Calls a verb of the command line in this process, and says what it must never do.

A verb ends in time, with an exit code and without a traceback. Where it refuses, it says so in one
line that names a file which is damaged. It prints no character that a terminal obeys.
"""

import contextlib
import io
import itertools
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.cli.output import HOLDS, WRONG
from stability.cli.workspace import publish_study
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.report.live.study_index import StudyIndex
from stability.report.live.study_summary import outline_of_study, summary_of_study
from stability.report.page.html import write_page
from stability.report.view.plain_text import readable
from stability.study.checkpoints import lay_fork, resume_from
from tests.stability.fuzz.offline_wandb import OfflineRun
from tests.stability.fuzz.records import CANDIDATE, CONTROL, copy_records

__all__ = ["READERS", "Answer", "Reader", "call", "complaints", "numbers_in", "readers_of"]

SECONDS = 30
"""A verb takes 3 on a free machine: longer is a hang."""
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")
"""With a decimal point or an exponent; not the middle of a checksum or a version."""
QUOTED = re.compile(r"b'[^'\n]*(?:\n[^'\n]*){0,2}'|b\"[^\"\n]*(?:\n[^\"\n]*){0,2}\"")
"""Bytes of a file, shown as such: the start of a line, which a terminal may break."""

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
    stubs: Mapping[str, Any] = field(default_factory=dict)
    """What takes the place of training or of a long measurement, by its dotted name."""


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


def call(words: Words, seconds: float = SECONDS, stubs: Mapping[str, Any] | None = None) -> Answer:
    """Run a verb, or a function that reads; what it prints is encoded as for a terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    err.reconfigure(errors="backslashreplace")
    code, trouble = -1, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _stubbed(stubs or {}), _alarm(seconds):
                code = main(words) if isinstance(words, list) else _read(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else -1
        except _Hang:
            trouble = f"no end after {seconds} s: {traceback.format_exc()[-600:]}"
        except BaseException:
            trouble = traceback.format_exc()[-1500:]
    return Answer(code, _text(out), _text(err), trouble)


@contextlib.contextmanager
def _stubbed(stubs: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(patch(name, stub))
        yield


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
    return lambda: lay_fork(_run_of(root, CANDIDATE), target, 4, lambda checkpoint: None)


def _dashboard(root: Path) -> Words:
    def look() -> None:
        index = StudyIndex(root)
        index.find()
        recorded = read_study(root / "tiny")
        outline_of_study(recorded)
        summary_of_study(recorded)

    return look


def _of_run(verb: str, arm: str, *words: str) -> Callable[[Path], Words]:
    return lambda root: [verb, str(_run_of(root, arm).root), *words]


def _of_checkpoint(*words: str) -> Callable[[Path], Words]:
    return lambda root: [*words, str(_run_of(root, CANDIDATE).root)]


def _compare_files(root: Path) -> Words:
    files = (_run_of(root, arm).checkpoint(4) for arm in (CANDIDATE, CONTROL))
    return ["compare", *map(str, files), "--json"]


def _go_on(root: Path) -> Words:
    """Return the words that go on with a study: it writes, so it is given a copy of its own."""
    copied = copy_records(root, root.parent / "resumed")
    return ["run", str(copied / "tiny.yaml"), "--out", str(copied), "--wandb", "disabled"]


def _publish(root: Path) -> Words:
    def send() -> None:
        study = root / "tiny"
        recorded = read_study(study)
        write_page(recorded, study)
        sys.stdout.write(f"{readable(publish_study(recorded, study, 'offline'))}\n")

    return send


def _train(*_: object, **__: object) -> None:
    """Stand where training would begin: all that is read before has been read."""
    raise SystemExit(HOLDS)


ANEW = {"stability.study.retrain.run_fork": _train}
TRAINING = {"stability.cli.fork._train": _train, **ANEW}
CHECKING = {
    **ANEW,
    "attention_kernels.testing.check_attention": lambda *_, **__: SimpleNamespace(
        cells=[0], passed=1, to_dict=dict
    ),
}
STUDY = {
    "stability.study.run_study.train_in_processes": lambda *_, **__: None,
    "stability.study.run_study.assay_whole_run": lambda *_, **__: None,
}
PLACES = itertools.count()
"""Each time W&B's runs go elsewhere, so that they are sent again."""
PUBLISHING = {
    "wandb.init": OfflineRun,
    "stability.tracking.publish.destination": lambda: [next(PLACES)],
}

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
    Reader("verify --all", _study("verify", "--all")),
    Reader("compare of files", _compare_files),
    Reader("deviate from a run", _of_checkpoint("deviate", "--json", "--checkpoint"), ANEW),
    Reader(
        "deviate from q, k and v",
        lambda root: ["deviate", "--json", "--qkv", str(root / "qkv.safetensors")],
    ),
    Reader("check", _of_checkpoint("check", "flash:fa2", "--json", "--from"), CHECKING),
    Reader(
        "fork, the verb",
        _of_run("fork", CANDIDATE, "--at", "2", "--set", "optimizer.lr=0.001"),
        TRAINING,
    ),
    Reader(
        "bisect",
        _of_run("bisect", "baseline", "--at", "2", "--set", "attention.implementation=flash"),
        TRAINING,
    ),
    Reader("run", _go_on, STUDY),
    Reader("publish", _publish, PUBLISHING),
    Reader("show of a probe", lambda root: ["show", str(root / "probe")]),
    Reader("report of a probe", lambda root: ["report", str(root / "probe")]),
)


def readers_of(draw: Random, count: int) -> list[Reader]:
    """Return `count` readers, each as often as any other."""
    return draw.sample(list(READERS), count)
