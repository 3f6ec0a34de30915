"""The trained state that all arms of a study begin from, where its base names one: `start`.

Failures come after thousands of steps. With `start` an arm's weights are not drawn but read, from
anything `stability compare` reads: a run (its last snapshot), a snapshot, a folder of Hugging
Face's, a state dict of `torch.save`, a checkpoint of Lightning's, a folder of
torch.distributed.checkpoint. Of a checkpoint that one of our own runs has written the optimizer's
state is taken over too, by each arm whose optimizer is of the same kind; an arm that changes the
optimizer begins with none. Steps count from 0, and so do the schedule and the batches; a nudge
moves the weights that were read. The checksum of what was read is on record (`hashes.start`), so
arms that began elsewhere are no pair. Going on with the very same run is a fork (`fork`).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stability.config.convert import nearest
from stability.records.sealed_json import file_checksum
from stability.records.snapshots import hash_state
from stability.records.weight_files import TORCH_SUFFIXES, Weights, load_torch_file, open_weights
from stability.study.checkpoints import DOOR
from stability.study.sharded_checkpoints import holds_rest, read_whole

__all__ = ["Start", "begin", "read_start_state"]

_PREFIXES = ("", "model.", "module.", "_orig_mod.", "model._orig_mod.", "module._orig_mod.")
"""What may open each name in a file, as wrappers of a model put it there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run begins from: weights by the model's own names, and a state of its optimizer."""

    weights: Mapping[str, Tensor]
    optimizer: dict[str, Any] | None
    checksum: str


def read_start_state(model: nn.Module, start: str) -> Start:
    """Return the state at the path `start`, for `model`.

    ValueError, one line, for what can't be read, and for names, shapes or values that are not those
    of the model.
    """
    path = Path(start)
    try:
        weights = open_weights(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"start: {error}") from error
    names = _names(model.state_dict(), weights, start)
    read = {name: weights[own].clone() for name, own in names.items()}
    for name, value in read.items():
        if not value.isfinite().all():
            raise ValueError(f"start: {start} must hold finite values, {names[name]} has others")
    checksum = file_checksum(path) if path.is_file() else hash_state(read)
    return Start(weights=read, optimizer=_optimizer_state(path), checksum=checksum)


def begin(model: nn.Module, start: Start) -> None:
    """Put the weights that were read into `model`, in the dtype of its own."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(start.weights[name])


def _names(own: Mapping[str, Tensor], weights: Weights, start: str) -> dict[str, str]:
    """Return for each name of the model's the one in the file; ValueError unless all fit."""
    opens = max(_PREFIXES, key=lambda prefix: sum(prefix + name in weights for name in own))
    names = {name: opens + name for name in own}
    lacking = [name for name in own if names[name] not in weights]
    if lacking:
        raise ValueError(
            f"start: {start} must hold each weight of the model, lacks {lacking[0]} and "
            f"{len(lacking) - 1} of {len(own)} others; nearest: {nearest(lacking[0], weights)}"
        )
    further = [name for name in weights if name not in names.values()]
    if further:
        raise ValueError(
            f"start: {start} must hold the weights of this model alone, also has {further[0]} and "
            f"{len(further) - 1} others"
        )
    for name, value in own.items():
        shape = weights.shapes[names[name]]
        if shape != tuple(value.shape):
            raise ValueError(
                f"start: {start} must hold weights of the model's shapes, {names[name]} is {shape} "
                f"and not {tuple(value.shape)}"
            )
    return names


def _optimizer_state(path: Path) -> dict[str, Any] | None:
    """Return the optimizer's state in a checkpoint of our own runs; None of all else.

    Of one that several ranks wrote it is whole, as one process would have written it.
    """
    if path.is_dir():
        content = read_whole(path) if holds_rest(path) else {}
    else:
        content = load_torch_file(path) if path.suffix in TORCH_SUFFIXES else {}
    named = content if isinstance(content, Mapping) else {}
    states = named.get("optimizer_states")
    # of another's the groups of parameters may be in another order
    callbacks = named.get("callbacks")
    is_ours = isinstance(callbacks, Mapping) and DOOR in callbacks
    if not is_ours or not isinstance(states, list) or len(states) != 1:
        return None
    return copy.deepcopy(states[0])
