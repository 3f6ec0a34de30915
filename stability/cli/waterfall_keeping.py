"""`stability deviate --record`: a waterfall kept in the run whose q, k and v it was measured on.

Leaves out the measuring (`cli.deviate`) and the file (`records.waterfall_record`).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from attention_kernels.machine import versions
from stability.probe.microbenchmark import Problem
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.waterfall_record import WaterfallRecord, write_waterfall

__all__ = ["keep_waterfall", "own_numerics"]

Changes = tuple[tuple[str, Any], ...]


def own_numerics(checkpoint: str) -> tuple[str, Changes]:
    """Return the flash profile that a run trains with, and what its config changes in it.

    `fa2` as it is for a run with another attention, and without a run.
    """
    manifest = RunPaths(Path(checkpoint)).manifest
    if not checkpoint or not manifest.is_file():  # `study.capture` names a folder that holds no run
        return "fa2", ()
    attention = read_manifest(manifest).config["attention"]
    if attention["implementation"] != "flash":
        return "fa2", ()
    return attention["profile"] or "fa2", tuple(attention["numerics"].items())


def keep_waterfall(
    checkpoint: str, layer: int, step: int | None, problem: Problem, steps: list[dict[str, Any]]
) -> None:
    """Write the waterfall of `problem` into the run `checkpoint`, and say where."""
    run = RunPaths(Path(checkpoint))
    record = WaterfallRecord(
        profile=problem.profile,
        format=problem.format,
        layer=layer,
        step=snapshot_steps(run)[-1] if step is None else step,
        point=asdict(problem),
        numerics=problem.numerics().to_dict(),
        steps=steps,
        versions=versions(),
    )
    kept = write_waterfall(run, record)
    # beside what --json prints, not in it
    Console(stderr=True).print(f"kept in {kept}", soft_wrap=True, highlight=False, markup=False)
