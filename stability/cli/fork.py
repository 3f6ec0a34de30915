"""`stability fork` and `stability bisect`: what if this run had gone on otherwise?"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stability.cli.output import FAILS, HOLDS, print_json, print_line
from stability.cli.retrained import with_checkpoint
from stability.config.commands import is_command
from stability.config.convert import merge
from stability.config.load import parse_value
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, run_at
from stability.tracking.environment import WandbMode, check_wandb

if TYPE_CHECKING:
    from stability.study.run import Run

__all__ = ["bisect", "fork", "option_help", "split_options"]


def fork(
    run: Path,
    at: int = 0,
    start: str = "",
    resume: str = "",
    change: str = "",
    name: str = "",
    until: int = 0,
    wandb: WandbMode = "disabled",
    json: bool = False,
    changes: dict[str, Any] | None = None,
) -> int:
    """Train on from a run's exact state at a step, with one thing changed, and show how far apart
    the two go.

    Where the study's keep has dropped that state, the run is trained anew first, to the same bits,
    in runs/<study>/forks/<arm>. The run of a command goes on from a checkpoint of its script's,
    twice: unchanged, and changed.

    Args:
        run: the folder of the run, runs/<study>/<arm>/seed-<n>
        at: a step that the run had a checkpoint of when it ended
        start: of a command: the checkpoint that its script resumes from, a file or folder
        resume: of a command without {resume}: words that are added to it, {resume} being the
            checkpoint, as in --resume="--resume {resume}"
        change: of a command: the path of the one change where several flags make it, e.g. flags
        name: of the fork; it is stored in runs/<study>/forks/<name>
        until: the step up to which it trains; 0 is the run's last. Of a command: how many updates
            it makes from the checkpoint; 0: until it ends by itself
        wandb: where W&B's records go
        json: print the drifts as JSON
        changes: what is changed, by dotted key
    """
    parent = run_at(run, "fork: run")
    if _is_of_command(parent):
        if at or not start:
            raise ValueError(
                f"fork: {run}: is the run of a command, whose state is its script's own: give "
                "--start with a checkpoint that it has saved, and no --at"
            )
        return _fork_command(
            parent,
            {"start": start, "resume": resume, "change": change, "name": name, "until": until},
            changes or {},
            wandb,
            json=json,
        )
    if start or resume or change:
        raise ValueError(
            f"fork: {run}: is a run of our own trainer: give --at with a step that it keeps a "
            "checkpoint of, and no --start, --resume or --change"
        )
    _check_attention(changes)
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.pairs import print_fork
    from stability.study.fork import fork_drifts, plan_fork
    from stability.study.run import has_ended

    planned = plan_fork(parent, at, changes or {}, name=name, until=until)
    whole = with_checkpoint(parent, at)
    if whole != parent:
        planned = plan_fork(whole, at, changes or {}, name=name, until=until)
    _train(planned, wandb)
    drifts = fork_drifts(planned)
    if json:
        print_json({"run": str(planned.paths.root), "rel_l2": drifts})
    else:
        print_fork(planned.arm.name, at, drifts, Console())
    return HOLDS if has_ended(planned.paths) else FAILS


def bisect(
    run: Path,
    at: int = 0,
    over: Literal["layers", "points"] = "layers",
    until: int = 0,
    json: bool = False,
    changes: dict[str, Any] | None = None,
) -> int:
    """Find the layers, or the rounding points, that carry a change of attention, by forks of a run.

    Where the study's keep has dropped its state at that step, the run is trained anew first.

    Args:
        run: the folder of the run, runs/<study>/<arm>/seed-<n>
        at: a step that the run had a checkpoint of when it ended
        over: what is halved
        until: the step at which forks are compared, one with a snapshot; 0 is the next one
        json: print the drifts as JSON
        changes: what is changed, by dotted key
    """
    parent = run_at(run, "bisect: run")
    if _is_of_command(parent):
        raise ValueError(
            f"bisect: {run}: must be a run of our own trainer, is one of a command, whose layers "
            "can't be changed one by one"
        )
    _check_attention(changes)
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.pairs import print_halvings
    from stability.study.bisect import halve, plan_layers, plan_points, step_to_compare
    from stability.study.fork import fork_drifts, plan_fork

    until = step_to_compare(parent, at, until)
    plan = plan_layers if over == "layers" else plan_points
    parts, change = plan(parent, changes or {})
    plan_fork(parent, at, change(tuple(parts)))  # what can't be forked is refused before it trains
    parent = with_checkpoint(parent, at)

    def measure(some: tuple[str, ...]) -> float:
        planned = plan_fork(parent, at, change(some), until=until)
        _train(planned, "disabled")
        ended = read_manifest(planned.paths.manifest)
        if ended.state == "failed":
            raise ValueError(f"bisect: {planned.paths.root} failed: {ended.message}")
        drift = fork_drifts(planned).get(until, math.inf)
        return drift if math.isfinite(drift) else math.inf

    found = halve(parts, measure)
    if json:
        print_json([{"parts": each.parts, "rel_l2": each.drift} for each in found])
    else:
        print_halvings(found, at, until, Console())
    return HOLDS


def _check_attention(changes: dict[str, Any] | None) -> None:
    """Raise ValueError for an attention that is set by a name: of a command alone it is one."""
    given = (changes or {}).get("attention", {})
    if isinstance(given, str):
        raise ValueError(
            "--set must name a part of the attention, as attention.implementation=flash or "
            f"attention.profile=fa2, got attention={given}"
        )


def option_help() -> str:
    """Return the line of the verbs' help on the options that `split_options` takes."""
    return "--set KEY=VALUE  what is changed, e.g. attention.profile=fa2, flags.lr=0.1; repeatable"


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--set attention.profile=fa2` from the verb's other arguments.

    Returns the others, and as `changes` what is set, nested as in an arm. Raises ValueError for an
    option without a value.
    """
    rest: list[str] = []
    changes: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word != "--set" and not word.startswith("--set="):
            rest.append(word)
            continue
        text = word[6:] if "=" in word else (remaining.pop(0) if remaining else "")
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ValueError(f"--set must be KEY=VALUE, e.g. attention.profile=fa2, got {text!r}")
        nested = parse_value(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        changes = merge(changes, nested)
    return rest, {"changes": changes}


def _is_of_command(run: RunPaths) -> bool:
    return is_command(read_manifest(run.manifest).config)


def _fork_command(
    parent: RunPaths,
    options: dict[str, Any],
    changes: dict[str, Any],
    wandb: WandbMode,
    *,
    json: bool,
) -> int:
    check_wandb(wandb)
    from rich.console import Console  # heavy from here on: numpy behind the contract

    from stability.cli.record import publish
    from stability.report.terminal.pairs import print_fork
    from stability.report.terminal.progress import StudyDisplay
    from stability.study.fork import fork_drifts
    from stability.study.fork_command import plan_command_fork, run_command_fork

    runs = plan_command_fork(parent, changes=changes, **options)
    with StudyDisplay(Console(stderr=True), len(runs)) as display:
        if not run_command_fork(runs, read_manifest(parent.manifest).step, display):
            return FAILS
    fork = runs[-1]
    drifts = fork_drifts(fork)
    trouble = publish(fork.folder, wandb)
    if json:
        print_json({"run": str(fork.paths.root), "rel_l2": drifts})
    else:
        print_fork(fork.study, 0, drifts, Console(), "the run that goes on unchanged")
        print_line(f"ladder: stability show {fork.folder}")
    if trouble:
        sys.stderr.write(f"{trouble}\n")
    return HOLDS


def _train(planned: "Run", wandb: WandbMode) -> None:
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.assemble import quieten_lightning
    from stability.study.fork import run_fork
    from stability.study.train_run import TrainOptions

    quieten_lightning()
    with StudyDisplay(Console(stderr=True), 1) as display:
        run_fork(planned, TrainOptions(wandb_mode=wandb), display)
