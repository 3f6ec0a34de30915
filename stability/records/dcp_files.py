"""Writes a state that several ranks hold as a folder of torch.distributed.checkpoint (DCP).

Each rank writes what it holds, in the dtype that it has, into a folder with a temporary name; once
all have, the first one writes the metadata and gives the folder its name. So a reader finds all of
it or nothing. With `asynchronous` the values are copied before `write_dcp` returns and training
goes on while they are written. The same state on the same ranks gives the same bytes: neither a
time nor a place is in them. Leaves out reading (`dcp_folders`), what is no tensor, and when a
snapshot is written.
"""

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from stability.records import file_operations
from stability.records.atomic_files import (
    DiskFullError,
    is_disk_full,
    make_folders,
    naming,
    remove_tree,
    temporary_name,
    write_whole,
)
from stability.records.plain_files import check_plain
from stability.records.weight_files import Weights

__all__ = ["DcpWrite", "copy_dcp", "fill_state", "write_dcp"]


class DcpWrite:
    """A folder that is being written."""

    def __init__(self, folder: Path, future: "Future[None]") -> None:
        self.folder = folder
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not; other ranks may be later."""
        return self._future.done()

    @property
    def is_whole(self) -> bool:
        """Whether this rank's part of it has ended well; of the first rank, all of it."""
        return self._future.done() and self._future.exception() is None

    def wait(self) -> Path:
        """Return the folder once it is on the disk under its name.

        OSError, which names the folder and the rank, if one of the ranks could not write its part;
        DiskFullError if its disk is full. Then the folder is what it was before.
        """
        self._future.result()
        return self.folder


