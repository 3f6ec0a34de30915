"""Lays a model out over ranks: tensor parallel, sharded (FSDP2), replicated (DDP), and its state.

Tensor parallelism comes first, since FSDP2 shards what it has cut. It knows the layers of our own
models: heads and hidden units are shared out (`ColwiseParallel`, then `RowwiseParallel`), embedding
and output are on every rank. Norms of single heads, and under sequence parallelism those of
tokens, see a part of the values on each rank, so their gradients are added up.

A state stays where it is: `load_state` takes this rank's part of one that is whole, and
`whole_state` gathers what ranks share, for those who want it. Leaves out who calls this when
(`study.layout_strategy`) and what a layout is (`config.parallel`).

Sources: Shoeybi et al., arXiv 1909.08053 (tensor parallelism); Korthikanti et al., arXiv 2205.05198
(sequence parallelism); Zhao et al., arXiv 2304.11277 (FSDP).
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from stability.config.parallel import ParallelConfig
from stability.config.precision import parse_precision
from stability.config.schema import ArmConfig
from stability.metrics.pieces import part_of
from stability.model.decoder import blocks_of
from stability.model.decoder_parts import AttendingDecoder, HeadNorm
from stability.model.ranks import Ranks
from stability.records.snapshots import hash_state

__all__ = [
    "DIMENSIONS",
    "check_layout",
    "check_replicas",
    "hash_whole",
    "lay_out",
    "load_state",
    "reduce_gradients",
    "whole",
    "whole_state",
]

DIMENSIONS = ("data", "shard", "tensor")
"""Of a mesh of ranks, the slowest first: neighbours share a layer."""

_SEES_PART = "sees_part"
"""Marks a module that ranks which share a layer call with other values each."""

_REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}

_BY_OUTPUT = ("query", "key", "value", "mlp_up", "mlp_gate")
_BY_INPUT = ("attention_residual", "mlp_residual")
"""The linear layers of our blocks whose outputs, and whose inputs, ranks share."""


def check_layout(config: ArmConfig) -> None:
    """ValueError for a model that can't be laid out as `config.parallel` says."""
    parallel, model, tensor = config.parallel, config.model, config.parallel.tensor
    if tensor > 1 and not model.is_ours:
        raise ValueError(
            f"parallel.tensor must be 1 for a model of {model.builder}, got {tensor}: which of its "
            "layers can be shared out is known of our own models alone"
        )
    kv_heads = model.kv_heads or model.heads
    if tensor > 1 and (model.heads % tensor or kv_heads % tensor):
        raise ValueError(
            f"parallel.tensor must divide model.heads, {model.heads}, and kv_heads, {kv_heads}, "
            f"got {tensor}"
        )
    if parallel.sequence and model.context % tensor:
        raise ValueError(
            f"parallel.tensor must divide model.context, {model.context}, where sequence is true, "
            f"got {tensor}"
        )
    if tensor > 1 and parse_precision(config.precision).emulates:
        raise ValueError(
            f"parallel.tensor must be 1 where precision is emulated, got {tensor}: products that "
            "ranks share would not be rounded as they are on one"
        )
    if parallel.ranks > 1 and config.probe.overhead_share:
        raise ValueError(
            f"probe.overhead must be 0 over {parallel.ranks} ranks, got {config.probe.overhead!r}: "
            "each rank's clock would grant other layers"
        )
    if parallel.ranks > 1 and model.dropout:
        raise ValueError(
            f"model.dropout must be 0 over {parallel.ranks} ranks, got {model.dropout}: what a "
            "rank drops would depend on the layout"
        )


_GATHERING = logging.getLogger("torch.distributed.tensor._redistribute")


def lay_out(model: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh) -> Any:
    """Lay `model` out in place over `mesh`, and return what is to be called in its place.

    That is the model itself but for plain replicas, which are called through DDP. `mesh` has the
    `DIMENSIONS`. Every rank must hold the same weights already.
    """
    # it warns of sums in two orders where FSDP2 shards what ranks share: we gather, and add nothing
    _GATHERING.setLevel(logging.ERROR)
    if parallel.tensor > 1:
        assert isinstance(model, AttendingDecoder)
        _share_layers(model, mesh["tensor"], is_by_token=parallel.sequence)
    if parallel.shard > 1:
        _shard(model, parallel, mesh)
    elif parallel.data > 1 and parallel.tensor == 1:
        return _replicate(model, parallel, mesh)
    return model


def _share_layers(model: AttendingDecoder, mesh: DeviceMesh, *, is_by_token: bool) -> None:
    tokens = Shard(1) if is_by_token else Replicate()
    for block in blocks_of(model, model.config.depth).values():
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel(input_layouts=tokens)
            for name in _BY_OUTPUT
            if hasattr(block, name)
        }
        plan |= {name: RowwiseParallel(output_layouts=tokens) for name in _BY_INPUT}
        parallelize_module(block, mesh, plan)
        for name, module in block.named_children():
            if isinstance(module, HeadNorm) or (is_by_token and name.endswith("_norm")):
                vars(module)[_SEES_PART] = True
    if is_by_token:
        _share_tokens(model, mesh)


