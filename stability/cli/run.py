"""`stability run STUDY.yaml`: train a study, then print its ladder and write its report."""

import dataclasses
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from stability.cli.output import FAILS, HOLDS, print_line
from stability.config.command_study import (
    CommandStudy,
    is_command_study,
    load_command_study,
)
from stability.config.load import load_study
from stability.config.schema import BASELINE, ArmConfig
from stability.config.study import Keep, StudyConfig
from stability.tracking.environment import WandbMode, check_wandb, resolve_mode

if TYPE_CHECKING:
    from rich.console import Console

    from stability.analysis.study_records import RecordedStudy
    from stability.execute.executor import Executor
    from stability.report.terminal.progress import StudyDisplay

__all__ = ["check_keep", "option_help", "run", "split_options", "with_seeds"]

Study = TypeVar("Study", StudyConfig, CommandStudy)

ExecutorName = Literal["local", "slurm", "ray"]

_TOP_LEVEL = {field.name for field in dataclasses.fields(ArmConfig)}


def run(
    study: Path,
    out: Path = Path("runs"),
    wandb: WandbMode | None = None,
    check_observer: bool = False,
    jobs: int = 0,
    seeds: int = 0,
    keep: Keep | None = None,
    executor: ExecutorName = "local",
    only: str = "",
    seed: int | None = None,
    finish: bool = False,
    overrides: dict[str, str] | None = None,
) -> int:
    """Train every arm and seed of a study, print the ladder and write the report.

    Its arms are configs of our own trainer, or commands: the base then has a `command`. Exit code 0
    once every run has ended, whatever the answer is, which `stability verdict` also gives by its
    exit code; 1 if a run failed.

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
        keep: which snapshots stay once all that needs them is on record, by default as the study
            says. What was dropped already doesn't come back: see `stability compare --retrain`
        executor: who trains the runs: processes of this machine, jobs of Slurm or tasks of Ray,
            with their options as `--slurm.partition NAME` or `--ray.num-gpus 1`. Jobs and tasks
            outlive this command, and the same command finds them again
        only: train the run of this arm alone, with --seed, and measure no more than is needed to
            drop what the study does not keep; for a scheduler that starts each run by itself. Its
            baseline must be trained
        seed: the seed of --only
        finish: train nothing, and measure what follows the runs
        overrides: values in the study's base, by dotted key
    """
    asked = _Asked(
        study=study,
        out=out,
        wandb=wandb,
        check_observer=check_observer,
        jobs=jobs,
        seeds=seeds,
        keep=keep,
        executor=executor,
        only=only,
        seed=seed,
        finish=finish,
        overrides=overrides or {},
    )
    if is_command_study(study):
        asked.check_commands()
        commands = with_seeds(load_command_study(study, asked.of_base), seeds)
        return _run_commands(commands, out, wandb, check_observer=check_observer)
    config = load_study(study, asked.of_base)
    config = dataclasses.replace(config, keep=keep or config.keep)
    return _run_configs(asked, with_seeds(config, seeds))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The command line of `stability run`."""

    study: Path
    out: Path
    wandb: WandbMode | None
    check_observer: bool
    jobs: int
    seeds: int
    keep: Keep | None
    executor: ExecutorName
    only: str
    seed: int | None
    finish: bool
    overrides: dict[str, str]

    def __post_init__(self) -> None:
        if bool(self.only) != (self.seed is not None):
            raise ValueError(
                f"run: only and seed must be given together, got only {self.only!r} and seed "
                f"{self.seed}; they name one run"
            )
        others = [x for x in ("slurm", "ray") if x != self.executor and self.options(x)]
        if others and not (self.only or self.finish):
            raise ValueError(
                f"run: executor must be {others[0]} for --{others[0]} options, got "
                f"{self.executor!r}"
            )
        if self.only and self.finish:
            raise ValueError("run: only and finish must not both be given: one trains, one doesn't")

    @property
    def of_base(self) -> dict[str, str]:
        """The overrides of the study's base."""
        of_executors = tuple(f"{name}." for name in ("slurm", "ray"))
        return {k: v for k, v in self.overrides.items() if not k.startswith(of_executors)}

    def options(self, executor: str) -> dict[str, str]:
        """Return the options of an executor by name."""
        found = {k: v for k, v in self.overrides.items() if k.startswith(f"{executor}.")}
        return {k.removeprefix(f"{executor}."): value for k, value in found.items()}

    def check_commands(self) -> None:
        """ValueError for what a study of commands can't have."""
        if self.executor != "local" or self.only or self.finish:
            raise ValueError(
                f"{self.study}: a study of commands must run here and whole, got executor "
                f"{self.executor!r}, only {self.only!r}; `stability record` records one command"
            )
        check_keep(self.study, self.keep)
        if self.jobs > 1:
            raise ValueError(
                f"{self.study}: jobs must be 1 for a study of commands, got {self.jobs}: a command "
                "takes as many processes and threads as it likes, and its number of threads is "
                "part of what decides its bits"
            )

    def words(self, mode: WandbMode) -> tuple[str, ...]:
        """Return this command line for a job elsewhere, less what trains the runs."""
        words = ["run", str(self.study.resolve()), "--out", str(self.out.resolve())]
        words += ["--wandb", mode]
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        words += ["--keep", self.keep] if self.keep else []
        words += ["--check-observer"] if self.check_observer else []
        return (*words, *(f"--{name}={text}" for name, text in self.of_base.items()))


