"""W&B as a Lightning logger: offline unless asked, silent, one run for each arm and seed.

Offline it needs no account and no network; `wandb sync` uploads the folder later, `wandb leet`
shows it in the terminal. Leaves out what is logged: every logger gets the same metrics.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb
from lightning.pytorch.loggers import WandbLogger

from stability.records.names import STEP_AXIS

__all__ = ["WandbMode", "finish", "make_wandb_logger", "resolve_mode"]

WandbMode = Literal["offline", "online", "disabled"]

PROJECT = "training-stability"

_MODES: dict[str, WandbMode] = {
    "offline": "offline",
    "dryrun": "offline",
    "online": "online",
    "run": "online",
    "disabled": "disabled",
}
"""What W&B accepts in WANDB_MODE, with its old names."""


def resolve_mode(mode: WandbMode) -> WandbMode:
    """Return the mode to use: WANDB_MODE replaces the default, `offline`, and nothing else.

    ValueError if that variable holds an unknown word.
    """
    chosen = os.environ.get("WANDB_MODE", "")
    if mode != "offline" or not chosen:
        return mode
    if chosen not in _MODES:
        raise ValueError(
            f"resolve_mode: WANDB_MODE must be one of {', '.join(_MODES)}, got {chosen!r}; unset it"
        )
    return _MODES[chosen]


def make_wandb_logger(
    mode: WandbMode,
    *,
    study: str,
    arm: str,
    seed: int,
    axis: str,
    config: Mapping[str, Any],
    directory: Path,
) -> WandbLogger | None:
    """Start a W&B run, grouped by study, and return its logger; None if `mode` is `disabled`.

    `config` is the arm's resolved config, JSON-able. `directory` gets W&B's files and must be
    called `wandb`, as W&B itself insists. A run that goes on has the same id: W&B joins its parts.
    ValueError for another directory or an unknown WANDB_MODE.
    """
    mode = resolve_mode(mode)
    if mode == "disabled":
        return None
    if directory.name != "wandb":
        raise ValueError(f"make_wandb_logger: directory must be called wandb, got {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=PROJECT,
        dir=directory.parent,
        id=_run_id(study, arm, seed, config),
        name=f"{arm}-seed{seed}",
        group=study,
        job_type=arm,
        tags=[axis, f"seed-{seed}"],
        config=dict(config),
        mode=mode,
        resume="allow" if mode == "online" else None,
        reinit="create_new",
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            x_disable_stats=mode == "offline",
        ),
    )
    run.define_metric(STEP_AXIS)
    run.define_metric("*", step_metric=STEP_AXIS, step_sync=True)
    return WandbLogger(experiment=run)


def finish(logger: WandbLogger) -> None:
    """Write out and close the run of `logger`."""
    logger.experiment.finish()


def _run_id(study: str, arm: str, seed: int, config: Mapping[str, Any]) -> str:
    identity = json.dumps([study, arm, seed, dict(config)], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
