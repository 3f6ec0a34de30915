"""Folders of DCP's with any chunks in any files, whole or spoilt, and DCP's own of one process."""

import io
import pickle
import warnings
from collections import defaultdict

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def saved(tensor):
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    return buffer.getvalue()


def write_chunks(folder, tensors, spoil=lambda metadata, files: None):
    """Write tensors, each with boxes `(offsets, sizes, file)`; `spoil` may change all of it first.

    The metadata that it gets is that of DCP, the files are bytes by name.
    """
    files = defaultdict(bytes)
    content, stored = {}, {}
    for name, (tensor, boxes) in tensors.items():
        chunks = []
        for offsets, sizes, file in boxes:
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            data = saved(tensor[box])
            place = MetadataIndex(name, torch.Size(offsets))
            stored[place] = _StorageInfo(file, len(files[file]), len(data))
            files[file] += data
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties(dtype=tensor.dtype)
        content[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata = Metadata(content, storage_data=stored)
    spoil(metadata, files)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def save(folder, state, *, is_flat=False):
    """Let DCP write a nested state in this process; as it is, if `is_flat`, as Megatron does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        planner = DefaultSavePlanner(flatten_state_dict=not is_flat)
        dcp.save(state, checkpoint_id=folder, planner=planner)
    return folder
