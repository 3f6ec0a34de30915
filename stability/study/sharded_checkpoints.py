"""Checkpoints of runs whose state several ranks hold: parts in a folder of DCP's, and the rest.

Each rank writes what it holds of weights and of the optimizer's moments; the rest of a checkpoint,
Lightning's counters and the callbacks' states, is the first rank's, in one file of the folder, in
which the name of what was written by parts stands in its place. Any layout goes on from it: each
rank reads its own part, whatever ranks have written it, and one process reads all. Leaves out when
a checkpoint is written and which ones stay (`checkpoints`).
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stability.records.dcp_files import DcpWrite, copy_dcp, fill_state, write_dcp
from stability.records.dcp_folders import DcpFolder
from stability.records.weight_files import Weights, load_torch_file

__all__ = [
    "copy_checkpoint",
    "has_parts",
    "holds_rest",
    "read_parts",
    "read_rest",
    "read_whole",
    "write_checkpoint",
]

REST = "rest.pt"
_STORED = "stored as"
"""The one key of what stands in a tensor's place: its name in the folder."""


def has_parts(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds tensors of which this rank has a part."""
    return bool(_split(checkpoint)[0])


def write_checkpoint(
    folder: Path, checkpoint: Mapping[str, Any], group: Any, *, is_first: bool
) -> DcpWrite:
    """Write a checkpoint into a folder while training goes on; called by every rank of `group`.

    What is no part of something is taken from the first rank.
    """
    parts, rest = _split(checkpoint)
    tensors = {".".join(place): value for place, value in parts.items()}
    return write_dcp(
        folder,
        tensors,
        process_group=group,
        places={".".join(place): place for place in parts},
        files={REST: _bytes_of(rest)} if is_first else {},
    )


def holds_rest(folder: Path) -> bool:
    """Whether a folder is such a checkpoint, and not some other one of DCP's."""
    return (folder / REST).is_file()


def read_rest(folder: Path) -> dict[str, Any]:
    """Return what is no part, with a stand-in for each tensor that is; ValueError if damaged."""
    content = load_torch_file(folder / REST)
    if not isinstance(content, dict):
        raise ValueError(f"{folder / REST}: must hold a checkpoint, got {type(content).__name__}")
    return content


def read_whole(folder: Path) -> dict[str, Any]:
    """Return a checkpoint as one process writes it, all in memory."""
    stored = _stored(folder)
    return _joined(read_rest(folder), lambda name, place: stored[name])


def read_parts(folder: Path, like: Callable[[tuple[str, ...]], Tensor | None]) -> dict[str, Any]:
    """Return a checkpoint with this rank's parts of the tensors that it shares.

    `like` gives, by its keys in the checkpoint, a tensor that is laid out as the one there is to
    be; where it gives None, or no DTensor, the whole tensor is read.
    """
    stored = _stored(folder)

    def load(name: str, place: tuple[str, ...]) -> Tensor:
        model = like(place)
        if not isinstance(model, DTensor) or tuple(model.shape) != stored.shapes[name]:
            return stored[name]
        own = torch.empty_like(model, dtype=stored.dtypes[name])
        fill_state({name: own}, stored)
        return own

    return _joined(read_rest(folder), load)


def copy_checkpoint(source: Path, target: Path, rest: Mapping[str, Any]) -> None:
    """Write a checkpoint that has another rest and the same parts, whole or not at all."""
    copy_dcp(source, target, files={REST: _bytes_of(rest)})


def _stored(folder: Path) -> Weights:
    return Weights(str(folder), DcpFolder(folder, everything=True))


def _bytes_of(rest: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.save(dict(rest), content)
    return content.getvalue()


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[tuple[str, ...], DTensor], dict[Any, Any]]:
    """Return the tensors that are parts by their keys, and the rest with stand-ins for them."""
    parts: dict[tuple[str, ...], DTensor] = {}

    def rest_of(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, DTensor):
            parts[place] = value
            return {_STORED: ".".join(place)}
        return _mapped(value, place, rest_of)

    return parts, rest_of(dict(checkpoint), ())


def _joined(rest: dict[str, Any], load: Callable[[str, tuple[str, ...]], Tensor]) -> dict[str, Any]:
    def whole_of(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping) and set(value) == {_STORED}:
            return load(value[_STORED], place)
        return _mapped(value, place, whole_of)

    return whole_of(rest, ())


def _mapped(
    value: Any, place: tuple[str, ...], function: Callable[[Any, tuple[str, ...]], Any]
) -> Any:
    """Return `value` with `function` of what is in it, each given its keys."""
    if isinstance(value, Mapping):
        return {key: function(each, (*place, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(x, (*place, str(i))) for i, x in enumerate(value))
    return value
