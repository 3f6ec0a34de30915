"""`stability estimate STUDY.yaml`: what a study will take, before anything of it is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import HOLDS, print_json, print_line
from stability.cli.run import option_help, split_options
from stability.config.command_study import is_command_study
from stability.config.load import load_study
from stability.config.study import Keep

if TYPE_CHECKING:
    from stability.study.cost_estimate import StudyCost

__all__ = ["estimate", "option_help", "split_options"]


def estimate(
    study: Path,
    keep: Keep | None = None,
    json: bool = False,
    overrides: dict[str, str] | None = None,
) -> int:
    """Say how long a study trains here, what it leaves on disk, and the memory it needs at least.

    A few updates of each arm are made in a temporary folder, which takes some seconds an arm; no
    run is begun, and nothing is kept.

    Args:
        study: the study's YAML file
        keep: which snapshots stay, as of `stability run`; by default as the study says
        json: print the numbers as JSON
        overrides: values in the study's base, by dotted key
    """
    if is_command_study(study):
        raise ValueError(
            f"{study}: must be a study of the trainer in this package, got one of commands; "
            "there `stability run` tells the time left once a run has ended"
        )
    config = load_study(study, overrides)
    from stability.study.assemble import quieten_lightning  # heavy: torch, Lightning
    from stability.study.cost_estimate import cost_of
    from stability.study.run_study import plan_study

    quieten_lightning()
    cost = cost_of(plan_study(config, Path("runs")), keep or config.keep)
    if json:
        print_json({"study": config.name, **cost.to_dict()})
    else:
        for line in _lines(config.name, cost):
            print_line(line)
    return HOLDS


def _lines(name: str, cost: "StudyCost") -> list[str]:
    """Return what is printed, no line wider than 80 columns."""
    from stability.study.size_check import in_units  # heavy: torch

    minutes = cost.seconds / 60
    took = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.1f} minutes"
    where = "GPU" if cost.on_gpu else "host"
    lines = [
        f"{name[:40]}: {cost.runs} runs",
        f"time    {took} here, one run after another",
        *_on_disk(cost),
        f"memory  {in_units(cost.memory.bytes)} of the {where}'s at least, of which",
    ]
    for part in cost.memory.parts:
        lines.append(f"        {in_units(part.bytes):>10}  {part.name}")
    return [line if len(line) <= 80 else f"{line[:77]}..." for line in lines]


def _on_disk(cost: "StudyCost") -> list[str]:
    """Return the lines on what stays, beside what would without a policy."""
    from stability.study.size_check import in_units  # heavy: torch

    is_all, kept = cost.keep == "all", f"disk    {in_units(cost.bytes)} with keep: {cost.keep}"
    lines = [kept if is_all else f"{kept}, {in_units(cost.bytes_of_all)} with keep: all"]
    for what, whole in cost.disk_of_all.items():
        of_all = "" if is_all else f"of {in_units(whole):>10} "
        if whole:
            lines.append(f"        {in_units(cost.disk[what]):>10}  {of_all}{what}")
    return lines
