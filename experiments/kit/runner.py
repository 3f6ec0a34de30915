"""Runs experiments: puts a published claim to the test; writes its record, figure and table row.

An experiment is a file of the folder `experiments` with a docstring of known sections
(`kit.results_table`), `SIZES` (settings by size: quick, cpu and gpu), `measure(settings) ->
Findings` and `draw(rows) -> Figure`. `stability experiment` calls this module. What any of the
experiments measures is not here.
"""

import dataclasses
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import torch
from rich.console import Console

from attention_kernels.machine import hardware, versions
from experiments.kit.record import (
    ExperimentRecord,
    Findings,
    read_experiment,
    write_experiment,
)
from experiments.kit.results_table import (
    Described,
    described,
    filled_in,
    print_experiment,
    print_experiments,
)
from stability.cli.output import FAILS, HOLDS, UNDECIDED
from stability.config.convert import nearest
from stability.records.atomic_files import write_text, write_whole
from stability.records.sealed_json import jsonable
from stability.report.paper.files import picture_bytes
from stability.report.paper.style import paper_style

__all__ = ["load", "names", "run_experiments"]

Size = Literal["quick", "cpu", "gpu"]
SIZES = get_args(Size)
KEPT = ("cpu", "gpu")
"""Sizes whose results are kept; quick is for a first look and for tests."""


def run_experiments(
    folder: Path, name: str | None, size: Size, redraw: bool, kept: Path | None = None
) -> int:
    """Run the experiment `name` of `folder`, or `all`; without a name list them.

    Results go into `results` of `kept`, by default the folder itself, whose page is then written
    anew. Returns an exit code: FAILS if a control is refuted or an experiment raises, else
    UNDECIDED if a control is. What becomes of published statements does not change it. ValueError
    for an unknown name, and for the size gpu where there is no CUDA device. With `redraw` nothing
    runs: figure and table are drawn anew.
    """
    known, kept = names(folder), kept or folder
    console = Console()
    if not name:
        listed = [_described(folder, each) for each in known]
        print_experiments(listed, _records(folder, kept), console)
        return 0
    if name not in (*known, "all"):
        raise ValueError(
            f"experiment: name must be that of a file in {folder}, or all, got {name!r}; "
            f"nearest: {nearest(name, known)}"
        )
    chosen = known if name == "all" else [name]
    if redraw:
        measured = [each for each in known if _result(kept, each, size).exists()]
        for each in measured if name == "all" else chosen:
            _draw(folder, kept, each, size)
        _write_page(folder, kept)
        return 0
    if size == "gpu" and not torch.cuda.is_available():
        raise ValueError(
            "experiment: size must be one that this machine can run, got 'gpu' without a CUDA "
            "device; try cpu"
        )
    others = len(chosen) > 1
    codes = {_run_and_keep(folder, kept, each, size, console, others=others) for each in chosen}
    return next((code for code in (FAILS, UNDECIDED) if code in codes), HOLDS)


def _run_and_keep(
    folder: Path, kept: Path, name: str, size: str, console: Console, *, others: bool
) -> int:
    """Run one experiment and return the exit code that its controls make.

    It is FAILS for an experiment that raised, if there are `others` still to run.
    """
    try:
        record = _run(folder, name, size)
    except (ValueError, RuntimeError) as error:
        if not others:
            raise
        console.print(f"{name}: {error}", markup=False, highlight=False)
        return FAILS
    if size in KEPT:  # first of all: it took minutes
        write_experiment(_result(kept, name, size), record)
    print_experiment(_described(folder, name), record, console)
    if size in KEPT:
        _draw(folder, kept, name, size)
        _write_page(folder, kept)
    return {"holds": HOLDS, "refuted": FAILS, "undecided": UNDECIDED}[record.controls]


def names(folder: Path) -> list[str]:
    """Return the experiments of `folder`: its files that have sizes, in order."""
    return sorted(
        path.stem for path in folder.glob("*.py") if "\nSIZES" in path.read_text(encoding="utf-8")
    )


def load(folder: Path, name: str) -> ModuleType:
    """Import an experiment from its file, as `experiments.NAME`: it hides no other module."""
    spec = importlib.util.spec_from_file_location(f"experiments.{name}", folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _draw(folder: Path, kept: Path, name: str, size: str) -> None:
    """Draw the figure of the result on disk."""
    path = _result(kept, name, size)
    with paper_style():
        picture = picture_bytes(load(folder, name).draw(read_experiment(path).rows), "png")
    write_whole(path.with_suffix(".png"), lambda temporary: temporary.write_bytes(picture))


def _write_page(folder: Path, kept: Path) -> None:
    """Write the table and sections of experiments/README.md anew, from the records beside it."""
    if kept != folder:
        return
    page = folder / "README.md"
    experiments = [_described(folder, name) for name in names(folder)]
    records = _records(folder, kept)
    write_text(page, filled_in(page.read_text(encoding="utf-8"), experiments, records))


def _run(folder: Path, name: str, size: str) -> ExperimentRecord:
    module = load(folder, name)
    settings = module.SIZES[size]
    commit = _commit(folder)  # before, while what is on disk is what has been loaded
    start = time.monotonic()
    findings: Findings = module.measure(settings)
    return ExperimentRecord(
        name=name,
        size=size,
        settings=jsonable(dataclasses.asdict(settings)),
        measured=findings.measured,
        explanation=findings.explanation,
        tests=[dataclasses.asdict(test) for test in findings.tests],
        rows=[jsonable(row) for row in findings.rows],
        hardware=hardware("cuda" if size == "gpu" else "cpu"),
        versions=versions(),
        commit=commit,
        seconds=round(time.monotonic() - start, 1),
    )


def _result(kept: Path, name: str, size: str) -> Path:
    return kept / "results" / f"{name}.{size}.json"


def _records(folder: Path, kept: Path) -> dict[str, list[ExperimentRecord]]:
    """Return what is on record of each experiment: what was kept, or else what came with it."""
    found: dict[str, list[ExperimentRecord]] = {}
    for name in names(folder):
        paths = [
            next((path for path in both if path.exists()), None)
            for both in ((_result(kept, name, size), _result(folder, name, size)) for size in KEPT)
        ]
        found[name] = [read_experiment(path) for path in paths if path]
    return found


def _described(folder: Path, name: str) -> Described:
    return described(name, load(folder, name).__doc__ or "")


def _commit(folder: Path) -> str:
    """Return the commit that runs, "-changed" if the code differs from it; "" outside of git."""
    # what experiments write does not change what the next one measures
    code = ("--", str(folder.parent), ":!experiments/results", ":!experiments/README.md")
    asked = (
        ["rev-parse", "--short", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no", *code],
    )
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True, cwd=folder.parent
            ).stdout
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("-changed" if changed.strip() else "")
