"""`stability estimate STUDY.yaml`: what a study will take, before anything of it is written."""

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stability.analysis.sequential import LOOKS
from stability.cli.output import HOLDS, in_lines, print_json, print_line
from stability.cli.run import check_keep, option_help, split_options, with_seeds
from stability.config.command_study import (
    CommandStudy,
    is_command_study,
    load_command_study,
)
from stability.config.load import load_study
from stability.config.study import Keep, StudyConfig
from stability.report.view.plain_text import readable

if TYPE_CHECKING:
    from stability.study.command_cost import CommandCost
    from stability.study.cost_estimate import StudyCost

__all__ = ["estimate", "option_help", "split_options"]

Study = StudyConfig | CommandStudy
Cost: TypeAlias = "StudyCost | CommandCost"

LONG_S = 600
"""Of a study that takes longer it is said what would shorten it."""
_NOTHING_MISSING = [
    "PASS    nothing that it needs is missing, as far as it is planned and tried;",
    "        whether its seeds are enough shows in the runs",
]
_NOT_COUNTED = "        W&B's offline files are not counted: `--wandb disabled` writes none"


def estimate(
    study: Path,
    keep: Keep | None = None,
    seeds: int = 0,
    json: bool = False,
    overrides: dict[str, str] | None = None,
) -> int:
    """Say how long a study trains here, what it leaves on disk, and the memory it needs at least.

    A few updates of each arm are made in a temporary folder, and standard error says of which; no
    run is begun, and nothing is kept. A command is started for them as `stability run` would start
    it, with `trial` for {arm}: what it saves outside of {out} it saves then too. Of a study that
    takes long it says what would shorten it, and of one of commands what a PASS lacks, as planned
    and as far as its trials show.

    Args:
        study: the study's YAML file
        keep: which snapshots stay, as of `stability run`; by default as the study says
        seeds: how many seeds, as of `stability run`; 0 is the study's
        json: print the numbers as JSON
        overrides: values in the study's base, by dotted key
    """
    load = os.getloadavg()[0]  # before the trials add to it
    if is_command_study(study):
        check_keep(study, keep)
        cost, lines = _of_commands(with_seeds(load_command_study(study, overrides), seeds), load)
    else:
        cost, lines = _of_configs(with_seeds(load_study(study, overrides), seeds), keep, load)
    if json:
        print_json(cost)
    else:
        for line in lines:
            print_line(line)
    return HOLDS


def _of_configs(
    config: StudyConfig, keep: Keep | None, load: float
) -> tuple[dict[str, Any], list[str]]:
    """Return what a study of our own trainer takes, in JSON values and in lines."""
    _tell(f"{config.name}: a few updates of each arm are timed in a temporary folder")
    from stability.study.assemble import quieten_lightning  # heavy: torch, Lightning
    from stability.study.cost_estimate import cost_of
    from stability.study.run_study import may_pass, plan_study, too_few_seeds

    quieten_lightning()
    runs = plan_study(config, Path("runs"))
    cost = cost_of(runs, keep or config.keep, policy=config.policy, told=_tell)
    few = too_few_seeds(config, runs)
    said = _NOTHING_MISSING if may_pass(config, runs) else _lines_of_gaps([few] if few else [], [])
    return {"study": config.name, **cost.to_dict()}, [*_lines(config, cost, load), *said]


def _of_commands(study: CommandStudy, load: float) -> tuple[dict[str, Any], list[str]]:
    """Return what a study of commands takes, in JSON values and in lines."""
    _tell(f"{study.name}: a few updates of each arm's command are timed in a temporary folder")
    from stability.analysis.plan_gaps import NO_QUESTION  # heavy: NumPy
    from stability.study.command_cost import cost_of_commands  # heavy: torch
    from stability.study.run_commands import plan_commands, planned_gaps

    runs = plan_commands(study, Path("runs"))
    gaps = planned_gaps(study, runs)
    cost = cost_of_commands(runs, told=_tell)
    content = {"study": study.name, **cost.to_dict(), "lacks": gaps}
    unseen = [] if gaps == [NO_QUESTION] else _unseen(cost, study.base.train.steps)
    said = _lines_of_gaps(gaps, unseen) or _lines_of_no_gap(has_loss=cost.has_loss)
    return content, [*_lines_of_commands(study, cost, load), *said]


def _unseen(cost: "CommandCost", steps: int) -> list[str]:
    """Return what a PASS needs and the trials have not shown, though later updates may.

    `steps` are the updates of a run.
    """
    from stability.recorder.held_out import NAME_IT, NONE_SEEN  # heavy, with all of the recorder

    if not cost.unevaluated:
        return []
    return [
        f"0 evaluations were seen in the first {cost.unevaluated} updates: {NONE_SEEN}. A PASS "
        f"needs at least 2 in each run, of {steps} updates, on the same samples, which no run "
        "trains on: their loss is the held-out loss (1 is enough with `held_out: all`). If the "
        f"script does so later in a run, nothing has to be changed; else {NAME_IT}"
    ]


def _tell(text: str) -> None:
    """Say on standard error what is done now: it takes from seconds to minutes."""
    sys.stderr.write(f"{in_lines(readable(text), sys.stderr)}\n")
    sys.stderr.flush()


def _lines(study: StudyConfig, cost: "StudyCost", load: float) -> list[str]:
    from stability.study.size_check import in_units  # heavy: torch

    where = "GPU" if cost.on_gpu else "host"
    lines = [
        *_time(study, cost, 0.0 if cost.on_gpu else load),
        *(_shorter(study, cost) if cost.seconds > LONG_S else ()),
        *_on_disk(cost),
        f"memory  {in_units(cost.memory.bytes)} of the {where}'s at least, of which",
    ]
    for part in cost.memory.parts:
        lines += textwrap.wrap(
            part.name,
            80,
            initial_indent=f"        {in_units(part.bytes):>10}  ",
            subsequent_indent=f"{'':22}",
        )
    return lines


