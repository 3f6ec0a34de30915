"""The weights in a folder of torch.distributed.checkpoint (DCP), whatever number of ranks wrote it.

Each tensor is put together from its chunks when it is asked for; torch.distributed is not needed.
Of a checkpoint that holds more the model's state dict is taken, as of a file of torch.save: what
torchtitan, Lightning, accelerate, transformers and Megatron's `torch_dist` write. What else is in
it, an optimizer's state, counters, random numbers, is counted and left unread: objects in it are
pickles. Leaves out the metadata (`dcp_metadata`), writing (`dcp_files`), and chunks that DCP has
compressed.
"""

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from stability.records.dcp_metadata import (
    METADATA,
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    check_chunks,
    hf_shards,
    read_dcp_metadata,
    read_hf_shards,
)
from stability.records.plain_files import check_plain, open_plain
from stability.records.tied_tensors import same_bits

__all__ = ["DcpFolder", "find_dcp"]

_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")
"""Where a nested state keeps the model: Lightning's, tutorials', most others', DeepSpeed's."""

_NO_WEIGHTS = re.compile(
    r"(optim\w*|chained_\d+|(lr_)?schedulers?|dataloader|train_state|rng_state|"
    r"rerun_state_machine_state|extra_state)[._/]",
    re.IGNORECASE,
)
"""How entries of a flat state begin that are none of the model's: torchtitan's, Megatron's."""


def find_dcp(folder: Path) -> Path | None:
    """Return the folder of DCP's that `folder` is, or the one in it that holds a model; else None.

    accelerate writes the model's and the optimizer's side by side. One that is being written, whose
    name begins with a dot, is none. ValueError if there are several.
    """
    if _is_dcp(folder):
        return folder
    inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    found = [path for path in inside if path.is_dir() and _is_dcp(path)]
    models = [path for path in found if not path.name.lower().startswith("optim")] or found
    if len(models) > 1:
        named = ", ".join(path.name for path in models[:5])
        raise ValueError(f"{folder}: must hold one checkpoint, got {named}; name one of them")
    return models[0] if models else None


def _is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file() or bool(hf_shards(folder))


