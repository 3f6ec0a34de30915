"""Lays down what a fork goes on from: the parent's log and checkpoint, as the fork's own files.

Leaves out which run that is and whether it may be forked (`fork`).
"""

from typing import Any

import torch

from stability.records.atomic_files import atomic_path
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_file
from stability.records.sealed_json import file_checksum

__all__ = ["lay_fork"]

_DRIFT = b'"drift/'
_LOG_POSITION = "LogPosition"
"""Lightning's key for the state of `callbacks.training_log.LogPosition`."""


def lay_fork(parent: RunPaths, fork: RunPaths, at: int, eps: float) -> dict[str, str]:
    """Copy the parent's records up to step `at` into the fork's folder; return the files it lists.

    Drifts are left out of the log: they are distances from the parent's baseline. `eps` is the
    fork's own: an optimizer takes it from its state, not from its config. ValueError if the
    parent's checkpoint is damaged or gone.
    """
    checkpoint: dict[str, Any] = torch.load(
        read_run_file(parent, parent.checkpoint(at)), map_location="cpu", weights_only=True
    )
    position = checkpoint["callbacks"][_LOG_POSITION]
    kept = [
        line
        for line in parent.metrics.read_bytes()[: position["position"]].splitlines(keepends=True)
        if _DRIFT not in line
    ]
    with atomic_path(fork.metrics) as temporary:
        temporary.write_bytes(b"".join(kept))
    position["position"] = sum(map(len, kept))
    for optimizer in checkpoint["optimizer_states"]:
        for group in optimizer["param_groups"]:
            group["eps"] = eps
    path = fork.checkpoint(at)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        torch.save(checkpoint, file)
    return {fork.name_of(path): file_checksum(path)}
