"""Records the fit of any LightningModule, by any Lightning Trainer, as an arm of a study."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stability.study.record_call import IdleRecorder, record

__all__ = ["RecorderCallback"]


class RecorderCallback(Callback):
    """Records a fit: `Trainer(callbacks=[RecorderCallback(study="mine", arm="baseline")])`.

    Its arguments are those of `stability.record`, or the variables of their names. An update is one
    step of each optimizer. Of several ranks each has the callback, and the first one writes.
    ValueError, as the fit starts, for what `stability.record` refuses.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._recorder = IdleRecorder()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the start weights, and watch from here on."""
        self._recorder = record(pl_module, trainer.optimizers, watch=True, **self._arguments)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End the fit after as many updates as were asked for."""
        if self._recorder.is_complete:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record."""
        self._recorder.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write why the run does not count."""
        self._recorder.__exit__(type(exception), exception, exception.__traceback__)
