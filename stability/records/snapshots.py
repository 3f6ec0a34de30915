"""Snapshots: a run's weights on disk, and the hash that says two are the same bits.

One process writes them as safetensors, several ranks as a folder of DCP's (`dcp_files`). Leaves out
when a snapshot is written (`recorder.writer`) and weights from elsewhere (`weight_files`).
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stability.records.atomic_files import write_whole
from stability.records.plain_files import check_plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_same_weights",
    "count_values",
    "hash_state",
    "read_snapshot",
    "snapshot_dtypes",
    "write_snapshot",
]

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What safetensors calls torch's dtypes of weights."""


def write_snapshot(path: Path, state: "Mapping[str, Tensor]") -> None:
    """Write tensors by name, whole or not at all; dtypes are kept.

    A tensor that shares memory with another is written once for each name.
    """
    from safetensors.torch import save_file  # heavy: torch

    own = {name: _own(tensor) for name, tensor in state.items()}
    write_whole(path, lambda temporary: save_file(own, temporary))


def read_snapshot(path: Path) -> "dict[str, Tensor]":
    """Return the tensors of a snapshot by name, on the CPU, whether one process or many wrote it.

    ValueError, naming the file, if it is missing or damaged.
    """
    import safetensors.torch  # heavy: torch

    if path.is_dir():
        from stability.records.dcp_folders import DcpFolder  # heavy: torch

        folder = DcpFolder(path, everything=True)
        return {name: folder.load(name) for name in folder.outlines}
    try:
        return safetensors.torch.load_file(check_plain(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: must be a whole snapshot: {error}") from error


def snapshot_dtypes(path: Path) -> dict[str, str]:
    """Return the dtype of each floating weight of a snapshot by name, as `float32`.

    Of its file the header alone is read. None where it is missing or damaged, or many wrote it.
    """
    import safetensors  # heavy: numpy

    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(check_plain(path), "numpy") as file:
            names = file.keys()
            codes = {name: file.get_slice(name).get_dtype() for name in names}
    except (OSError, safetensors.SafetensorError):
        return {}
    return {name: _DTYPES[code] for name, code in codes.items() if code in _DTYPES}


def count_values(path: Path) -> int:
    """Return how many values the tensors of a snapshot have, by its header alone.

    0 where it is missing or damaged, or many wrote it.
    """
    import safetensors  # heavy: numpy

    if not path.is_file():
        return 0
    try:
        with safetensors.safe_open(check_plain(path), "numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 it is no dict
    except (OSError, safetensors.SafetensorError):
        return 0


def check_same_weights(
    shapes: Mapping[str, tuple[int, ...]], baseline: Mapping[str, tuple[int, ...]]
) -> None:
    """ValueError, naming the first that differs, unless both have the same names and shapes."""
    for name in sorted({*shapes, *baseline}):
        if name not in shapes or name not in baseline:
            where = "the baseline" if name in shapes else "this run"
            raise ValueError(f"weights must be those of the baseline, {where} has no {name}")
        if shapes[name] != baseline[name]:
            raise ValueError(
                f"{name} must have the baseline's shape {baseline[name]}, has {shapes[name]}"
            )


def hash_state(state: "Mapping[str, Tensor]") -> str:
    """Return the SHA-256 over names, dtypes, shapes and bits, in the order of names."""
    import torch  # heavy

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = _own(state[name])
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _own(tensor: "Tensor") -> "Tensor":
    return tensor.detach().to("cpu", copy=True).contiguous()