def _share_tokens(model: AttendingDecoder, mesh: DeviceMesh) -> None:
    """Cut the residual stream by tokens before the first layer, and join it after the last."""

    def cut(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(given[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(1)]).to_local(), *given[1:])

    def join(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        part = DTensor.from_local(given[0], mesh, [Shard(1)], run_check=False)
        return (part.redistribute(placements=[Replicate()]).to_local(), *given[1:])

    first = next(iter(blocks_of(model, model.config.depth).values()))
    first.register_forward_pre_hook(cut)
    norm: Any = model.final_norm
    norm.register_forward_pre_hook(join)


def _shard(model: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh) -> None:
    over = mesh["data", "shard"] if parallel.data > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=_REDUCED.get(parallel.reduce))
    layers: Any = getattr(model, "config", None)
    depth = getattr(layers, "depth", 0) or getattr(layers, "num_hidden_layers", 0)
    for block in blocks_of(model, depth).values():
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)


def _replicate(model: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh) -> nn.Module:
    group = mesh["data"].get_group()
    replica = DistributedDataParallel(model, process_group=group)
    dtype = _REDUCED.get(parallel.reduce)
    if dtype is not None:
        replica.register_comm_hook((group, dtype), _reduced_in)
    return replica


def _reduced_in(
    state: tuple[Any, torch.dtype],
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:
    """Add a bucket of gradients up in another format than their own."""
    group, dtype = state
    own = bucket.buffer()
    sent = own.to(dtype).div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(sent, group=group, async_op=True)

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return own.copy_(done.value()[0])

    return work.get_future().then(back)


def reduce_gradients(model: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh) -> None:
    """Add up over ranks what backward has not: to be called once an update, after the last one.

    Those are gradients of modules that see a part of the values, and those of replicas whose layers
    are shared out, which DDP can't hold; the latter are averaged.
    """
    if parallel.tensor == 1:
        return
    for module in model.modules():
        if _SEES_PART in vars(module):
            for local in _local_gradients(module):
                dist.all_reduce(local, group=mesh["tensor"].get_group())
    if parallel.data == 1 or parallel.shard > 1:
        return
    dtype = _REDUCED.get(parallel.reduce)
    for local in _local_gradients(model):
        sent = local.to(dtype or local.dtype, copy=True).div_(parallel.data)
        dist.all_reduce(sent, group=mesh["data"].get_group())
        local.copy_(sent)


@torch.no_grad()
def _local_gradients(module: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [x.to_local() if isinstance(x, DTensor) else x for x in gradients]


def whole(value: Any) -> Any:
    """Return a value as it is without ranks; every rank must ask for it, in the same order."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `model` as one rank would have it; every rank must ask for it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def hash_whole(model: nn.Module) -> str:
    """Return the `hash_state` of the model as one rank would have it; every rank must ask for it.

    What ranks share is gathered one tensor at a time.
    """
    return hash_state(_Gathered(model.state_dict()))


class _Gathered(Mapping[str, Tensor]):
    """A state of which each tensor is gathered when it is asked for, in the same order by all."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def check_replicas(model: nn.Module, ranks: Ranks, parallel: ParallelConfig, step: int) -> None:
    """ValueError unless ranks that hold the same weights hold the same bits after `step` updates.

    What is no DTensor is on every rank, the others' parts on one rank of each replica. Else a
    gradient that was not added up over ranks would go on unseen: the first rank's is on record.
    """
    state = model.state_dict()
    shared = {name: x.to_local() for name, x in state.items() if isinstance(x, DTensor)}
    kept = {name: x for name, x in state.items() if name not in shared}
    found = ranks.gathered((hash_state(kept), hash_state(shared)))
    for rank, (of_kept, of_shared) in enumerate(found):
        first = rank % (parallel.shard * parallel.tensor)
        if of_kept != found[0][0] or of_shared != found[first][1]:
            raise ValueError(
                f"rank {rank} must hold the weights of rank {first} after step {step}, holds "
                "others: a gradient was not added up over both, or an operation is not "
                "deterministic"
            )


@torch.no_grad()
def load_state(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy tensors, each whole or this rank's part of it, into those of `state`, likewise."""
    for name, value in state.items():
        found = given[name]
        if isinstance(found, DTensor):
            assert isinstance(value, DTensor)
            value.to_local().copy_(found.to_local())
        elif isinstance(value, DTensor):
            value.to_local().copy_(part_of(found, value))
        else:
            value.copy_(found)
