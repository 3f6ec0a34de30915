"""One run of one arm: start it or go on, train it, and leave a manifest that says how it went.

Leaves out the order of runs (`runner`) and how anything is displayed.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from stability.callbacks.batch_hash import BATCH_HASH, BatchHash
from stability.callbacks.drift_probe import DriftProbe
from stability.callbacks.progress import ProgressCallback, StudyObserver
from stability.callbacks.snapshot_writer import SnapshotWriter
from stability.callbacks.training_log import LogPosition, TrainingLog
from stability.config.load import to_dict
from stability.config.schema import ArmConfig, Axis
from stability.data.datamodule import TextDataModule
from stability.records.layout import RunPaths
from stability.records.manifest import Manifest, environment, read_manifest, write_manifest
from stability.records.metric_log import MetricLog, read_text
from stability.records.snapshots import hash_state
from stability.study.assemble import Parts, assemble, load_data, make_trainer
from stability.study.contract import ContractError, check_batches, check_start
from stability.study.expand import Arm, with_seed
from stability.study.observer_gate import ObserverError
from stability.study.observer_gate import check_observer as run_gate
from stability.tracking.records_logger import RecordsLogger
from stability.tracking.wandb_logger import WandbMode, finish, make_wandb_logger

__all__ = ["Run", "RunConflictError", "check_existing", "is_finished", "train"]


class RunConflictError(ValueError):
    """A run directory holds another run than the one asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One arm with one seed, and where its records go."""

    study: str
    arm: Arm
    axis: Axis
    seed: int
    paths: RunPaths
    baseline: RunPaths | None
    """The paired run; None for the baseline itself."""

    @property
    def config(self) -> ArmConfig:
        """The arm's config with this seed."""
        return with_seed(self.arm.config, self.seed)


def is_finished(run: Run) -> bool:
    """Whether the run's records are complete."""
    return run.paths.manifest.exists() and read_manifest(run.paths.manifest).state == "finished"


def check_existing(run: Run) -> None:
    """RunConflictError if the run's directory holds a run of another config or environment."""
    if not run.paths.manifest.exists():
        # a kill during the very first write leaves a temporary file and no manifest
        strangers = [path for path in run.paths.root.glob("*") if path.suffix != ".tmp"]
        if strangers:
            raise RunConflictError(
                f"{run.paths.root}: holds files but no manifest ({strangers[0].name}); "
                "use --out for another folder"
            )
        return
    manifest = read_manifest(run.paths.manifest)
    _refuse_difference(run, "config", manifest.config, to_dict(run.config))
    if manifest.state != "finished":
        _refuse_difference(run, "environment", manifest.environment, environment())


def _refuse_difference(run: Run, where: str, found: object, asked: object) -> None:
    if isinstance(found, dict) and isinstance(asked, dict):
        for key in sorted({*found, *asked}):
            _refuse_difference(run, f"{where}.{key}", found.get(key), asked.get(key))
    elif found != asked:
        raise RunConflictError(
            f"{run.paths.root}: holds a run with {where} = {found!r}, asked for {asked!r}; "
            "use --out for another folder, or remove this one"
        )


