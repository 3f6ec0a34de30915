"""Runs a command so that the training in it is recorded: no line of it is changed.

The command gets a folder first on `PYTHONPATH`, whose `sitecustomize` loads the recorder into every
Python process, and variables that say what to record. Its output goes where it went before; the
last lines are kept for a message. Leaves out what is made of the spool (`spooled`).
"""

import codecs
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Asked", "Launched", "environment_of", "launch"]

_STARTUP = Path(__file__).parent / "inside" / "startup"
_KEPT_LINES = 100
_LOOK_S = 1.0
_KEPT_CHARACTERS = 2000
"""Of a line: a progress bar is one line of megabytes."""
_BAR = re.compile(r"[^|]*\d+%\|")
"""What tqdm writes."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)|[\w.-]+: error: ")
"""How Python begins the line after a traceback, which shows the line of code before it; and how
argparse begins its own."""
_OF_LAUNCHER = re.compile(r"[\w.]*ChildFailedError(?::|$)")
"""What torchrun says last, whatever a rank has died of."""
_NEXT = re.compile(r"Traceback \(most|[EWI]\d{4} \d\d:")
"""What no more belongs to an error: the next one, or a line of a launcher's log."""
_ADVICE = "Set TORCHDYNAMO_VERBOSE=1"
"""How the advice begins that ends an error in a compiled graph, below the script's own frames."""
_RAISED = re.compile(r"[\w.]+\.[A-Z]\w+: ")
_INNER = "Developer debug context:"
"""What an error's own line looks like, and before what dynamo tells of the error inside of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a training is to be given, and what is to be kept of it."""

    seed: int
    steps: int = 0
    """End it after as many updates; 0: it ends by itself."""
    snapshot_steps: Sequence[int] = ()
    """Updates after which its state is kept, besides the first and the last; none: 1, 2, 5, ..."""
    deterministic: bool = True
    nudge: tuple[int, int] = (0, 0)
    """Units in the last place, and the number of the draw."""
    attention: str = ""
    """What takes the place of `scaled_dot_product_attention`; empty for nothing."""
    looks: Sequence[int] = ()
    """Updates, from 0, whose dtypes are looked at; none: the first two, then 1, 2, 5, ..."""
    held_out: str = ""
    """What is held out: MODULE:FUNCTION, "all" that the script evaluates, or "none"; empty: what it
    evaluates every time and does not train on."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """What the instrument looks at, as `config.commands.probe_settings`; empty for none."""
    same_start: bool = False
    """Whether it is given the baseline's start weights before its first update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How a command ended."""

    code: int
    last_lines: str

    @property
    def last_words(self) -> list[str]:
        """What it said at the end: from its last error on, or else the last lines; no bar."""
        lines = [x for x in self.last_lines.splitlines() if x.strip() and not _BAR.match(x)]
        if in_graph := _raised_in_graph(lines):
            return in_graph
        errors = [place for place, line in enumerate(lines) if _ERROR.match(line)]
        own = [place for place in errors if not _OF_LAUNCHER.match(lines[place])]
        said = lines[(own or errors)[-1] :][:3] if errors else lines[-3:]
        return list(takewhile(lambda line: not _NEXT.match(line), said))


def environment_of(
    asked: Asked, env: Mapping[str, str], *, observes: bool = True
) -> dict[str, str]:
    """Return all variables of the command's process, but for `STABILITY_SPOOL`.

    Unless it `observes`, the training is given all that it is asked to be given, and of what it
    does only the updates are counted and the last state is kept.
    """
    ours = {
        "STABILITY_SEED": str(asked.seed),
        "STABILITY_STEPS": str(asked.steps),
        "STABILITY_SNAPSHOTS": ",".join(map(str, asked.snapshot_steps)),
        "STABILITY_NUDGE": f"{asked.nudge[0]} {asked.nudge[1]}",
        "STABILITY_ATTENTION": asked.attention,
        "STABILITY_LOOKS": ",".join(map(str, asked.looks)),
        "STABILITY_HELD_OUT": asked.held_out,
        "STABILITY_PROBE": json.dumps(dict(asked.probe)) if asked.probe else "",
        "STABILITY_OBSERVES": str(int(observes)),
        "STABILITY_TRIAL": "",
        "STABILITY_DETERMINISTIC": str(int(asked.deterministic)),
        # the order of a set may be the order of a sum
        "PYTHONHASHSEED": "0",
    }
    if asked.deterministic:
        ours["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    merged = {**os.environ, **ours, **env}
    path = merged.get("PYTHONPATH", "")
    return {**merged, "PYTHONPATH": f"{_STARTUP}{os.pathsep}{path}" if path else str(_STARTUP)}


def launch(
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    folder: Path | None = None,
    output: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Launched:
    """Run a command to its end, in `folder`, its output beside this one's or in the file `output`.

    `meanwhile` is called about every second while it runs. KeyboardInterrupt, once the command has
    ended, if the user or a scheduler interrupts. ValueError if there is no such command.
    """
    try:
        process = subprocess.Popen(
            list(words),
            env=dict(variables),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"record: {words[0]}: {error.strerror}; is it installed?") from error
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with ExitStack() as stack:
        to: TextIO = sys.stdout
        if output is not None:
            to = stack.enter_context(output.open("w", encoding="utf-8"))
        reader = threading.Thread(target=_pass_on, args=(process, to, lines), daemon=True)
        passed = stack.enter_context(_passing_signals(process))
        reader.start()
        try:
            while True:
                try:
                    code = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    # what is shown of a training must not end its record
                    with suppress(Exception):
                        meanwhile()
        except KeyboardInterrupt:
            # the terminal has sent it to the command too, which may save something first
            process.wait()
            raise
        finally:
            # a process that the command left behind may still hold the pipe
            reader.join(timeout=5)
    if passed:  # what it was to be recorded for ends too, as a study's further runs
        raise KeyboardInterrupt
    return Launched(code=code, last_lines="\n".join(line.split("\r")[-1] for line in lines))


def _raised_in_graph(lines: list[str]) -> list[str]:
    """Return what tells of an error in a compiled graph, above the advice that ends it."""
    if not any(line.startswith(_ADVICE) for line in lines[-3:]):
        return []
    raised = [line for line in lines if _RAISED.match(line)]
    inner = [line.partition(":")[2].strip() for line in lines if line.strip().startswith(_INNER)]
    return [*raised[-1:], *inner[-1:]]


def _pass_on(process: "subprocess.Popen[bytes]", to: TextIO, lines: deque[str]) -> None:
    assert process.stdout is not None
    lines.append("")
    # as it comes: a progress bar writes over its line, which ends only with the last step
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with process.stdout as pipe:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            text = decoder.decode(chunk)
            to.write(text)
            to.flush()
            first, *rest = text.replace("\r\n", "\n").split("\n")
            lines[-1] = (lines[-1] + first)[-_KEPT_CHARACTERS:]
            lines.extend(rest)


@contextmanager
def _passing_signals(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Hand on the signal by which a scheduler ends a job; give those that were handed on."""
    passed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield passed
        return

    def hand_on(number: int, _: object) -> None:
        passed.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield passed
    finally:
        signal.signal(signal.SIGTERM, before)