def check_keep(study: Path, keep: Keep | None) -> None:
    """ValueError for a policy that drops what a study of commands can't make again."""
    if keep not in (None, "all"):
        raise ValueError(
            f"{study}: keep must be all for a study of commands, got {keep}: what a command has "
            "made is not made again"
        )


def _run_configs(asked: _Asked, config: StudyConfig) -> int:
    # Heavy from here on, torch and Lightning first: mistakes in the YAML were told before.
    import torch
    from rich.console import Console

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.assay import planted_updates
    from stability.study.assemble import quieten_lightning
    from stability.study.measuring_cost import REPORT_S
    from stability.study.rank_tasks import this_task
    from stability.study.run import has_ended
    from stability.study.run_one import follow_one, run_one
    from stability.study.run_study import (
        StudyError,
        changed_protocol,
        finish_study,
        plan_study,
        run_study,
    )
    from stability.study.train_run import TrainOptions

    runs = plan_study(config, asked.out)
    mode = resolve_mode(asked.wandb)
    check_wandb(mode)
    elsewhere = _executor(asked, config, mode)
    quieten_lightning()
    if late := ", ".join(map(str, config.base.train.late_snapshots())):
        end = config.base.train.steps
        print_line(f"train.snapshot_steps: no snapshot at {late}, past the end at step {end}")
    for change in changed_protocol(config, asked.out):
        print_line(f"EXPLORATORY: {change}")
    console = Console()
    options = TrainOptions(wandb_mode=mode, check_observer=asked.check_observer)
    updates = {(run.arm.name, run.seed): run.last_step for run in runs}
    planted = planted_updates(runs, config.policy)
    display = (
        StudyDisplay(console, 1)
        if asked.only
        else StudyDisplay(console, len(runs), updates, planted, report=REPORT_S)
    )
    with display:
        try:
            if asked.only and asked.seed is not None:
                one = (config, asked.out, asked.only, asked.seed)
                told, task = {"options": options, "observer": display}, this_task(os.environ)
                with _ending_on_sigterm():
                    if task and not task.ranks.is_first:
                        return HOLDS if follow_one(*one, **told, task=task) else FAILS
                    runs = [run_one(*one, **told, task=task)]
            elif asked.finish:
                finish_study(config, runs, display)
            else:
                run_study(
                    config,
                    asked.out,
                    options=options,
                    observer=display,
                    jobs=asked.jobs or max(1, torch.cuda.device_count()),
                    elsewhere=elsewhere.train if elsewhere else None,
                )
        except StudyError as error:
            raise ValueError(f"{asked.study}: {error}") from error
        written = None if asked.only else _write_report(asked.out / config.name, mode, display)
    if written:
        _show_study(written, console)
    return HOLDS if all(has_ended(run.paths) for run in runs) else FAILS


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: a scheduler that stops a run leaves an interrupted one.

    A handler that the caller of this command has set stays: it knows what else is to be done.
    """
    if callable(signal.getsignal(signal.SIGTERM)):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _executor(asked: _Asked, config: StudyConfig, mode: WandbMode) -> "Executor | None":
    """Return who trains the runs elsewhere; None for processes of this machine."""
    if asked.executor == "local":
        return None
    from stability.execute.executor import StudyCommand
    from stability.execute.ray_tasks import RayTasks
    from stability.execute.slurm import SlurmArrays

    command = StudyCommand(
        words=asked.words(mode), folder=(asked.out / config.name).resolve(), name=config.name
    )
    options = asked.options(asked.executor)
    if asked.executor == "ray":
        return RayTasks(command, options)
    return SlurmArrays(command, options, _ranks_of)


def _ranks_of(run: Any) -> int:
    return run.config.parallel.ranks


def _run_commands(
    study: CommandStudy, out: Path, wandb: WandbMode | None, *, check_observer: bool
) -> int:
    from rich.console import Console  # heavy from here on

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.foreign_assay import planted_updates
    from stability.study.measuring_cost import REPORT_S
    from stability.study.run_commands import changed_command_protocol, plan_commands, run_commands

    runs = plan_commands(study, out)
    mode = resolve_mode(wandb)
    check_wandb(mode)
    for change in changed_command_protocol(study, out):
        print_line(f"EXPLORATORY: {change}")
    console = Console()
    updates = {(run.arm, run.seed): run.asked.steps for run in runs}
    planted = planted_updates(runs)
    with StudyDisplay(console, len(runs), updates, planted, report=REPORT_S) as display:
        run_commands(study, out, observer=display, check_observer=check_observer)
        is_there = any(run.arm == BASELINE and run.is_kept for run in runs)
        written = _write_report(out / study.name, mode, display) if is_there else None
    if written:
        _show_study(written, console)
    return HOLDS if all(run.is_kept for run in runs) else FAILS


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A study whose report is written."""

    recorded: "RecordedStudy"
    report: Path
    trouble: str
    """What kept it from W&B, if anything did."""


