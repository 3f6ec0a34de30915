"""Writes the plan of a study whose runs are recorded one by one: each adds its arm and seed.

Leaves out the plan of a study that is given whole (`run_commands`, `run_study`).
"""

from collections.abc import Mapping
from typing import Any

from stability.records.paths import StudyPaths
from stability.records.sealed_json import read_sealed, write_sealed
from stability.study.foreign_plan import ForeignRun

__all__ = ["write_study"]


def write_study(run: ForeignRun, config: Mapping[str, Any]) -> None:
    """Add the run's arm and seed to the study's plan."""
    path = StudyPaths(run.folder).study
    if path.exists():
        content = read_sealed(path, "`stability record`")
    else:
        content = {"config": _study_config(run, config), "arms": []}
    seeds = content["config"]["seeds"]
    if run.seed not in seeds:
        content["config"]["seeds"] = [*seeds, run.seed]
    if run.question:
        content["config"]["question"] = run.question
    entry = {
        "name": run.arm,
        "axis": run.axis,
        "diff": {name: list(values) for name, values in run.diff.items()},
        "role": run.role,
        "until": config["train"]["steps"],
    }
    others = [arm for arm in content["arms"] if arm["name"] != run.arm]
    names = [arm["name"] for arm in content["arms"]]
    place = names.index(run.arm) if run.arm in names else len(others)
    content["arms"] = [*others[:place], entry, *others[place:]]
    write_sealed(path, content)


def _study_config(run: ForeignRun, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": run.study,
        "question": run.question or f"Does what differs in {run.study} matter?",
        "base": dict(config),
        "seeds": [],
        "yardstick": "",
        "early_step": 0,
        "policy": dict(run.policy),
    }
