"""How a run is laid out over ranks: which parts of the batch and of the model each of them has.

A layout decides no sample, no initial weight and no nudge: the batch of a step is that of one rank,
shared out. It does decide the order in which numbers are added, and so the bits. Leaves out how a
model is laid out (`model.layouts`) and how ranks are started (`study.processes`).
"""

from dataclasses import dataclass
from typing import Literal

from stability.config.requirement import require

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """One rank by default; else `data` x `shard` x `tensor` ranks."""

    data: int = 1
    """Replicas of the model, each with its part of the batch: DDP, or HSDP where `shard` is > 1."""
    shard: int = 1
    """Ranks that share one replica's weights, each with its part of the batch: FSDP2."""
    tensor: int = 1
    """Ranks that share each layer's heads and hidden units, on the same part of the batch."""
    sequence: bool = False
    """Whether `tensor` ranks also share the tokens between the layers' products."""
    reduce: Literal["own", "fp32", "bf16"] = "own"
    """The format in which gradients are added up over ranks; `own` is that of the gradients."""
    accumulate: int = 1
    """Micro-batches that each rank cuts its part of the batch into."""
    fault: Literal["", "replica_gain_1pct", "replica_left_out"] = ""
    """A known error planted on the layout: the last replica's gradient counts 1 % too much, or not
    at all."""

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor", "accumulate"):
            require(
                getattr(self, name) >= 1, "parallel", f"{name} must be >= 1", getattr(self, name)
            )
        rule = "sequence must be false where tensor is 1 and no rank shares a layer"
        require(self.tensor > 1 or not self.sequence, "parallel", rule, self.sequence)
        for name, default in (("reduce", "own"), ("fault", "")):
            value = getattr(self, name)
            rule = f"{name} must be {default!r} where data and shard are 1: no gradient is reduced"
            require(self.replicas > 1 or value == default, "parallel", rule, value)

    @property
    def ranks(self) -> int:
        """How many processes train the run."""
        return self.data * self.shard * self.tensor

    @property
    def replicas(self) -> int:
        """How many parts of the batch are computed at once."""
        return self.data * self.shard

    @property
    def parts(self) -> int:
        """How many micro-batches the batch of an update is cut into, over all ranks."""
        return self.replicas * self.accumulate
