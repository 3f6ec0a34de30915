"""Two ranks that write one state in every way: by torch's own DCP, and by ours."""

import errno
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stability.records import dcp_files
from stability.records.dcp_files import fill_state, write_dcp
from stability.records.weight_files import open_weights

WHOLE = ("fsdp", "app", "ours_fsdp", "ours_tensor", "ours_alone", "hf_shards")
"""Folders that hold `plain_state`, whoever wrote them."""


class Tiny(nn.Module):
    """Sizes that two ranks can't share alike, one that is smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 1)
        self.register_buffer("steps", torch.tensor([3, 1, 4]))

    def forward(self, x):
        return self.last(self.first(self.embed(x)))


def plain_model():
    torch.manual_seed(0)
    model = Tiny()
    model.first.double()
    return model


def plain_state():
    return {name: x.detach().clone() for name, x in plain_model().state_dict().items()}


def _sharded(mesh):
    """Return the state, each tensor in another layout over the ranks."""
    layouts = {"first.weight": [Shard(1)], "embed.weight": [Shard(0)], "first.bias": [Replicate()]}
    return {
        name: distribute_tensor(x, mesh, layouts[name]) if name in layouts else x
        for name, x in plain_state().items()
    }


def _whole(state):
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in state.items()
    }


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[x], b[x]) for x in a)


def rank(index, folder):
    root = Path(folder)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=index, world_size=2)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    model = plain_model()
    for part in (model.first, model):
        fully_shard(part, mesh=mesh)
    found = {}
    _by_torch(root, model)
    _by_us(root, model, mesh, found)
    _read(root, model, mesh, found)
    _refused(root, mesh, index, found)
    (root / f"found-{index}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _by_torch(root, model):
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.dim() == 2])
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    state = get_model_state_dict(model)
    content = {"model": state, "optimizer": optimizer_state, "step": 3}
    dcp.save(content, checkpoint_id=root / "fsdp")
    dcp.save({"app": content}, checkpoint_id=root / "app")
    for name, whole in (("hf_shards", False), ("hf_whole", True)):
        writer = HuggingFaceStorageWriter(
            str(root / name), save_distributed=True, enable_consolidation=whole
        )
        # torch 2.13 can't put integers together
        kept = {name: x for name, x in state.items() if x.is_floating_point() or not whole}
        dcp.save(kept, storage_writer=writer)


def _by_us(root, model, mesh, found):
    group = torch.distributed.new_group(backend="gloo")
    state = get_model_state_dict(model)
    writes = [write_dcp(root / "ours_fsdp", state, process_group=group)]
    # what training does before the file is written is not in it
    with torch.no_grad():
        for x in model.parameters():
            x.add_(1)
    writes.append(write_dcp(root / "ours_later", state, process_group=group))
    writes.append(write_dcp(root / "ours_tensor", _sharded(mesh), asynchronous=False))
    found["folders"] = [write.wait().name for write in writes]
    found["is_done"] = all(write.is_done for write in writes)


def _read(root, model, mesh, found):
    expected = plain_state()
    for source in WHOLE:
        sharded = {name: torch.zeros_like(x) for name, x in _sharded(mesh).items()}
        fill_state(sharded, open_weights(root / source))
        found[f"into tensor-parallel from {source}"] = _same(_whole(sharded), expected)
    state = get_model_state_dict(model)
    fill_state(state, open_weights(root / "ours_tensor"))
    found["into FSDP"] = _same(_whole(get_model_state_dict(model)), expected)


def _refused(root, mesh, index, found):
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        write_dcp(root / "partial", {"sum": part}, asynchronous=False)
    except ValueError as error:
        found["partial"] = str(error)
    try:
        write_dcp(root / "alone", {"x": torch.ones(2)})
    except ValueError as error:
        found["no group"] = str(error)

    real = dcp_files._Writer.write_data

    def write_data(*arguments):
        if index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    dcp_files._Writer.write_data = write_data
    try:
        write_dcp(root / "full", _sharded(mesh), asynchronous=False)
    except OSError as error:
        found["full"] = f"{type(error).__name__}: {error}"
    dcp_files._Writer.write_data = real
