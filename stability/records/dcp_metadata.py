"""What a checkpoint of torch.distributed.checkpoint holds: its tensors, and where their chunks lie.

Read from the folder's `.metadata` (`dcp_pickle`), or from the headers of the safetensors files that
DCP's Hugging Face writer leaves where each rank writes its own. Each field is checked here; that
the chunks are there and make up their tensors is checked by `check_chunks`, so that a tensor nobody
asks for may be damaged. Leaves out reading values, and which of the tensors are weights
(`dcp_folders`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from stability.records.dcp_pickle import Record, read_dcp_pickle
from stability.records.plain_files import check_plain, read_plain

__all__ = [
    "METADATA",
    "DcpChunk",
    "DcpMetadata",
    "DcpTensor",
    "check_chunks",
    "hf_shards",
    "read_dcp_metadata",
    "read_hf_shards",
]

METADATA = ".metadata"
"""The file that makes a folder a checkpoint; DCP writes it last."""

_HF_SHARDS = "shard-*-model-*.safetensors"
_HF_OFFSETS = "DCP_SHARDING_INFO"

_MOST_PLACES = 64
"""Dimensions of a tensor, at most, as of torch's."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the part of a file that holds it.

    `start` and `length` are bytes of what torch.save wrote; `start` is -1 in a safetensors file,
    where the tensor's name leads to it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor and its chunks, those without values left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The tensors of a checkpoint by name, and the names of what are no tensors.

    `places` has for a name its keys in the nested state that was saved, where that is on record.
    """

    tensors: Mapping[str, DcpTensor]
    objects: tuple[str, ...]
    places: Mapping[str, tuple[str, ...]]


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Return what the `.metadata` of a folder says.

    ValueError, naming the file, if it is missing, damaged, or says what DCP does not.
    """
    path = folder / METADATA
    with _naming(path):
        found = read_dcp_pickle(read_plain(path))
        entries = _field(found, "state_dict_metadata", dict)
        stored = _stored(_field(found, "storage_data", dict))
        tensors = {
            str(name): _tensor(str(name), entry, stored)
            for name, entry in entries.items()
            if _kind(entry) == "TensorStorageMetadata"
        }
        objects = tuple(str(name) for name in entries if str(name) not in tensors)
        return DcpMetadata(tensors, objects, _places(found.fields.get("planner_data")))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: must be the metadata that torch.distributed.checkpoint writes: {error}"
        ) from error


def _kind(thing: Any) -> str:
    return thing.kind if isinstance(thing, Record) else type(thing).__name__


def _field(record: Any, name: str, kind: type) -> Any:
    value = record.fields.get(name) if isinstance(record, Record) else None
    # bool is a number to Python
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{_kind(record)} has no {name} of the type {kind.__name__}")
    return value


def _sizes(record: Any, name: str) -> tuple[int, ...]:
    sizes = _field(record, name, tuple)
    if len(sizes) > _MOST_PLACES or not all(type(x) is int and x >= 0 for x in sizes):
        raise ValueError(f"{_kind(record)} has no {name} that are sizes")
    return sizes


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
"""By name and offsets of a chunk its file, and where it begins and how long it is there."""


def _stored(entries: Mapping[Any, Any]) -> _Places:
    found: _Places = {}
    for index, info in entries.items():
        name, offset = _field(index, "fqn", str), index.fields.get("offset")
        file = _field(info, "relative_path", str)
        start, length = _field(info, "offset", int), _field(info, "length", int)
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{name} is in {file[:200]!r}, which is no file of the folder")
        if start < 0 or length < 0:
            raise ValueError(f"{name} is at {start} in {file} and {length} bytes long")
        if transforms := info.fields.get("transform_descriptors"):
            raise ValueError(f"{name} is stored as {str(transforms)[:80]}, must be plain")
        place = None if offset is None else _sizes(index, "offset")
        found[name, place] = (file, start, length)
    return found


def _tensor(name: str, entry: Record, stored: _Places) -> DcpTensor:
    properties = _field(entry, "properties", Record)
    dtype = properties.fields.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    shape = _sizes(entry, "size")
    chunks, listed = [], _field(entry, "chunks", list)
    # an entry without a place is a whole tensor's
    whole = stored.get((name, None)) if len(listed) == 1 else None
    for chunk in listed:
        offsets, sizes = _sizes(chunk, "offsets"), _sizes(chunk, "sizes")
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, a chunk of it {len(sizes)}")
        # what a rank has of a tensor that is smaller than the number of ranks
        if not math.prod(sizes):
            continue
        place = stored.get((name, offsets), whole)
        if place is None:
            raise ValueError(f"{name} has a chunk at {offsets} that is in no file")
        chunks.append(DcpChunk(offsets, sizes, *place))
    layout = str(properties.fields.get("layout", "torch.strided")).removeprefix("torch.")
    return DcpTensor(shape, dtype, layout, tuple(chunks))


def _places(content: Any) -> dict[str, tuple[str, ...]]:
    """Return the keys by name; a state that was saved flat, or Megatron's, has none."""
    if not isinstance(content, dict):
        return {}
    return {
        str(name): tuple(str(key) for key in keys)
        for name, keys in content.items()
        if isinstance(keys, tuple) and all(isinstance(key, str | int) for key in keys) and keys
    }


