"""Lightning's strategy for a run over ranks: lays the model out, and joins what ranks share.

Lightning's own `ModelParallelStrategy` knows two dimensions, and refuses FP16 with a loss scaler
and FP64. Here every layout and precision goes one way. Of a checkpoint each rank writes what it
holds (`sharded_checkpoints`), or the first one all, where each holds all. Leaves out how a model is
laid out (`model.layouts`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stability.config.parallel import ParallelConfig
from stability.metrics.pieces import part_of
from stability.model.layouts import (
    DIMENSIONS,
    lay_out,
    load_state,
    reduce_gradients,
)
from stability.model.lightning_module import LanguageModel
from stability.model.ranks import Ranks, beside
from stability.study.checkpoints import CheckpointFiles
from stability.study.sharded_checkpoints import has_parts, read_parts

__all__ = ["LayoutStrategy"]


class _RankEnvironment(LightningEnvironment):
    """Tells Lightning of ranks that have been started already."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """Yes: Lightning starts none."""
        return True

    def world_size(self) -> int:
        """Return how many ranks there are."""
        return self._ranks.count

    def global_rank(self) -> int:
        """Return this one's number."""
        return self._ranks.rank

    def local_rank(self) -> int:
        """Return the number of the device, of which each rank sees its own alone."""
        return 0


_FAULTS = {"": 1.0, "replica_gain_1pct": 1.01, "replica_left_out": 0.0}
"""By how much each planted fault multiplies the loss of the last replica."""


class LayoutStrategy(ParallelStrategy):
    """Trains a `LanguageModel` over `ranks`, laid out as `parallel` says."""

    is_distributed = True

    def __init__(self, parallel: ParallelConfig, ranks: Ranks, device: torch.device) -> None:
        super().__init__(parallel_devices=[device], cluster_environment=_RankEnvironment(ranks))
        self._parallel = parallel
        self._ranks = ranks
        self._device = device
        self._is_last = True
        """Whether the micro-batch is the last of its update."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def _decoder(self) -> nn.Module:
        assert isinstance(self.lightning_module, LanguageModel)
        return self.lightning_module.model

    def model_to_device(self) -> None:
        """Move the whole model."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Lay the model out, before the optimizer is made of its parameters."""
        assert isinstance(model, LanguageModel)
        sides = tuple(getattr(self._parallel, name) for name in DIMENSIONS)
        self._mesh = init_device_mesh(self._device.type, sides, mesh_dim_names=DIMENSIONS)
        self._called = lay_out(model.model, self._parallel, self._mesh)
        model.call_through(self._called)
        return model

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **keywords: Any
    ) -> Tensor:
        """Compute gradients; those of the last replica by a planted fault, if there is one."""
        replica = self._ranks.rank // self._parallel.tensor
        is_last = replica == self._parallel.replicas - 1
        factor = _FAULTS[self._parallel.fault] if is_last else 1.0
        faulty = closure_loss * factor if factor != 1.0 else closure_loss
        return super().backward(faulty, optimizer, *args, **keywords)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add no gradients up over replicas inside: more micro-batches of the update follow."""
        self._is_last = False
        called = self._called
        try:
            if isinstance(called, DistributedDataParallel):
                with called.no_sync():
                    yield
            elif isinstance(called, FSDPModule):
                called.set_requires_gradient_sync(False)
                yield
                called.set_requires_gradient_sync(True)
            else:
                yield
        finally:
            self._is_last = True

    def post_backward(self, closure_loss: Tensor) -> None:
        """Add up what neither DDP nor FSDP2 has; list a checkpoint that is whole by now."""
        self._checkpoints.settle()
        if self._is_last:
            reduce_gradients(self._decoder, self._parallel, self._mesh)

    def setup_precision_plugin(self) -> None:
        """Set it up, with a loss scaler that looks at what all ranks hold."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            plugin.scaler = _SharedScaler(self._device.type)
        super().setup_precision_plugin()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the module's state."""
        assert self.lightning_module is not None
        load_state(self.lightning_module.state_dict(), checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of each optimizer's state."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            share_state(optimizer)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: a part is taken once it is known which."""
        return True

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write it: each rank its part, and the first one what is whole."""
        if has_parts(checkpoint):
            self._checkpoints.save_parts(checkpoint, Path(filepath), beside())
        elif self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint; of a folder this rank's parts alone of what ranks share now."""
        if Path(checkpoint_path).is_dir():
            return read_parts(Path(checkpoint_path), self._laid_out())
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _laid_out(self) -> Callable[[tuple[str, ...]], Tensor | None]:
        """Return what gives the tensor that is laid out as the one under some keys is to be."""
        assert self.lightning_module is not None
        weights = self.lightning_module.state_dict()
        parameters = [
            [x for group in optimizer.param_groups for x in group["params"]]
            for optimizer in self.optimizers
        ]

        def find(place: tuple[str, ...]) -> Tensor | None:
            match place:
                case ("state_dict", name):
                    return weights.get(name)
                case ("optimizer_states", nth, "state", number, _):
                    return parameters[int(nth)][int(number)]
            return None

        return find

    @property
    def _checkpoints(self) -> CheckpointFiles:
        assert isinstance(self.checkpoint_io, CheckpointFiles)
        return self.checkpoint_io

    def on_train_end(self) -> None:
        """Wait for the last checkpoint."""
        self._checkpoints.settle(wait=True)

    def teardown(self) -> None:
        """End without Lightning's move of all to the CPU, where NCCL could gather no weight."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._checkpoints.settle()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def barrier(self, name: str | None = None) -> None:
        """Wait for the others."""
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank 0 has."""
        return self._ranks.told(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum over ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        return total / self._ranks.count if is_mean else total

    def setup(self, trainer: Trainer) -> None:
        """Set up what a strategy does, and this rank's part of a state that is taken over."""
        super().setup(trainer)
        for optimizer in self.optimizers:
            share_state(optimizer)


class _SharedScaler(torch.amp.GradScaler):
    """A loss scaler of ranks that hold parts of gradients: all skip an update, or none does."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        parts = [x.to_local() if isinstance(x, DTensor) else x for x in held if x is not None]
        check_and_unscale: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
        with torch.no_grad():
            # GradScaler gives it all gradients at once, which must then be DTensors or none of them
            for part in parts:
                check_and_unscale([part], found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


def share_state(optimizer: Optimizer) -> None:
    """Cut an optimizer's whole state as its parameters are."""
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if isinstance(parameter, DTensor) and is_whole and value.shape == parameter.shape:
                values[key] = DTensor.from_local(
                    part_of(value, parameter).contiguous(),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
