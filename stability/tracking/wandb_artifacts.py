"""A run's snapshots as W&B artifacts of type model, one version for each step.

W&B stores equal files once, so sending them again costs a checksum. Leaves out when they are sent:
only online, where somebody else may want the weights.
"""

import wandb

from stability.records.paths import RunPaths, snapshot_steps

__all__ = ["log_snapshots"]

_NAME_LENGTH = 128


def log_snapshots(run: wandb.Run, study: str, paths: RunPaths) -> None:
    """Send every snapshot of the run in `paths` as `<study>-<arm>-seed-<n>`, alias `step-<n>`."""
    # names of studies and arms hold only what W&B allows in an artifact's, but two may be too long
    own = f"-{paths.arm}-seed-{paths.seed}"
    name = study[: _NAME_LENGTH - len(own)] + own
    for step in snapshot_steps(paths):
        artifact = wandb.Artifact(name, type="model", metadata={"step": step})
        # the file itself, no copy in W&B's cache: a snapshot is never written again
        artifact.add_file(str(paths.snapshot(step)), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=[f"step-{step}"])