def _lines_of_commands(study: CommandStudy, cost: "CommandCost", load: float) -> list[str]:
    from stability.study.size_check import in_units  # heavy: torch

    lines = _time(study, cost, 0.0 if "gpu" in cost.memory else load)
    if study.base.train.steps > cost.timed:
        lines.append(f"        what a script evaluates after {cost.timed} updates comes on top")
    first, *others = cost.seconds_by_seed.items()
    if others and first[1] > 1.2 * others[0][1]:
        lines.append(
            f"        seed {first[0]}, where the gradient is looked at, takes "
            f"{_duration(first[1])} of it"
        )
    lines += _shorter(study, cost) if cost.seconds > LONG_S else []
    lines.append(f"disk    {in_units(cost.bytes)}")
    lines += [f"        {in_units(size):>10}  {what}" for what, size in cost.disk.items()]
    lines.append(_NOT_COUNTED)
    of = {"host": "the host's", "gpu": "a GPU's"}
    memory = " and ".join(f"{in_units(size)} of {of[where]}" for where, size in cost.memory.items())
    lines.append(f"memory  {memory or 'not known'}")
    return [*lines, "        of one run, in its first few updates"]


def _lines_of_gaps(gaps: Sequence[str], unseen: Sequence[str]) -> list[str]:
    """Return the lines on what keeps every candidate from a PASS; none where nothing does.

    `gaps` do as the study is planned, and what is `unseen` may.
    """
    if not gaps and not unseen:
        return []
    none = "none, as the study is planned:"
    lines = [f"PASS    {none if gaps else 'none, unless the script evaluates the model:'}"]
    for each in [*gaps, *unseen]:
        lines += textwrap.wrap(each, 80, initial_indent=f"{'':8}- ", subsequent_indent=f"{'':10}")
    return lines


def _lines_of_no_gap(*, has_loss: bool) -> list[str]:
    """Return the lines that all is there that a PASS needs, where the trials have shown it.

    A script may evaluate, and yet nothing that is known to be held out: of that nothing is said.
    """
    return _NOTHING_MISSING if has_loss else []


def _time(study: Study, cost: Cost, load: float) -> list[str]:
    """Return the first lines, with the `load` of the machine where it makes a study longer."""
    cores, beside = os.cpu_count() or 1, cost.measuring
    most = f"; {_duration(beside.planted_most)} at most"
    parts = {
        f"{cost.runs} runs, one after another": cost.run_seconds,
        "distances between them": beside.distances,
        f"faults planted on what may pass{most}": beside.planted,
        "the report": beside.report,
    }
    lines = [
        f"{study.name[:40]}: {cost.runs} runs",
        f"time    {_duration(cost.seconds)} here, of which",
        *(f"        {_duration(each):>12}  {what}" for what, each in parts.items() if each),
    ]
    if load > cores / 2:
        lines.append(f"        at a load of {load:.1f} on {cores} cores; idle ones take less")
    return lines


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} seconds"
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.1f} minutes"


def _shorter(study: Study, cost: Cost) -> list[str]:
    """Return the lines on what would shorten a study, and what each costs in evidence."""
    from stability.analysis.gradient_evidence import LOOKS_NEEDED  # heavy: numpy

    dearest = sorted(cost.seconds_by_arm.items(), key=lambda one: -one[1])[:3]
    arms = ", ".join(f"{name[:20]} {_duration(seconds)}" for name, seconds in dearest)
    said = [
        f"arms, of which the dearest are {arms}. Where training is judged, a PASS needs a "
        f"reference, a nudge and a broken arm, each in {LOOKS[0]} seeds"
    ]
    if cost.look_seconds:
        said.append(
            f"looks, {_duration(cost.look_seconds)} in all (probe: every, gradient_every). "
            "Operator and gradient get less sure, and the gradient is judged from "
            f"{LOOKS_NEEDED} looks on"
        )
        of_all = isinstance(study, StudyConfig) and study.base.probe.seeds == "all"
        if of_all and len(study.seeds) > 1:
            said.append(
                "seeds with looks (probe: {seeds: first}). The operator is then judged by the "
                "first seed's looks alone"
            )
    said.append(
        f"steps, {study.base.train.steps} now (train.steps). Less of the training is seen, at "
        "fewer looks"
    )
    count, least = len(study.seeds), LOOKS[0]
    if count > least:
        said.append(f"seeds, {count} now. Intervals get wider; fewer than {least} are not judged")
    lines = ["        fewer of these shorten it, and cost evidence:"]
    for each in said:
        lines += textwrap.wrap(each, 80, initial_indent=f"{'':8}- ", subsequent_indent=f"{'':10}")
    lines.append("        to try it: stability estimate STUDY.yaml --train.steps STEPS")
    return lines


def _on_disk(cost: "StudyCost") -> list[str]:
    """Return the lines on what stays, beside what would without a policy."""
    from stability.study.size_check import in_units  # heavy: torch

    is_all, kept = cost.keep == "all", f"disk    {in_units(cost.bytes)} with keep: {cost.keep}"
    lines = [kept if is_all else f"{kept}, {in_units(cost.bytes_of_all)} with keep: all"]
    for what, whole in cost.disk_of_all.items():
        of_all = "" if is_all else f"of {in_units(whole):>10} "
        if whole:
            lines.append(f"        {in_units(cost.disk[what]):>10}  {of_all}{what}")
    return [*lines, _NOT_COUNTED]