def _write_report(folder: Path, wandb: WandbMode, display: "StudyDisplay") -> _Written:
    """Write the report and publish to W&B, while the display still tells the time."""
    from stability.analysis.study_records import read_study  # heavy: numpy, and plotly for the page
    from stability.cli.workspace import publish_study
    from stability.report.page.html import write_page

    display.report_begins()
    recorded = read_study(folder)
    report = write_page(recorded, folder)
    return _Written(recorded, report, publish_study(recorded, folder, wandb))


def _show_study(written: _Written, console: "Console") -> None:
    """Print the ladder and the study's answer."""
    from stability.analysis.ladder import ladder_of  # heavy: numpy
    from stability.report.terminal.ladder import drift_sparks, print_ladder
    from stability.report.terminal.verdict import print_answer
    from stability.report.view.evidence import scope_line, verdict_of

    recorded = written.recorded
    found = verdict_of(recorded)
    print_answer(recorded.question, found, console, scope_line(recorded))
    print_ladder(ladder_of(recorded), console, drift_sparks(recorded, console))
    print_line(f"\nreport: {written.report}")
    more = found.likely_look if found and "next look" in found.outlook else None
    if more and more > len(recorded.seeds):
        print_line(
            f"the same command with --seeds {more} trains more seeds; it keeps these, and changes "
            "nothing of the protocol"
        )
    if written.trouble:
        print_line(written.trouble)


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
    lines.append("options of an executor, passed through: `--slurm.OPTION VALUE` of sbatch,")
    lines.append("`--ray.OPTION VALUE` of a task (num-cpus, num-gpus, ...), and --ray.address")
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
        # `--seed N` names a run; the group `seed` of the base is set by its keys, `--seed.base`
        if match is None or name == "seed" or ("." not in name and name not in _TOP_LEVEL):
            rest.append(word)
            continue
        if name.startswith("base."):
            raise ValueError(f"--{name} must be given without base., as --{name[5:]}")
        if match.group(2) is None and not remaining:
            raise ValueError(f"--{name} needs a value")
        overrides[name] = match.group(2) if match.group(2) is not None else remaining.pop(0)
    return rest, {"overrides": overrides}


def with_seeds(study: Study, count: int) -> Study:
    """Return `study` with `count` seeds: its own first, then the next whole numbers."""
    if count == 0:
        return study
    if count < len(study.seeds):
        raise ValueError(f"--seeds must be at least the study's {len(study.seeds)}, got {count}")
    first = max(study.seeds) + 1
    further = range(first, first + count - len(study.seeds))
    return dataclasses.replace(study, seeds=(*study.seeds, *further))
