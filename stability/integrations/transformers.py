"""Records the training of a Hugging Face `Trainer`, and of what is built on it, as an arm."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stability.study.record_call import IdleRecorder, record

__all__ = ["Recorder"]


class Recorder(TrainerCallback):
    """Records a training: `Trainer(..., callbacks=[Recorder(study="mine", arm="baseline")])`.

    Its arguments are those of `stability.record`, or the variables of their names; `seed` is the
    Trainer's own where none is given. Of several ranks each has the callback, and the first one
    writes. ValueError, as the training starts, for what `stability.record` refuses.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._recorder = IdleRecorder()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Take the start weights, and watch from here on."""
        if self._recorder.unended:  # the script tries once more, as with a smaller batch
            self._recorder.__exit__(RuntimeError, RuntimeError(self._recorder.unended), None)
        arguments = {"seed": args.seed, **self._arguments}
        self._recorder = record(kwargs["model"], kwargs["optimizer"], watch=True, **arguments)
        # no event tells of an error, which the script may catch
        self._recorder.unended = "the Trainer's training did not come to its end"

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """End the training after as many updates as were asked for."""
        if self._recorder.is_complete:
            control.should_training_stop = True

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write the record."""
        self._recorder.end()
