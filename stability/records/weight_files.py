"""Weights on disk as a mapping from names to tensors, each read when it is asked for.

Opens a run's snapshot, a safetensors file, a Hugging Face folder, a state dict of `torch.save`, a
Lightning checkpoint and a folder of torch.distributed.checkpoint (`dcp_folders`). Every name is
kept as it is written there. No file is unpickled: files of `torch.save` are mapped into memory with
`weights_only`, which admits tensors and plain values, so opening a file from elsewhere runs none of
its code. Leaves out files from before torch 1.6, which are no zip archives and can't be mapped, and
writing (`snapshots`, `dcp_files`).
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from stability.records.dcp_folders import DcpFolder, find_dcp
from stability.records.dcp_metadata import METADATA
from stability.records.paths import RunPaths, check_exists, is_run, list_runs, snapshot_steps
from stability.records.plain_files import check_plain, read_plain
from stability.records.run_files import read_run_file, recorded_steps
from stability.records.sealed_json import parse_json
from stability.records.tied_tensors import same_bits

__all__ = [
    "HF_OLD_FILE",
    "TORCH_SUFFIXES",
    "TorchFile",
    "Weights",
    "load_torch_file",
    "open_snapshot",
    "open_weights",
    "tied_names",
]

TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")
"""Where a checkpoint that holds more keeps its weights: Lightning's, PyTorch's tutorials',
nanoGPT's, DeepSpeed's."""
HF_FILE = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"
HF_OLD_FILE = "pytorch_model.bin"


class _Source(Protocol):
    """What can load tensors by name, and knows them beforehand without their values."""

    @property
    def outlines(self) -> Mapping[str, Tensor]: ...

    @property
    def others(self) -> Mapping[str, str]: ...

    def tensor_of(self, name: str) -> object: ...

    def load(self, name: str) -> Tensor: ...

    def load_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor: ...


class Weights(Mapping[str, Tensor]):
    """Tensors by name, on the CPU; each is read anew whenever it is asked for, none is kept.

    `label` says where they are from. `shapes` and `dtypes` are known without reading the tensors.
    `others` describes, by name, what stands among them and is no tensor with values.
    """

    def __init__(self, label: str, source: _Source, names: Iterable[str] | None = None) -> None:
        self.label = label
        self.others = dict(source.others)
        self._source = source
        # once: a source may make them anew
        outlines = source.outlines
        self._outlines = {name: outlines[name] for name in (outlines if names is None else names)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._outlines.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The tensors' dtypes by name."""
        return {name: tensor.dtype for name, tensor in self._outlines.items()}

    def tensor_of(self, name: str) -> object:
        """Return what is the same for two names of one tensor, as of tied embeddings.

        A file of `torch.save` knows which names share their values; of safetensors, which hold them
        once for each name, those are one that have the same bits and are not all one number.
        """
        return self._source.tensor_of(name)

    def part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor: where it begins and how long it is in each dimension.

        Of a file that is larger than memory, or that several ranks wrote, no more than that is
        read, or than the chunks that it meets. ValueError if the tensor does not hold it.
        """
        shape = self.shapes[name]
        fits = len(offsets) == len(sizes) == len(shape) and all(
            min(offset, size) >= 0 and offset + size <= most
            for offset, size, most in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{self.label}: the part of {name} must lie in its shape {shape}, got "
                f"{tuple(sizes)} from {tuple(offsets)} on"
            )
        return self._source.load_part(name, offsets, sizes)

    def only(self, names: Iterable[str]) -> "Weights":
        """Return the same weights with these names alone, in this order."""
        return Weights(self.label, self._source, names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._outlines:
            raise KeyError(name)
        return self._source.load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._outlines)

    def __len__(self) -> int:
        return len(self._outlines)


def open_weights(path: Path, step: int | None = None) -> Weights:
    """Return the weights at a path; of a run those after `step` updates, by default its last.

    A run's snapshot is checked against its manifest first. ValueError, naming the path, if nothing
    is there, if it is damaged or of another kind, if a run has no such snapshot, or if a step is
    given for what has none.
    """
    if is_run(path):
        return _open_snapshot(RunPaths(path), step)
    if step is not None:
        raise ValueError(f"{path}: must be a run to have a step, got step {step}; leave it out")
    if path.is_dir():
        return _open_folder(path)
    check_exists(path)
    if path.suffix == ".safetensors":
        return Weights(str(path), _SafetensorsFiles([path]))
    if path.suffix in TORCH_SUFFIXES:
        return Weights(str(path), TorchFile(path))
    raise ValueError(
        f"{path}: must be a run, a folder with {HF_FILE} or {METADATA}, or end in .safetensors, "
        f"{', '.join(TORCH_SUFFIXES)}"
    )


def tied_names(weights: Sequence[Weights], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return by name the first of `names` that is the same tensor in all of `weights`.

    `names` has for each name those by which the `weights` hold it, in their order. A name that
    stands for itself is left out.
    """
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, own in names.items():
        tensor = tuple(each.tensor_of(x) for each, x in zip(weights, own, strict=True))
        found[name] = first.setdefault(tensor, name)
    return {name: stands for name, stands in found.items() if stands != name}