def write_dcp(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    asynchronous: bool = True,
    process_group: "distributed.ProcessGroup | None" = None,
    places: Mapping[str, tuple[str, ...]] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> DcpWrite:
    """Write tensors by name, whole or not at all; a folder of that name is replaced.

    A process that is killed leaves the old folder, the new one or, for the moment between the two
    renames, none, and may leave folders beside it whose names begin with a dot.

    Called by all ranks of `process_group` (by default of all, if torch.distributed has begun), with
    what each holds: a DTensor is written in its parts, any other tensor once, by one of the ranks
    that have it. `folder` is the same path for all, on a disk that all see. Writes of a process
    take place in the order of the calls. `places` are the keys, by name, under which torch's own
    tools put a tensor into a nested state, and `files` what the first rank writes beside, by name;
    what other ranks give is left. ValueError for what is no tensor with values, for sums
    that are not yet reduced, and, with `asynchronous` on several ranks, without a group of its own:
    training's collectives would meet those of the writing.
    """
    count = distributed.get_world_size(process_group) if distributed.is_initialized() else 1
    if asynchronous and count > 1 and process_group is None:
        raise ValueError(
            "write_dcp: process_group must be a group of its own where several ranks write "
            'beside training, got None; make one: torch.distributed.new_group(backend="gloo")'
        )
    shards = {name: _shard_of(name, x, is_copy=asynchronous) for name, x in state.items()}
    held = {name: shard for name, shard in shards.items() if shard is not None}
    plan = _Planner(places or {}), _Writer(folder, files or {})
    write = partial(_write, held, *plan, process_group, is_alone=count == 1)
    if asynchronous:
        return DcpWrite(folder, _thread().submit(write))
    # those that were begun before, so that all ranks keep one order
    _thread().submit(lambda: None).result()
    write()
    done: Future[None] = Future()
    done.set_result(None)
    return DcpWrite(folder, done)


def copy_dcp(source: Path, target: Path, *, files: Mapping[str, bytes]) -> None:
    """Copy a folder, with `files` in the place of those of their names, whole or not at all.

    OSError, which names the target, if the system refuses.
    """
    temporary = temporary_name(target)
    try:
        make_folders(target.parent)
        file_operations.make_folder(temporary)
        for path in sorted(source.iterdir()):
            if path.name not in files:
                write_whole(temporary / path.name, partial(copyfile, check_plain(path)))
        _write_files(temporary, files)
        _name(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove_tree(temporary)
        raise _named(target, "", error) from error


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_whole(folder / name, partial(_write_bytes, content=content))


def _write_bytes(temporary: Path, content: bytes) -> None:
    temporary.write_bytes(content)


def _name(temporary: Path, folder: Path) -> None:
    """Give a folder that is whole its name; one that has it is replaced."""
    with naming(folder):
        file_operations.sync(temporary)
        old = temporary_name(folder)
        is_there = folder.is_dir()
        if is_there:
            file_operations.rename(folder, old)
        try:
            file_operations.rename(temporary, folder)
        except BaseException:
            if is_there:
                file_operations.rename(old, folder)
            raise
        file_operations.sync(folder.parent)
        if is_there:
            remove_tree(old)


def fill_state(state: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy weights into tensors of the same names, in place; of a DTensor this rank's part alone.

    Any layout reads what any other has written; dtypes are those of `state`. ValueError for a name
    that `weights` lacks, and for another shape.
    """
    with torch.no_grad():
        for name, tensor in state.items():
            if name not in weights:
                raise ValueError(f"{weights.label}: must hold {name}, does not")
            if weights.shapes[name] != tuple(tensor.shape):
                raise ValueError(
                    f"{weights.label}: {name} must be of the shape {tuple(tensor.shape)}, is "
                    f"{weights.shapes[name]}"
                )
            part = _part_of("fill_state", name, tensor)
            if part is not None:
                local, offsets = part
                local.copy_(weights.part(name, offsets, local.shape))


@dataclass(frozen=True, slots=True)
class _Shard:
    """What this rank holds of a tensor: where it begins, and the shape of the whole."""

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _part_of(who: str, name: str, tensor: Any) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return this rank's part of a tensor and where it begins; None if it has none."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{who}: {name} must be a tensor, got {type(tensor).__name__}")
    local, offsets = tensor.detach(), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                f"{who}: {name} must be sharded or replicated, got {tensor.placements}; "
                "redistribute it"
            )
        if tensor.device_mesh.get_coordinate() is None:
            return None
        (chunk,) = tensor.__create_chunk_list__()
        local, offsets = tensor.to_local().detach(), tuple(chunk.offsets)
    if local.layout is not torch.strided or local.device.type == "meta" or local.is_quantized:
        raise ValueError(f"{who}: {name} must have values, is {local.layout} on {local.device}")
    # of a tensor that is smaller than the number of ranks some have no values, and write none
    return (local, offsets) if local.numel() or not tensor.numel() else None


def _shard_of(name: str, tensor: Any, *, is_copy: bool) -> _Shard | None:
    part = _part_of("write_dcp", name, tensor)
    if part is None:
        return None
    values = part[0].to("cpu", copy=is_copy).contiguous()
    return _Shard(values, part[1], tuple(tensor.shape))


@cache
def _thread() -> ThreadPoolExecutor:
    # one: the collectives of two writes at once could meet in another order on each rank
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="write_dcp")


def _write(
    shards: dict[str, _Shard],
    planner: "_Planner",
    writer: "_Writer",
    group: "distributed.ProcessGroup | None",
    *,
    is_alone: bool,
) -> None:
    folder = writer.folder
    try:
        if is_alone:
            _save_alone(shards, writer, planner)
        else:
            save(shards, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        writer.give_up()
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise _named(folder, f", rank {rank}", cause) from cause
    except Exception as error:
        writer.give_up()
        raise _named(folder, "", error) from error


def _named(folder: Path, where: str, cause: BaseException) -> OSError:
    if is_disk_full(cause):
        return DiskFullError(f"{folder}{where}: the disk is full")
    return OSError(f"{folder}{where}: could not be written: {cause}")


def _save_alone(state: dict[str, _Shard], writer: "_Writer", planner: "_Planner") -> None:
    # `save` would warn that torch.distributed has not begun
    planner.set_up_planner(state, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.wait()])


class _Planner(DefaultSavePlanner):
    """Plans the writing of `_Shard`s by name; of those that several ranks hold one is written."""

    def __init__(self, places: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._places = places

    def create_local_plan(self) -> SavePlan:
        """Return what this rank has to write."""
        self.plan = SavePlan([_item(name, shard) for name, shard in self.state_dict.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes, and the metadata."""
        plans, metadata = super().create_global_plan(all_plans)
        # torch's own tools look it up
        names = {name: self._places.get(name, (name,)) for name in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=names)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values to write."""
        return self.state_dict[index.fqn].values


def _item(name: str, shard: _Shard) -> WriteItem:
    offsets = torch.Size(shard.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=shard.values.shape),
            properties=TensorProperties.create_from_tensor(shard.values),
            size=torch.Size(shard.shape),
        ),
    )


class _Writer(FileSystemWriter):
    """Writes into a temporary folder, which the first rank makes, names at the end, or clears."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        self.folder = folder
        self._files = files
        # without a random part: all ranks know it
        super().__init__(folder.with_name(f".{folder.name}.tmp"), sync_files=True)
        self._is_first = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note who is the first rank."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator

    def storage_meta(self) -> None:
        """Return nothing: the path and a random name would stand in the metadata."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; the first rank makes the folder when it has all plans."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on the first rank, before any rank writes."""
        make_folders(self.folder.parent)
        remove_tree(Path(self.path))
        file_operations.make_folder(Path(self.path))
        _write_files(Path(self.path), self._files)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and name the folder, on the first rank, once all have written."""
        super().finish(metadata, results)
        _name(Path(self.path), self.folder)

    def give_up(self) -> None:
        """Delete the temporary folder, on the first rank."""
        if self._is_first:
            # what hinders the writing may hinder this as well, and is told already
            with contextlib.suppress(OSError):
                remove_tree(Path(self.path))
