"""`stability fork` and `stability bisect`: what if this run had gone on otherwise?"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stability.cli.output import FAILS, HOLDS, print_json
from stability.config.convert import merge
from stability.config.load import parse_value
from stability.records.paths import run_at
from stability.tracking.environment import WandbMode

if TYPE_CHECKING:
    from stability.study.run import Run

__all__ = ["bisect", "fork", "option_help", "split_options"]


def fork(
    run: Path,
    at: int = 0,
    name: str = "",
    until: int = 0,
    wandb: WandbMode = "disabled",
    json: bool = False,
    changes: dict[str, Any] | None = None,
) -> int:
    """Train on from a run's exact state at a step, with one thing changed, and show how far apart
    the two go.

    Args:
        run: the folder of the run, runs/<study>/<arm>/seed-<n>
        at: a step that the run keeps a checkpoint of
        name: of the fork; it is stored in runs/<study>/forks/<name>
        until: the step up to which it trains; 0 is the run's last
        wandb: where W&B's records go
        json: print the drifts as JSON
        changes: what is changed, by dotted key
    """
    parent = run_at(run, "fork: run")
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.pairs import print_fork
    from stability.study.fork import fork_drifts, plan_fork
    from stability.study.run import has_ended

    planned = plan_fork(parent, at, changes or {}, name=name, until=until)
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

    Args:
        run: the folder of the run, runs/<study>/<arm>/seed-<n>
        at: a step that the run keeps a checkpoint of
        over: what is halved
        until: the step at which forks are compared, one with a snapshot; 0 is the next one
        json: print the drifts as JSON
        changes: what is changed, by dotted key
    """
    parent = run_at(run, "bisect: run")
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.records.manifest import read_manifest
    from stability.report.terminal.pairs import print_halvings
    from stability.study.bisect import halve, plan_layers, plan_points, step_to_compare
    from stability.study.fork import fork_drifts, plan_fork

    until = step_to_compare(parent, at, until)
    plan = plan_layers if over == "layers" else plan_points
    parts, change = plan(parent, changes or {})

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


def option_help() -> str:
    """Return the line of the verbs' help on the options that `split_options` takes."""
    return "--set KEY=VALUE  what is changed, e.g. attention.profile=fa2; repeatable"


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


def _train(planned: "Run", wandb: WandbMode) -> None:
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.assemble import quieten_lightning
    from stability.study.fork import run_fork
    from stability.study.train_run import TrainOptions

    quieten_lightning()
    with StudyDisplay(Console(stderr=True), 1) as display:
        run_fork(planned, TrainOptions(wandb_mode=wandb), display)