# The pages of a mapping stay in memory once they are read, until the file is mapped anew.
_MAPPED_BYTES = 2**27


class TorchFile:
    """The tensors of a state dict by name, read one by one.

    A mapping under one of `STATE_KEYS` is taken for the state dict, otherwise the whole content.
    ValueError, naming the file, if it holds no state dict, holds other objects, or is missing or
    damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors, self.others = self._map()
        self._read = 0

    @property
    def outlines(self) -> dict[str, Tensor]:
        """The tensors by name without their values, on the device "meta"."""
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def tensor_of(self, name: str) -> object:
        """Return what is the same for two names that share one memory, seen alike."""
        x = self._tensors[name]
        return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype

    def load(self, name: str) -> Tensor:
        """Return a tensor."""
        if self._read > _MAPPED_BYTES:
            self._tensors, _ = self._map()
            self._read = 0
        self._read += self._tensors[name].nbytes
        return self._tensors[name]

    def load_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor; the rest of the mapping is not touched."""
        return self._tensors[name][_box(offsets, sizes)]

    def _map(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        content = load_torch_file(self._path)
        named = content if isinstance(content, Mapping) else {}
        inner = (named.get(key) for key in STATE_KEYS)
        state = next((each for each in inner if isinstance(each, Mapping)), content)
        entries = state if isinstance(state, Mapping) else {}
        tensors = {str(name): x.detach() for name, x in entries.items() if _has_values(x)}
        if not tensors:
            found = ", ".join(map(str, entries)) or type(state).__name__
            raise ValueError(
                f"{self._path}: must hold a state dict, names with tensors, got "
                f"{found[:200]}; save model.state_dict()"
            )
        others = {str(name): _describe(x) for name, x in entries.items() if not _has_values(x)}
        return tensors, others


def load_torch_file(path: Path) -> Any:
    """Return what `torch.save` wrote, mapped into memory: tensors and plain values.

    ValueError, one line that names the file, if it holds other objects, is missing or damaged.
    """
    try:
        check_plain(path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = found.group(1) if found else "what can't be read"
        raise ValueError(
            f"{path}: must hold tensors and plain values alone, got {what}; save only "
            "model.state_dict()"
        ) from error
    except Exception as error:  # damaged pickles raise ten kinds, AssertionError among them
        reason = re.split(r"\.\s", str(error))[0] or type(error).__name__
        raise ValueError(
            f"{path}: must be a whole file of torch.save, of torch 1.6 or newer: {reason}"
        ) from error


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(offsets, sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)


def _has_values(entry: Any) -> bool:
    return (
        isinstance(entry, Tensor)
        and entry.layout is torch.strided
        and entry.device.type == "cpu"
        and not entry.is_quantized
    )


def _describe(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    return f"{entry.dtype} on {entry.device}, {entry.layout}".replace("torch.", "")


class _SafetensorsFiles:
    """The tensors of safetensors files. Each read maps its file anew, so its memory is let go."""

    others: Mapping[str, str] = {}

    def __init__(self, paths: Iterable[Path]) -> None:
        self.outlines: dict[str, Tensor] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            try:
                with safetensors.safe_open(check_plain(path), "pt") as file:
                    names = file.keys()
                    outlines = {name: file.get_tensor(name).to("meta") for name in names}
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{path}: must be a whole safetensors file: {error}") from error
            self.outlines |= outlines
            self._paths |= dict.fromkeys(outlines, path)

    def tensor_of(self, name: str) -> object:
        """Return what is the same for two names of the same bits; weights of one number are not."""
        return same_bits(name, self.outlines, self.load)

    def load(self, name: str) -> Tensor:
        """Return a tensor."""
        with safetensors.safe_open(check_plain(self._paths[name]), "pt") as file:
            return file.get_tensor(name)

    def load_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor; only that is read."""
        with safetensors.safe_open(check_plain(self._paths[name]), "pt") as file:
            return file.get_slice(name)[_box(offsets, sizes)] if sizes else file.get_tensor(name)


class _Snapshot(_SafetensorsFiles):
    """A run's snapshot: its drifts are on record by these names, each by itself."""

    def tensor_of(self, name: str) -> object:
        """Return the name."""
        return name


class _ShardedSnapshot(DcpFolder):
    """The same of a snapshot that several ranks wrote."""

    def tensor_of(self, name: str) -> object:
        """Return the name."""
        return name


def _open_snapshot(run: RunPaths, step: int | None) -> Weights:
    steps = recorded_steps(run)
    if not steps:
        raise ValueError(f"{run.root}: must have snapshots, got none; let the run go on")
    if step is None:
        step = steps[-1]
    if step in steps and step not in snapshot_steps(run):
        raise ValueError(
            f"{run.root}: its snapshot of step {step} was dropped by the study's keep; `stability "
            f"compare {run.root} {run.root} --retrain` trains it anew, beside the study's forks"
        )
    if step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:3])
        raise ValueError(
            f"{run.root}: must have a snapshot of step {step}; nearest: {', '.join(map(str, near))}"
        )
    path = read_run_file(run, run.held_snapshot(step))
    return open_snapshot(path, f"{run.root}, step {step}")


def open_snapshot(path: Path, label: str = "") -> Weights:
    """Return the weights of a run's snapshot, a file or a folder; no checksum is looked at.

    ValueError, naming the file, if it is missing or damaged.
    """
    source = _ShardedSnapshot(path, everything=True) if path.is_dir() else _Snapshot([path])
    return Weights(label or str(path), source)


def _open_folder(folder: Path) -> Weights:
    if (folder / HF_FILE).is_file():
        return Weights(str(folder), _SafetensorsFiles([folder / HF_FILE]))
    if (folder / HF_OLD_FILE).is_file():
        return Weights(str(folder), TorchFile(folder / HF_OLD_FILE))
    index = folder / HF_INDEX
    if index.is_file():
        shards = _read_index(index)
        source = _SafetensorsFiles(dict.fromkeys(shards.values()))
        missing = [name for name in shards if name not in source.outlines]
        if missing:
            raise ValueError(
                f"{index}: must name what its files hold, got {missing[0]}, which is not in "
                f"{shards[missing[0]].name}"
            )
        return Weights(str(folder), source, shards)
    if sharded := find_dcp(folder):
        source = DcpFolder(sharded)
        return Weights(str(sharded) + source.said_of_others, source)
    runs = list_runs(folder)
    inside = [str(run.root) for run in runs] or sorted(path.name for path in folder.iterdir())
    raise ValueError(
        f"{folder}: must be a run, or hold {HF_FILE}, {HF_INDEX}, {HF_OLD_FILE} or {METADATA}; it "
        f"holds {', '.join(inside[:5]) or 'nothing'}"
    )


def _read_index(index: Path) -> dict[str, Path]:
    """Return by the name of a tensor the file beside the index that holds it."""
    try:
        shards = parse_json(read_plain(index))["weight_map"]
        found = {name: index.parent / Path(shard).name for name, shard in shards.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: must map names to files in weight_map: {error!r}") from error
    return found
