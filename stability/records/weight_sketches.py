"""The hash and the sketch of a run's weights on disk, 0.5 MB and the vectors' values a step.

They stay where snapshots are dropped: the hash says whether two runs had the same bits there, and
the sketch how far apart they were. Beside it stand the model's vectors, its biases and gains, as
they are: what noise moves of them is left out of a distance. A file is safetensors with these
tensors, and what else it says in its metadata. Leaves out how they are made
(`metrics.weight_hash`, `metrics.weight_sketch`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stability.records.atomic_files import write_whole
from stability.records.plain_files import check_plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SKETCH_BYTES", "StoredSketch", "read_weight_sketch", "write_weight_sketch"]

SKETCH_BYTES = 8 * 2**16
"""Of a file, less its head and its vectors."""
_BUCKETS = "buckets"
_VECTOR, _VECTORS = "vector.", "has_vectors"
_NOTES = "weight_sketch"
"""The one name in the metadata: of several safetensors gives the order by chance, and equal weights
are to give equal files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSketch:
    """The hash and the sketch of the weights at one step."""

    weights: str
    """The order-free hash, with counters and masks."""
    outline: str
    """A hash of the weights' names and shapes: only sketches of one outline can be compared."""
    outside: int
    """Values that are not finite, or too large for the sketch."""
    buckets: "Tensor"
    """FP64, on the CPU."""
    vectors: "Mapping[str, Tensor] | None" = None
    """The weights of one dimension by name, FP32 or FP64, on the CPU; None in an older file."""


def write_weight_sketch(path: Path, stored: StoredSketch) -> None:
    """Write a hash and a sketch, whole or not at all; equal ones are equal files."""
    from safetensors.torch import save_file  # heavy: torch

    said = {"weights": stored.weights, "outline": stored.outline, "outside": stored.outside}
    if stored.vectors is not None:
        said[_VECTORS] = True
    vectors = {f"{_VECTOR}{name}": vector for name, vector in (stored.vectors or {}).items()}
    tensors = {_BUCKETS: stored.buckets, **vectors}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    notes = {_NOTES: json.dumps(said, sort_keys=True)}
    write_whole(path, lambda temporary: save_file(tensors, temporary, notes))


def read_weight_sketch(path: Path) -> StoredSketch:
    """Return what `write_weight_sketch` wrote; ValueError, naming the file, if it did not."""
    import safetensors  # heavy: torch

    try:
        with safetensors.safe_open(check_plain(path), "pt") as file:
            said = json.loads((file.metadata() or {})[_NOTES])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
        buckets = found.pop(_BUCKETS)
        vectors = {name.removeprefix(_VECTOR): vector for name, vector in found.items()}
        has_vectors = said.pop(_VECTORS, False)
        stored = StoredSketch(buckets=buckets, vectors=vectors if has_vectors else None, **said)
        if not (isinstance(stored.weights, str) and isinstance(stored.outline, str)):
            raise TypeError("its hashes are no text")
        if type(stored.outside) is not int or buckets.dim() != 1 or buckets.itemsize != 8:
            raise TypeError("it holds other numbers")
        if any(vector.dim() != 1 or not vector.is_floating_point() for vector in vectors.values()):
            raise TypeError("it holds a vector that is none")
    except (OSError, safetensors.SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: must be a whole sketch of weights: {error}") from error
    return stored
