"""Lets the delayed scales of a training change once an update, and keeps them in its checkpoints.

What ranks have seen of an operand is put together, so that each has the scales of the whole batch.
Leaves out what a scale is (`attention_kernels.delayed_scaling`) and which modules have some
(`model.module_precision`).
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from attention_kernels.delayed_scaling import DelayedScales, SeenAmax
from stability.callbacks.each_update import UpdateCallback
from stability.model.ranks import Ranks

__all__ = ["DelayedScaling"]


class DelayedScaling(UpdateCallback):
    """Open `scales` for the micro-batches of an update, and let them advance at its end.

    It stands before any callback that runs the model in between, whose values they do not see.
    """

    def __init__(self, scales: DelayedScales) -> None:
        self._scales = scales

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what an interrupted update has seen."""
        super().setup(trainer, pl_module, stage)
        self._scales.forget_update()

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Begin to see."""
        self._scales.is_open = True

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Let the scales follow from what all ranks have seen."""
        ranks = Ranks(rank=trainer.global_rank, count=trainer.world_size)
        self._scales.advance(lambda seen: _largest(ranks.gathered(seen)))

    def state_dict(self) -> dict[str, Any]:
        """Return the histories and scales."""
        return self._scales.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from them."""
        self._scales.load_state_dict(state_dict)


def _largest(seen: list[dict[str, SeenAmax]]) -> dict[str, SeenAmax]:
    """Return the largest amax of each operand."""
    found: dict[str, SeenAmax] = {}
    for of_rank in seen:
        for name, each in of_rank.items():
            if name not in found or each.amax > found[name].amax:
                found[name] = each
    return found