def check_chunks(folder: Path, tensors: Mapping[str, DcpTensor]) -> None:
    """Check that the chunks are in their files, apart from one another, and make up the tensors.

    So no tensor takes more memory than its files take of the disk. ValueError, which names the
    file, for one that is missing or too short, chunks that overlap or leave a gap, and bytes that
    two chunks claim.
    """
    parts: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        _check_boxes(folder, name, tensor)
        for chunk in tensor.chunks:
            needed = math.prod(chunk.sizes) * tensor.dtype.itemsize
            if needed > chunk.length:
                raise ValueError(
                    f"{folder / chunk.file}: must hold the {needed} bytes of a chunk of {name}, "
                    f"{chunk.length} are said to be its"
                )
            parts.setdefault(chunk.file, []).append((chunk.start, chunk.length, name))
    for file, found in parts.items():
        _check_parts(folder / file, sorted(found))


def _check_parts(path: Path, parts: Sequence[tuple[int, int, str]]) -> None:
    if any(start < 0 for start, _, _ in parts):
        # the library of safetensors has checked the file
        return
    try:
        size = check_plain(path).stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: must be a file of the checkpoint: {error.strerror}") from error
    end, last = 0, ""
    for start, length, name in parts:
        if start < end:
            raise ValueError(f"{path}: must hold each chunk once, {last} and {name} overlap")
        end, last = start + length, name
    if end > size:
        raise ValueError(
            f"{path}: must hold {end} bytes, has {size}; it is cut short, and ends before {last}"
        )


def _check_boxes(folder: Path, name: str, tensor: DcpTensor) -> None:
    """Check that the chunks of a tensor cover it, each element once."""
    covered = 0
    for chunk in tensor.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > most for end, most in zip(ends, tensor.shape, strict=True)):
            raise ValueError(
                f"{folder / chunk.file}: must hold a part of {name}, whose shape is "
                f"{tensor.shape}; its chunk ends at {tuple(ends)}"
            )
        covered += math.prod(chunk.sizes)
    if twice := _overlapping(tensor.chunks):
        first, second = twice
        raise ValueError(
            f"{folder / second.file}: must hold no part of {name} that {first.file} does, got "
            f"chunks at {first.offsets} and {second.offsets}"
        )
    if covered != math.prod(tensor.shape):
        raise ValueError(
            f"{folder / METADATA}: must place all of {name}, "
            f"{math.prod(tensor.shape) - covered} of its values are in no chunk"
        )


def _overlapping(chunks: Sequence[DcpChunk]) -> tuple[DcpChunk, DcpChunk] | None:
    """Return two chunks that share an element, if there are any."""
    if len(chunks) < 2:
        return None
    dimensions = range(len(chunks[0].offsets))
    # swept along the dimension that tells most chunks apart: sharded in one, the others are one
    along = max(dimensions, key=lambda d: len({x.offsets[d] for x in chunks}), default=None)
    if along is None:
        return chunks[0], chunks[1]
    open_ones: list[DcpChunk] = []
    for chunk in sorted(chunks, key=lambda x: x.offsets[along]):
        begin = chunk.offsets[along]
        open_ones = [x for x in open_ones if x.offsets[along] + x.sizes[along] > begin]
        for other in open_ones:
            if _meet(chunk, other):
                return other, chunk
        open_ones.append(chunk)
    return None


def _meet(a: DcpChunk, b: DcpChunk) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(x < other + length and other < x + size for x, size, other, length in pairs)


def hf_shards(folder: Path) -> list[Path]:
    """Return the files that DCP's Hugging Face writer has left, one or more of each rank's."""
    return sorted(folder.glob(_HF_SHARDS))


def read_hf_shards(paths: Sequence[Path]) -> DcpMetadata:
    """Return what such files say: the tensors' chunks, and for each where it begins.

    How many files there are, and the tensors' shapes, they do not say: that the last is missing
    can't be known. ValueError, naming the file, for one that is damaged, does not say where its
    chunks begin, or follows one that is missing.
    """
    ranks = sorted({path.name.split("-")[1] for path in paths})
    if [int(rank) for rank in ranks if rank.isdecimal()] != list(range(1, len(ranks) + 1)):
        raise ValueError(f"{paths[0].parent}: must hold the files of all ranks, has {ranks}")
    chunks: dict[str, list[DcpChunk]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        for name, tensor, offsets in _hf_parts(path):
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise ValueError(f"{path}: must hold {name} in {dtypes[name]}, got {tensor.dtype}")
            chunk = DcpChunk(offsets, tuple(tensor.shape), path.name, -1, tensor.nbytes)
            chunks.setdefault(name, []).append(chunk)
    tensors = {}
    for name, found in chunks.items():
        ends = [[o + s for o, s in zip(x.offsets, x.sizes, strict=True)] for x in found]
        # the files do not say the shape: it is what the chunks reach to
        shape = tuple(max(reached) for reached in zip(*ends, strict=True))
        kept = tuple(chunk for chunk in found if math.prod(chunk.sizes))
        tensors[name] = DcpTensor(shape, dtypes[name], "strided", kept)
    return DcpMetadata(tensors, (), {})


def _hf_parts(path: Path) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Yield the names, outlines and offsets of the chunks in a file."""
    try:
        with safetensors.safe_open(check_plain(path), "pt") as file:
            said = json.loads((file.metadata() or {})[_HF_OFFSETS])
            names = file.keys()
            for name in names:
                tensor = file.get_tensor(name).to("meta")
                offsets = tuple(said[name]["saved_offsets"])
                if len(offsets) != tensor.dim() or not all(
                    type(x) is int and 0 <= x < 2**62 for x in offsets
                ):
                    raise ValueError(f"the offsets of {name} are {str(offsets)[:80]}")
                yield name, tensor, offsets
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: must be a whole safetensors file: {error}") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: must say in {_HF_OFFSETS} where its chunks begin: {error!r}"
        ) from error
