"""`stability run STUDY.yaml`: train a study, then print its ladder and write its report."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stability.cli.output import FAILS, HOLDS, print_line
from stability.config.command_study import (
    CommandStudy,
    is_command_study,
    load_command_study,
)
from stability.config.load import load_study
from stability.config.schema import BASELINE, ArmConfig
from stability.config.study import StudyConfig
from stability.tracking.environment import WandbMode, check_wandb, resolve_mode

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["option_help", "run", "split_options"]

Study = TypeVar("Study", StudyConfig, CommandStudy)

_TOP_LEVEL = {field.name for field in dataclasses.fields(ArmConfig)}


def run(
    study: Path,
    out: Path = Path("runs"),
    wandb: WandbMode | None = None,
    check_observer: bool = False,
    jobs: int = 0,
    seeds: int = 0,
    overrides: dict[str, str] | None = None,
) -> int:
    """Train every arm and seed of a study, print the ladder and write the report.

    Its arms are configs of our own trainer, or commands: the base then has a `command`.

    Args:
        study: the study's YAML file
        out: folder that gets a folder named after the study
        wandb: where W&B's records go: offline, which needs no account, online or disabled; by
            default where WANDB_MODE says, else offline
        check_observer: first train a few steps with every instrument and with none; the bits must
            be equal. A command is run a second time, unobserved, for each arm's first seed
        jobs: how many runs train at once, each in a process of its own; 0 is one for each GPU, or
            one on a CPU. Commands run one after another, since nobody knows what each takes
        seeds: how many seeds, counting on from the study's own; 0 is the study's
        overrides: values in the study's base, by dotted key
    """
    if is_command_study(study):
        if jobs > 1:
            raise ValueError(
                f"{study}: jobs must be 1 for a study of commands, got {jobs}: a command takes as "
                "many processes and threads as it likes, and its number of threads is part of what "
                "decides its bits"
            )
        commands = _with_seeds(load_command_study(study, overrides), seeds)
        return _run_commands(commands, out, wandb, check_observer=check_observer)
    config = _with_seeds(load_study(study, overrides), seeds)
    # Heavy from here on, torch and Lightning first: mistakes in the YAML were told before.
    import torch
    from rich.console import Console

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.assemble import quieten_lightning
    from stability.study.run import has_ended
    from stability.study.run_study import StudyError, changed_protocol, plan_study, run_study
    from stability.study.train_run import TrainOptions

    runs = plan_study(config, out)
    mode = resolve_mode(wandb)
    check_wandb(mode)
    quieten_lightning()
    for change in changed_protocol(config, out):
        print_line(f"EXPLORATORY: {change}")
    console = Console()
    options = TrainOptions(wandb_mode=mode, check_observer=check_observer)
    jobs = jobs or max(1, torch.cuda.device_count())
    with StudyDisplay(console, len(runs)) as display:
        try:
            run_study(config, out, options=options, observer=display, jobs=jobs)
        except StudyError as error:
            raise ValueError(f"{study}: {error}") from error
    _show_study(out / config.name, mode, console)
    return HOLDS if all(has_ended(run.paths) for run in runs) else FAILS


def _run_commands(
    study: CommandStudy, out: Path, wandb: WandbMode | None, *, check_observer: bool
) -> int:
    from rich.console import Console  # heavy from here on

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.run_commands import changed_command_protocol, plan_commands, run_commands

    runs = plan_commands(study, out)
    mode = resolve_mode(wandb)
    check_wandb(mode)
    for change in changed_command_protocol(study, out):
        print_line(f"EXPLORATORY: {change}")
    console = Console()
    with StudyDisplay(console, len(runs)) as display:
        run_commands(study, out, observer=display, check_observer=check_observer)
    if any(run.arm == BASELINE and run.is_kept for run in runs):
        _show_study(out / study.name, mode, console)
    return HOLDS if all(run.is_kept for run in runs) else FAILS


def _show_study(folder: Path, wandb: WandbMode, console: "Console") -> None:
    """Write the report, publish to W&B, and print the ladder and the study's answer."""
    from stability.analysis.ladder import ladder_of  # heavy: numpy, and plotly for the page
    from stability.analysis.study_records import read_study
    from stability.cli.workspace import publish_study
    from stability.report.page.html import write_page
    from stability.report.terminal.ladder import drift_sparks, print_ladder
    from stability.report.terminal.verdict import print_answer
    from stability.report.view.evidence import verdict_of

    recorded = read_study(folder)
    report = write_page(recorded, folder)
    trouble = publish_study(recorded, folder, wandb)
    print_answer(recorded.question, verdict_of(recorded), console)
    print_ladder(ladder_of(recorded), console, drift_sparks(recorded, console))
    print_line(f"\nreport: {report}")
    if trouble:
        print_line(trouble)


def option_help() -> str:
    """Return a line for each key of the base that `--group.key VALUE` may override."""
    lines = ["values of the study's base, overridden by `--group.key VALUE`:"]
    for field in dataclasses.fields(ArmConfig):
        group = field.type
        if dataclasses.is_dataclass(group):
            names = ", ".join(f.name for f in dataclasses.fields(group))
            lines.append(f"  {field.name}: {names}")
        else:
            lines.append(f"  {field.name}")
    return "\n".join(lines)


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--train.steps 50` and the like from the verb's other arguments.

    Returns the others, and the values as `overrides`. An override is an option with a dot in its
    name, or named like a key of the base. Raises ValueError if one has no value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        match = re.fullmatch(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", word, flags=re.DOTALL)
        name = match.group(1) if match else ""
        if match is None or ("." not in name and name not in _TOP_LEVEL):
            rest.append(word)
            continue
        if match.group(2) is None and not remaining:
            raise ValueError(f"--{name} needs a value")
        overrides[name] = match.group(2) if match.group(2) is not None else remaining.pop(0)
    return rest, {"overrides": overrides}


def _with_seeds(study: Study, count: int) -> Study:
    """Return `study` with `count` seeds: its own first, then the next whole numbers."""
    if count == 0:
        return study
    if count < len(study.seeds):
        raise ValueError(f"--seeds must be at least the study's {len(study.seeds)}, got {count}")
    first = max(study.seeds) + 1
    further = range(first, first + count - len(study.seeds))
    return dataclasses.replace(study, seeds=(*study.seeds, *further))
