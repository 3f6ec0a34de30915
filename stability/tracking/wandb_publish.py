"""A run that has ended, published to W&B whole: its history from the records, then its summary.

What was published already is left alone: a stamp beside W&B's files says what that was. Leaves out
where the summary comes from (`report.wandb_study`).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stability.records.atomic_files import write_text
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths
from stability.tracking.wandb_artifacts import log_snapshots
from stability.tracking.wandb_environment import WandbMode, destination
from stability.tracking.wandb_logger import finish, make_wandb_logger
from stability.tracking.wandb_replay import replay

__all__ = ["publish_once", "publish_run"]


def publish_run(
    mode: WandbMode, paths: RunPaths, manifest: Manifest, summary: Mapping[str, Any]
) -> None:
    """Send the history that W&B lacks, set `summary`, and online send the snapshots.

    W&B's own errors, OSError for its server, ValueError for a damaged log.
    """

    def publish() -> None:
        logger = make_wandb_logger(
            mode,
            study=manifest.study,
            arm=manifest.arm,
            seed=manifest.seed,
            axis=manifest.axis,
            config=manifest.config,
            directory=paths.wandb_dir,
        )
        if logger is None:
            return
        try:
            replay(paths.metrics, logger)
            logger.complete_summary()
            logger.experiment.summary.update(dict(summary))
            if mode == "online":
                log_snapshots(logger.experiment, manifest.study, paths)
        finally:
            finish(logger)

    said = {"summary": dict(summary), "files": manifest.files}
    publish_once(mode, paths.wandb_dir, said, publish)


def publish_once(
    mode: WandbMode, directory: Path, content: Mapping[str, Any], publish: Callable[[], None]
) -> None:
    """Call `publish`, unless it was called for the same content, mode and destination before.

    `content` is JSON-able; `directory` is W&B's own, and keeps the stamp.
    """
    stamp = directory / f"published-{mode}.sha256"
    said = json.dumps([destination(), dict(content)], sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest:
        return
    publish()
    write_text(stamp, digest + "\n")
