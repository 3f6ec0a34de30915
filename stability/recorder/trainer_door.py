"""The Lightning trainer's door to the recorder: tells a run's writer of each update.

All that an update leaves on record is written before its checkpoint, so that a run which is killed
in between comes back without a gap; Lightning's own `self.log` would write after it. What the
checkpoint needs to go on with the record is in this callback's state.
"""

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from stability.callbacks.each_update import UpdateCallback
from stability.config.parallel import ParallelConfig
from stability.model.held_out import log_probabilities, mean_loss
from stability.model.layouts import check_replicas
from stability.model.ranks import ALONE, Ranks
from stability.recorder.following import FollowingWitness, FollowingWriter
from stability.recorder.inside.batch_hash import hash_in_order, hash_inputs
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter

__all__ = ["TrainerDoor"]


class TrainerDoor(UpdateCallback):
    """Tells `writer` of a training of `model` that begins, or goes on, after `start` updates.

    Weights, and the loss on the batches of tokens `held_out`, go on record after each number of
    updates in `steps`, predictions on the first `kept` of those batches too. Of several `ranks`
    each has a door, and the first one's `writer` writes; `parallel` says how they are laid out. To
    stand behind the callbacks that compute at an update's begin, so that the witness does not look
    at them, and behind those that log when they are asked for their state, so that the checkpoint
    counts it.
    """

    def __init__(
        self,
        writer: RunWriter | FollowingWriter,
        model: nn.Module,
        steps: Collection[int],
        witnessing: Witnessing | FollowingWitness,
        *,
        start: int = 0,
        held_out: Sequence[Tensor] = (),
        kept: int = 0,
        ranks: Ranks = ALONE,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self._ranks = ranks
        self._parallel = parallel or ParallelConfig()
        self.writer = writer
        self._model = model
        self._steps = frozenset(steps)
        self._witnessing = witnessing
        self._start = start
        self._held_out = held_out
        self._kept = kept
        self.loss = math.nan
        """That of the last update."""
        self._losses: list[Tensor] = []
        self._hashes: list[Tensor] = []
        """Of the micro-batches of an update, where they were computed."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the witness look at the process, before the model is called at all."""
        self._witnessing.process_begins(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the weights that training begins with.

        Of a run that goes on, or is forked, the log tells of them already; files may lack, where a
        kill hit between them and the checkpoint. One that has diverged is stopped at once.
        ValueError unless training goes on from the step of the checkpoint, as the log does:
        Lightning counts from 0 again where a checkpoint lacks the state of its loops.
        """
        step = trainer.global_step
        if step != self._start:
            raise ValueError(
                f"training must go on from step {self._start}, what was restored is at step {step}"
            )
        if step in self._steps:
            self._record_weights(trainer, step, is_logged=step > 0)
        self._stop_if_diverged(trainer)
        self._witnessing.begin(step)

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Begin a row."""
        self._losses, self._hashes = [], []
        self._witnessing.update_begins(step, trainer.optimizers)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the witness."""
        self._witnessing.backward_ended()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Tell the witness."""
        self._witnessing.optimizer_begins()

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add a micro-batch."""
        samples, _, _ = hash_inputs([batch])
        # parts of one size: its number, counted over ranks, says at which place of the update it is
        layout = self._parallel
        # an update may take several batches, each of which all ranks share
        whole, nth = divmod(len(self._hashes), layout.accumulate)
        part = self._ranks.rank // layout.tensor * layout.accumulate + nth
        first = (whole * layout.parts + part) * len(samples)
        self._losses.append(outputs["loss"].detach())
        self._hashes.append(hash_in_order(samples, 0, first))

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Record the update, and the weights if they are due."""
        made = trainer.global_step
        joined = (self._ranks, self._parallel.tensor)
        self.loss, hashed = _on_host(self._losses, self._hashes, *joined)
        self.writer.updated(made, self.loss, hashed)
        if made in self._steps:
            self._record_weights(trainer, made, is_logged=False)
        self._stop_if_diverged(trainer)
        self._witnessing.update_ended(made)

    def end(self, trainer: Trainer) -> None:
        """Let the witness end.

        To be called after the fit: where a run goes on at its last step, nothing is trained, and
        Lightning then calls none of the hooks about training.
        """
        self._witnessing.end(trainer.global_step, trainer.strategy.root_device)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave no mode and no hook behind."""
        self._witnessing.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs that goes on from here.

        Lightning asks before it writes the checkpoint, which so never outlives its log.
        """
        return {**self.writer.state_dict(), **self._witnessing.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, and drop what was logged after it."""
        self.writer.load_state_dict(state_dict)
        self._witnessing.load_state_dict(state_dict)

    def _stop_if_diverged(self, trainer: Trainer) -> None:
        if self.writer.diverged is not None:
            trainer.should_stop = True

    def _record_weights(self, trainer: Trainer, step: int, *, is_logged: bool) -> None:
        if self._ranks.count > 1:
            check_replicas(self._model, self._ranks, self._parallel, step)
        state = self._model.state_dict()
        if is_logged:
            self.writer.snapshot(step, state)
        else:
            self.writer.state(step, state)
        is_kept = self._ranks.told(self._kept > 0 and self.writer.lacks_predictions(step))
        evaluated = self._held_out[: self._kept * is_kept] if is_logged else self._held_out
        if not evaluated:
            return
        precision = trainer.precision_plugin.val_step_context
        predicted = [log_probabilities(self._model, batch, precision()) for batch in evaluated]
        if not is_logged:
            self.writer.held_out(step, mean_loss(predicted))
        if is_kept:
            self.writer.predictions(step, torch.cat(predicted[: self._kept]))


def _on_host(
    losses: Sequence[Tensor], hashes: Sequence[Tensor], ranks: Ranks = ALONE, sharers: int = 1
) -> tuple[float, str]:
    """Return an update's loss, and its hash as the recorder writes it, after one transfer for both.

    The sum of the micro-batches' losses is their mean: Lightning has divided each by their number.
    Of `sharers`, neighbours with the same samples, the first one counts.
    """
    loss, total = torch.stack(list(losses)).double().sum(), torch.stack(list(hashes)).sum()
    own = torch.stack([loss.view(torch.int64), total.to(loss.device)])
    found = ranks.stacked(own)[::sharers].tolist()
    each = [struct.unpack("<d", struct.pack("<q", bits))[0] for bits, _ in found]
    number = sum(hashed for _, hashed in found)
    return sum(each) / len(each), f"{number % 2**64:016x}"