class DcpFolder:
    """The tensors of a folder of DCP's by name, each read when it is asked for.

    With `everything` all tensors are there, by the whole names of the checkpoint; otherwise the
    model's. ValueError, naming the file, if it holds none, or is damaged (`check_chunks`).
    """

    def __init__(self, folder: Path, *, everything: bool = False) -> None:
        self._folder = folder
        shards = hf_shards(folder)
        is_dcp = (folder / METADATA).is_file()
        content = read_dcp_metadata(folder) if is_dcp else read_hf_shards(shards)
        names = {name: name for name in _all(content)} if everything else _model_names(content)
        self._tensors = {
            name: content.tensors[own]
            for name, own in names.items()
            if own in content.tensors and content.tensors[own].layout == "strided"
        }
        self._own = {name: names[name] for name in self._tensors}
        if not self._tensors:
            found = ", ".join(_all(content)) or "nothing"
            raise ValueError(
                f"{folder}: must hold the tensors of a model, got {found[:200]}; save "
                'model.state_dict(), as {"model": ...}'
            )
        check_chunks(folder, {self._own[name]: x for name, x in self._tensors.items()})
        self.outlines = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self._tensors.items()
        }
        """The tensors by name without their values."""
        self.others = {
            name: _described(content, own)
            for name, own in names.items()
            if name not in self._tensors
        }
        self._left_out = len(_all(content)) - len(names)

    @property
    def said_of_others(self) -> str:
        """What to say of the entries that are not the model's; empty if there are none."""
        return f", less {self._left_out} entries beside the model" if self._left_out else ""

    def tensor_of(self, name: str) -> object:
        """Return what is the same for two names of the same bits; weights of one number are not."""
        return same_bits(name, self.outlines, self.load)

    def load(self, name: str) -> Tensor:
        """Return a tensor; beside it no more than one of its chunks is in memory."""
        shape = self._tensors[name].shape
        return self.load_part(name, (0,) * len(shape), shape)

    def load_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor, which must lie in it; chunks that it does not meet stay unread.

        ValueError, naming the file, if a chunk is not what the metadata says.
        """
        tensor = self._tensors[name]
        if len(tensor.chunks) == 1 and tuple(sizes) == tensor.shape:
            return self._chunk(name, tensor, tensor.chunks[0])
        found = torch.empty(tuple(sizes), dtype=tensor.dtype)
        for chunk in tensor.chunks:
            begins = list(map(max, offsets, chunk.offsets))
            ends = [
                min(offset + size, own + length)
                for offset, size, own, length in zip(
                    offsets, sizes, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                values = self._chunk(name, tensor, chunk)
                found[_between(begins, ends, offsets)] = values[
                    _between(begins, ends, chunk.offsets)
                ]
        return found

    def _chunk(self, name: str, tensor: DcpTensor, chunk: DcpChunk) -> Tensor:
        path = self._folder / chunk.file
        with _naming(path, name):
            if chunk.start < 0:
                with safetensors.safe_open(check_plain(path), "pt") as file:
                    found = file.get_tensor(self._own[name])
            else:
                found = _read_saved(path, chunk)
        is_plain = isinstance(found, Tensor) and found.layout is torch.strided
        if not is_plain or (found.dtype, tuple(found.shape)) != (tensor.dtype, chunk.sizes):
            raise ValueError(
                f"{path}: must hold {tensor.dtype} of the shape {chunk.sizes} for {name}, got "
                f"{getattr(found, 'dtype', type(found).__name__)} {_shape(found)}"
            )
        if found.device.type != "cpu":
            raise ValueError(f"{path}: must hold the values of {name}, has an outline alone")
        return found.detach()


def _all(content: DcpMetadata) -> list[str]:
    return [*content.tensors, *content.objects]


def _described(content: DcpMetadata, own: str) -> str:
    if own in content.tensors:
        return f"{content.tensors[own].dtype}, {content.tensors[own].layout}".replace("torch.", "")
    return "an object, which is not unpickled"


def _model_names(content: DcpMetadata) -> dict[str, str]:
    """Return by a name in the model's state dict the name in the checkpoint.

    The state dict is what lies under one of `_MODEL_KEYS`, at the top or one level below, where
    wrappers of an application's state put it; else all that is flat, less what is no weight.
    """
    places = {name: content.places.get(name, (name,)) for name in _all(content)}
    for depth in (0, 1):
        for key in _MODEL_KEYS:
            below = {
                place: name
                for name, place in places.items()
                if len(place) > depth + 1
                and place[depth] == key
                and not _NO_WEIGHTS.match(f"{place[0]}.")
            }
            # several models, as a generator and a discriminator, are no one state dict
            is_one = len({place[:depth] for place in below}) == 1
            if is_one and any(name in content.tensors for name in below.values()):
                return {".".join(place[depth + 1 :]): name for place, name in below.items()}
    return {
        name: name
        for name, place in places.items()
        if len(place) == 1 and not _NO_WEIGHTS.match(f"{name}.")
    }


def _between(begins: Sequence[int], ends: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - own, end - own) for begin, end, own in zip(begins, ends, start, strict=True)
    )


def _shape(found: Any) -> str:
    return str(tuple(found.shape)) if isinstance(found, Tensor) else ""


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged pickles raise ten kinds, AssertionError among them
        reason = re.split(r"\.\s", str(error))[0][:200] or type(error).__name__
        raise ValueError(f"{path}: must hold a whole chunk of {name}: {reason}") from error


def _read_saved(path: Path, chunk: DcpChunk) -> Any:
    """Return what torch.save wrote into a part of a file: tensors and plain values alone."""
    with open_plain(path) as file:
        part = io.BufferedReader(_FilePart(file, chunk.start, chunk.length))
        # what else an archive may begin with, torch would read as its older format
        if part.read(4) != b"PK\x03\x04":
            raise ValueError("it is no archive of torch.save")
        # an archive's directory may claim what its bytes do not hold
        with zipfile.ZipFile(part) as archive:
            entries = archive.infolist()
        packed = [x.filename for x in entries if x.compress_type != zipfile.ZIP_STORED]
        claimed = sum(entry.file_size for entry in entries)
        if packed or claimed > chunk.length:
            raise ValueError(f"its {chunk.length} bytes claim to hold {claimed}")
        part.seek(0)
        return torch.load(part, map_location="cpu", weights_only=True)


class _FilePart(io.RawIOBase):
    """A part of an open file as a file of its own, to read."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._place = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start of the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, up to the end of the part; return how many bytes there were."""
        most = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[:most])
        self._place += count
        return count
