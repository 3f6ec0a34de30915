"""Ways to train a model, each of which watched and unwatched has to end in the same bits.

Every way is a function of a model, its family and what is to be called after each update; it trains
for `STEPS` updates. Ways with several processes start them, and are functions of the family alone.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from stability import shadow
from stability.intercept.session import Shadow
from stability.records.metric_names import deviation_name
from tests.stability.intercept.families.families import FAMILIES, Family, loss_of

__all__ = [
    "COMPILED",
    "IN_ONE_PROCESS",
    "ON_TWO_RANKS",
    "Way",
    "train_on_a_rank",
    "trained",
    "unmeasured",
]

STEPS, LOOK_EVERY = 3, 2

Way = Callable[[nn.Module, Family, Callable[[], object]], None]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def accumulated(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """Two micro-batches an update."""
    optimizer = _optimizer(model)
    for step in range(STEPS):
        for micro_batch in range(2):
            (loss_of(model, family.inputs(2 * step + micro_batch)) / 2).backward()
        _update(optimizer, after)


def scaled(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """BF16 by autocast, with a loss scaler."""
    optimizer, scaler = _optimizer(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, family.inputs(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after()


def evaluated(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """An evaluation before and after each update, on other data."""

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            loss_of(model, family.inputs(100 + step))
        model.train()

    optimizer = _optimizer(model)
    for step in range(STEPS):
        evaluate(step)
        loss_of(model, family.inputs(step)).backward()
        evaluate(step)
        _update(optimizer, after)


def averaged(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """A running average of the weights, in a copy that is made and called while a step is due."""
    optimizer = _optimizer(model)
    average = None
    for step in range(STEPS):
        loss_of(model, family.inputs(step)).backward()
        average = average or AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            loss_of(copy.deepcopy(average), family.inputs(50 + step))
        _update(optimizer, after)


def plain(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """Nothing but updates."""
    optimizer = _optimizer(model)
    for step in range(STEPS):
        loss_of(model, family.inputs(step)).backward()
        _update(optimizer, after)


def _checkpointed(use_reentrant: bool) -> Way:
    def train(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
        """Each layer's activations are computed again in the backward pass."""
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # pyright: ignore
        plain(model, family, after)

    return train


def in_two_threads(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
    """Another model is trained in a second thread, at the same time."""
    other = copy.deepcopy(model)
    thread = threading.Thread(target=plain, args=(other, family, lambda: None))
    thread.start()
    plain(model, family, after)
    thread.join()


def _update(optimizer: torch.optim.Optimizer, after: Callable[[], object]) -> None:
    optimizer.step()
    optimizer.zero_grad()
    after()


IN_ONE_PROCESS: dict[str, Way] = {
    "accumulation": accumulated,
    "loss scaler, BF16": scaled,
    "evaluation between": evaluated,
    "EMA by copies": averaged,
    "checkpointing": _checkpointed(use_reentrant=False),
    "checkpointing, reentrant": _checkpointed(use_reentrant=True),
    "two threads": in_two_threads,
}


def _compiled(compile_model: Callable[[nn.Module], nn.Module]) -> Way:
    def train(model: nn.Module, family: Family, after: Callable[[], object]) -> None:
        plain(compile_model(model), family, after)

    return train


def _by_blocks(model: nn.Module) -> nn.Module:
    """Compile each member of the model's longest list of layers."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=lambda each: sum(p.numel() for p in each.parameters())):
        layer.compile()
    return model


def _forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)
    return model


COMPILED: dict[str, Way] = {
    "torch.compile(model)": _compiled(torch.compile),
    "compiled blocks": _compiled(_by_blocks),
    "compiled forward": _compiled(_forward),
}


def trained(model: nn.Module, family: Family, way: Way, *, watch: bool) -> tuple[list[Tensor], Any]:
    """Return the weights that a way ends in, and the ended session where it is watched."""
    torch.manual_seed(3)
    opened: AbstractContextManager[Any] = nullcontext()
    if watch:
        opened = shadow(model, "flash:golden", every=LOOK_EVERY)
    with opened as probe:
        way(model, family, probe.step if watch else lambda: None)
    return [_local(x).detach().clone() for x in model.state_dict().values()], probe


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def _fsdp(model: nn.Module) -> nn.Module:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=lambda each: sum(p.numel() for p in each.parameters())):
        fully_shard(layer)
    fully_shard(model)
    return model


ON_TWO_RANKS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": _ddp, "FSDP2": _fsdp}


def train_on_a_rank(rank: int, folder: str, way: str, families: Mapping[str, str]) -> None:
    """Train families, by name with an implementation, on one of two ranks; save what came of it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{way}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FSDP2 warns of each model that returns a view
    ended = {}
    for name, implementation in families.items():
        family, ends = FAMILIES[name], []
        for watch in (False, True):
            model = ON_TWO_RANKS[way](family.build(implementation))
            ends.append(trained(model, _of_rank(family, rank), plain, watch=watch))
        (weights, _), (watched, probe) = ends
        same = all(torch.equal(x, y) for x, y in zip(weights, watched, strict=True))
        ended[name] = same, unmeasured(probe)
    torch.save(ended, Path(folder) / f"{way}-{rank}.pt")
    dist.destroy_process_group()


def unmeasured(probe: Shadow) -> list[str]:
    """Return the layers that were not measured forward and backward, whatever is said of them."""
    lacking = [
        layer
        for layer in probe.layers
        if not all(
            deviation_name(layer, what, "golden_baseline_rel_fro") in probe.metrics
            for what in ("out", "dq", "dk", "dv")
        )
    ]
    return lacking if probe.layers else ["every layer"]


def _of_rank(family: Family, rank: int) -> Family:
    """Return the family with other batches on each rank."""
    return replace(family, inputs=lambda step: family.inputs(500 * rank + step))
