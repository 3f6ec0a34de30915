"""A study that experiments share: its arms trained once, and the drift of any pair of them.

What has ended is kept for the next experiment and what was cut short goes on, in a folder named
after all that a run's bits may depend on besides its config, the code included: nothing that other
code trained is ever read. Leaves out what the drifts mean.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from experiments.kit.pair_drift import pair_drift
from stability.config.load import load_study
from stability.config.schema import BASELINE, StudyConfig
from stability.records.manifest import environment, hash_environment, read_manifest
from stability.records.paths import RunPaths
from stability.report.terminal.progress import StudyDisplay
from stability.study.checkpoints import updates_left_out
from stability.study.quiet import quieten_lightning
from stability.study.run import Run
from stability.study.run_study import plan, run_study
from stability.study.train_run import TrainOptions

__all__ = ["KEPT", "STABLE", "drift_of_pairs", "shipped_study"]

REPOSITORY = Path(__file__).parents[2]
KEPT = "runs/experiments"
"""Where the runs of a size that is kept lie, from the folder that the command is given in."""
METRICS = ("w1", "max_abs", "rel_l2")

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
"""What each size of the experiments on `configs/stable.yaml` changes in its base."""


def shipped_study(name: str, overrides: Mapping[str, str]) -> StudyConfig:
    """Return the study `configs/<name>.yaml` of this repository. ConfigError as `load_study`."""
    return load_study(REPOSITORY / "configs" / f"{name}.yaml", overrides)


def drift_of_pairs(
    study: StudyConfig, pairs: Mapping[str, tuple[str, str]], folder: str = "", jobs: int = 1
) -> list[dict[str, Any]]:
    """Train the arms of `pairs` (candidate, reference) and return their drifts.

    A row for each pair, seed and snapshot: `pair`, `seed`, `step`, `w1`, `max_abs`, `rel_l2`, and
    `left_out`, the updates of the candidate that its loss scaler left out in the whole run. Runs
    are kept below `folder`; "" is a temporary one. Up to `jobs` runs at once share this process's
    threads. ValueError if a run did not reach its last step, or a pair is none.
    """
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
    runs = plan(study, out)
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
    """Return how a run stands, with its message; `finished` alone if all is well."""
    if not run.paths.manifest.exists():
        return "not started"
    manifest = read_manifest(run.paths.manifest)
    return manifest.state + (f", {manifest.message}" if manifest.message else "")


@contextmanager
def _threads_each(jobs: int) -> Iterator[None]:
    """Give each of `jobs` runs its share of the threads that this process computes with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // jobs))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint() -> str:
    """Return a name for this environment and the code that trains."""
    digest = hashlib.sha256(hash_environment(environment()).encode())
    for path in sorted((REPOSITORY / "stability").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