def train(
    run: Run, wandb_mode: WandbMode, observer: StudyObserver, *, check_observer: bool = False
) -> Manifest:
    """Train `run` to its last step, going on from its checkpoint if there is one.

    With `check_observer` the observer gate comes first: a run that looking would change is not
    trained, it fails.

    Returns the final manifest. Whatever goes wrong is recorded in it: a failure comes back as state
    `failed`; an interrupt is recorded as `interrupted` and raised as KeyboardInterrupt.
    """
    config = run.config
    parts = assemble(config)
    data = load_data(config)
    manifest = Manifest(
        study=run.study,
        arm=run.arm.name,
        seed=run.seed,
        axis=run.axis,
        config=to_dict(config),
        diff={path: list(values) for path, values in run.arm.diff.items()},
        environment=environment(),
        resolved=parts.attention.description,
        hashes={"init_weights": parts.init_hash, "text": data.text_hash},
        state="running",
        step=0,
        message="",
    )
    write_manifest(run.paths.manifest, manifest)
    try:
        if run.baseline is not None:
            check_start(read_manifest(run.baseline.manifest), manifest)
        if check_observer:
            manifest = _observed(manifest, config)
            write_manifest(run.paths.manifest, manifest)
        _fit(run, parts, data, wandb_mode, observer)
        manifest = replace(manifest, state="finished", hashes=_final_hashes(run, parts, manifest))
    except (KeyboardInterrupt, SystemExit):
        # Lightning turns Ctrl-C into SystemExit
        manifest = replace(manifest, state="interrupted")
        raise KeyboardInterrupt from None
    except ContractError as error:
        manifest = replace(manifest, state="failed", message=f"pair contract: {error}")
    except ObserverError as error:
        manifest = replace(manifest, state="failed", message=f"observer gate: {error}")
    except Exception as error:
        manifest = replace(manifest, state="failed", message=f"{type(error).__name__}: {error}")
        raise
    finally:
        manifest = replace(manifest, step=_steps_logged(run))
        write_manifest(run.paths.manifest, manifest)
    return manifest


def _observed(manifest: Manifest, config: ArmConfig) -> Manifest:
    """Return the manifest with the gate's result; ObserverError if it does not hold."""
    check = run_gate(config)
    if not check.equal:
        raise ObserverError(
            f"after {check.steps} steps the weights must be {check.unwatched[:16]} with every "
            f"instrument on, are {check.watched[:16]}"
        )
    return replace(manifest, observer=check.to_dict())


def _fit(
    run: Run, parts: Parts, data: TextDataModule, wandb_mode: WandbMode, observer: StudyObserver
) -> None:
    config = run.config
    checkpoint = _latest_checkpoint(run.paths)
    log = MetricLog(run.paths.metrics)
    if checkpoint is None:
        log.truncate_to(0)
    wandb = make_wandb_logger(
        wandb_mode,
        study=run.study,
        arm=run.arm.name,
        seed=run.seed,
        axis=run.axis,
        config=to_dict(config),
        directory=run.paths.wandb_dir,
    )
    loggers: list[Logger] = [RecordsLogger(log), *([wandb] if wandb else [])]
    trainer = make_trainer(config, run.paths, loggers, _callbacks(run, parts, log, observer))
    try:
        with warnings.catch_warnings():
            # a run that goes on has checkpoints there already
            warnings.filterwarnings("ignore", r"Checkpoint directory .* is not empty", UserWarning)
            trainer.fit(parts.module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    finally:
        log.close()
        if wandb:
            finish(wandb)


def _callbacks(run: Run, parts: Parts, log: MetricLog, observer: StudyObserver) -> list[Callback]:
    steps = run.config.train.planned_snapshots()
    callbacks: list[Callback] = [
        *parts.callbacks,
        TrainingLog(run.config.train.log_every),
        BatchHash(log),
        SnapshotWriter(parts.model, run.paths, steps),
    ]
    if run.baseline is not None:
        baseline = run.baseline
        callbacks.append(
            DriftProbe(
                parts.model,
                baseline,
                steps,
                check=lambda step: check_batches(baseline, run.paths, run.axis, step),
            )
        )
    return [*callbacks, LogPosition(log), ProgressCallback(observer)]


def _latest_checkpoint(paths: RunPaths) -> Path | None:
    return max(paths.checkpoints_dir.glob("step-*.ckpt"), default=None)


def _final_hashes(run: Run, parts: Parts, manifest: Manifest) -> dict[str, str]:
    batches = read_text(run.paths.metrics, BATCH_HASH)
    return {
        **manifest.hashes,
        "batches": batches[run.config.train.steps],
        "final_weights": hash_state(parts.model.state_dict()),
    }


def _steps_logged(run: Run) -> int:
    if not run.paths.metrics.exists():
        return 0
    return max(read_text(run.paths.metrics, BATCH_HASH), default=0)
