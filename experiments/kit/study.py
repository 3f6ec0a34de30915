"""Trains the arms of a study once for several experiments, and measures drift between any two arms.

A study logs the drift of each arm from the study's baseline. Here any two arms may be a pair: FP16
and FP32 of one attention, or two attentions in FP16. The pair contract is checked for each pair
before its drift is measured.

The next experiment uses runs that have finished and resumes runs that were interrupted. The runs
lie in a folder whose name is a hash of the environment (versions, machine, threads) and of the
source of `stability` and of the attention kernels. So runs that other code trained are never read.
The code of `experiments` is left out of the hash on purpose: none of it runs inside a training, and
what it does with the weights it does anew each time. What it decides of a training is the config,
which each run is held against, and the threads, which are part of the environment.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from experiments.kit.rows import Rows, by_seed, over
from stability.analysis.growth_fit import drift_slope
from stability.analysis.pair_contract import prove_pair
from stability.config.load import load_study
from stability.config.schema import BASELINE
from stability.config.study import StudyConfig
from stability.metrics.drift import ALL, drift
from stability.records.identity import environment, hash_environment, hash_sources
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, checkpoint_steps, snapshot_steps
from stability.records.run_files import read_run_snapshot
from stability.report.terminal.progress import StudyDisplay
from stability.study.assemble import quieten_lightning
from stability.study.run import Run
from stability.study.run_study import plan_study, run_study
from stability.study.train_run import TrainOptions

__all__ = [
    "KEPT",
    "STABLE",
    "at_step",
    "drift_of_pairs",
    "log_scatter",
    "pair_drift",
    "ratio_at",
    "shipped_study",
    "slopes",
    "updates_left_out",
]

REPOSITORY = Path(__file__).parents[2]
KEPT = "runs/experiments"
"""Folder in which the sizes cpu and gpu keep their runs, relative to the working directory."""
METRICS = ("w1", "max_abs", "rel_l2")
"""The drift metrics that a row of `drift_of_pairs` holds."""

STABLE: dict[str, dict[str, str]] = {
    "quick": {
        "model": "{depth: 1, width: 16, heads: 1, context: 32}",
        "optimizer.warmup_steps": "5",
        "train.steps": "20",
        "train.batch_size": "4",
        "train.checkpoint_every": "20",
    },
    "cpu": {},
    "gpu": {
        "model": "medium",
        "train.steps": "2000",
        "train.checkpoint_every": "500",
        "train.accelerator": "gpu",
        "train.snapshot_steps": "[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]",
    },
}
"""For each size of an experiment on `configs/stable.yaml`: the keys of its base it overrides."""


def pair_drift(
    study_dir: Path, candidate: str, reference: str, seeds: Iterable[int]
) -> list[dict[str, Any]]:
    """Return the drift of arm `candidate` from arm `reference`, over all parameters together.

    There is a row for each seed and each step at which both runs have a snapshot: `seed`, `step`
    and every drift metric. ValueError if the records break the pair contract, if the arms differ in
    more than one axis, or if a run is missing.
    """
    rows = []
    for seed in seeds:
        first, second = (RunPaths.for_run(study_dir, arm, seed) for arm in (reference, candidate))
        proof = prove_pair(first, second)
        if proof.breach is not None or len(proof.axes) > 1:
            raise ValueError(
                f"pair_drift: {candidate} and {reference} must differ in one axis alone, seed "
                f"{seed}: {proof.sentence}"
            )
        for step in sorted({*snapshot_steps(first)} & {*snapshot_steps(second)}):
            found = drift(read_run_snapshot(second, step), read_run_snapshot(first, step))
            rows.append({"seed": seed, "step": step, **found[ALL]})
    return rows


def at_step(rows: Rows, pair: str, metric: str, step: int) -> dict[int, float]:
    """Return the values of `metric` of `pair` at `step`, by seed."""
    return by_seed(rows, metric, pair=pair, step=step)


def slopes(rows: Rows, pair: str, metric: str) -> dict[int, float]:
    """Return by seed the Theil-Sen slope of `metric` of `pair` over all steps, per step."""
    course: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["pair"] == pair:
            course.setdefault(row["seed"], {})[row["step"]] = row[metric]
    return {seed: drift_slope(list(found), list(found.values())) for seed, found in course.items()}


def ratio_at(rows: Rows, pair: str, other: str, metric: str, step: int) -> dict[int, float]:
    """Return by seed the value of `metric` at `step` of `pair`, divided by that of pair `other`."""
    return over(at_step(rows, pair, metric, step), at_step(rows, other, metric, step))


def log_scatter(values: Mapping[int, float]) -> float:
    """Return the standard deviation over seeds of the natural logs of `values`.

    `stated_tests.scatter_within` compares two of them. ValueError for fewer than two seeds, and for
    a value that is not positive.
    """
    if len(values) < 2:
        raise ValueError(
            f"log_scatter: values must be of at least two seeds, got {len(values)}; one seed "
            "does not scatter"
        )
    for seed, value in values.items():
        if not value > 0:
            raise ValueError(
                f"log_scatter: values must be positive, got {value} at seed {seed}; others have "
                "no log"
            )
    return stdev(math.log(value) for value in values.values())


def shipped_study(name: str, overrides: Mapping[str, str]) -> StudyConfig:
    """Load the study `configs/<name>.yaml` of this repository. ConfigError as `load_study`."""
    return load_study(REPOSITORY / "configs" / f"{name}.yaml", overrides)


def drift_of_pairs(
    study: StudyConfig, pairs: Mapping[str, tuple[str, str]], folder: str = "", jobs: int = 1
) -> list[dict[str, Any]]:
    """Train the arms of `pairs` and return the drift of each pair.

    `pairs` maps a name to (candidate, reference), two arms of `study`. There is a row for each
    pair, seed and snapshot: `pair`, `seed`, `step`, `w1`, `max_abs`, `rel_l2`, and `left_out`, the
    number of updates that the candidate's loss scaler skipped in the whole run. Runs are kept below
    `folder`, or in a temporary folder if it is "". Up to `jobs` runs train at once and share this
    process's threads. ValueError if a run did not reach its last step, or if two arms are no pair
    by the pair contract.
    """
    # The baseline is trained even if no pair names it: each other run logs its drift from it.
    arms = {BASELINE: {}, **{arm: study.arms[arm] for pair in pairs.values() for arm in pair}}
    quieten_lightning()
    with TemporaryDirectory() as temporary, _threads_each(jobs):
        out = Path(folder or temporary) / _fingerprint()
        _train(replace(study, arms=arms), out, jobs)
        return [
            row
            for name, pair in pairs.items()
            for row in _rows(out / study.name, name, pair, study.seeds)
        ]


def _rows(
    study_dir: Path, name: str, pair: tuple[str, str], seeds: Iterable[int]
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        left_out = updates_left_out(RunPaths.for_run(study_dir, pair[0], seed))
        for row in pair_drift(study_dir, *pair, [seed]):
            kept = {key: row[key] for key in ("seed", "step", *METRICS)}
            yield {"pair": name, **kept, "left_out": left_out}


def _train(study: StudyConfig, out: Path, jobs: int) -> None:
    runs = plan_study(study, out)
    options = TrainOptions(wandb_mode="disabled")
    with StudyDisplay(Console(stderr=True), len(runs)) as display:
        run_study(study, out, options=options, observer=display, jobs=jobs)
    unfinished = [run for run in runs if _state(run) != "finished"]
    if unfinished:
        first = unfinished[0]
        raise ValueError(
            f"drift_of_pairs: every run must reach its last step, {len(unfinished)} of {len(runs)} "
            f"did not; first {first.paths.root}: {_state(first)}"
        )


def _state(run: Run) -> str:
    """Return the state of a run in words, with the manifest's message if there is one."""
    if not run.paths.manifest.exists():
        return "not started"
    manifest = read_manifest(run.paths.manifest)
    return manifest.state + (f", {manifest.message}" if manifest.message else "")


@contextmanager
def _threads_each(jobs: int) -> Iterator[None]:
    """Inside the block, divide torch's threads evenly among `jobs` runs that train at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // jobs))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint() -> str:
    """Hash the environment, attention kernels included, and the source of `stability`."""
    known = hash_environment(environment()) + hash_sources(REPOSITORY / "stability")
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def updates_left_out(paths: RunPaths) -> int:
    """Return how many updates the loss scaler had skipped at the run's last checkpoint.

    That is the run's step less the optimizer's own count of updates, because a skipped update
    never reaches the optimizer. ValueError if the run has no checkpoint.
    """
    steps = checkpoint_steps(paths)
    if not steps:
        raise ValueError(f"updates_left_out: {paths.root} must hold a checkpoint, has none")
    checkpoint = torch.load(paths.checkpoint(steps[-1]), map_location="cpu", weights_only=True)
    # An optimizer that was never called has no state: all updates were skipped.
    states = checkpoint["optimizer_states"][0]["state"].values()
    return steps[-1] - int(min((state["step"] for state in states), default=0))
