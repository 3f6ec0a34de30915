"""Bears witness to a training: dtypes at its first updates and its last, switches, known answers.

A stretch, which is what one process trains, is looked at in its first two updates, and a run in its
last one as well, also in one with which a divergence would end it: forward and backward of the
first micro-batch, and once, apart from them, the optimizer's update. Under torch.compile no
dispatch mode is installed, since torch would run the model eagerly for it; then dtypes are
unproven, and said to be.

What earlier stretches saw comes with the checkpoint. Leaves out how dtypes are found
(`probe.executed`), what contradicts a label (`records.witness`), and who tells of the training
(`trainer_door`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stability.probe.executed import Executed, naming_modules
from stability.probe.known_answers import known_answers
from stability.recorder.inside.looks import FIRST_LOOKS
from stability.records.module_sources import own_modules
from stability.records.numeric_switches import all_switches
from stability.records.witness import Label, Stretch, Witness, contradictions

__all__ = ["WitnessError", "Witnessing"]


class WitnessError(ValueError):
    """What a run executed is not what its label says."""


class Witnessing:
    """Looks at `model` while it trains up to `last_step`; WitnessError if that contradicts `label`.

    Its methods are called in the order in which they stand, `update_begins` to `update_ended` for
    each update. `may_end` says whether the next update may be the last one before `last_step`.
    `before` are the switches before user modules were imported; `git` is put on record as it is.
    `save` gets the witness at the `end`, and before an error is raised. `beside` says what another
    run witnessed that this one may not contradict. Without a label nothing else is compared.
    """

    def __init__(
        self,
        model: nn.Module,
        last_step: int,
        *,
        before: dict[str, Any],
        git: dict[str, str] | None = None,
        label: Label | None = None,
        unproven: str = "",
        save: Callable[[Witness], None] = lambda witness: None,
        may_end: Callable[[], bool] = lambda: False,
        beside: Callable[[Witness], str] = lambda witness: "",
    ) -> None:
        self._model = model
        self._last_step = last_step
        self._before = before
        self._git = git or {}
        self._modules: dict[str, str] = {}
        self._label = label
        self._unproven = unproven
        self._save = save
        self._may_end = may_end
        self._beside = beside
        self._earlier: list[Any] = []
        self._first = self._last = 0
        """The numbers of updates made when the stretch began, and until now."""
        self._steps: list[int] = []
        self._moments: dict[str, dict[str, Any]] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._executed = Executed()
        self._open = ExitStack()
        """The mode and the hooks of an update that is looked at."""
        self._update = _UpdatePhase(self._executed)

    @property
    def witness(self) -> Witness:
        """What has been witnessed so far; its last stretch ends at the last update made."""
        return Witness(stretches=[*self._earlier, self._stretch()])

    def _stretch(self) -> Any:
        """Return the values of this stretch, up to the last update made."""
        stretch = Stretch(
            first=self._first,
            last=self._last,
            unproven=self._unproven,
            steps=list(self._steps),
            executed=[row.values for row in self._executed.rows],
            switches=dict(self._moments),
            answers=dict(self._answers),
            modules=dict(self._modules),
            git=dict(self._git),
        )
        # not asdict, which copies all that lies in it, a millisecond each time
        return {each.name: getattr(stretch, each.name) for each in fields(stretch)}

    def process_begins(self, device: torch.device) -> None:
        """Compute the known answers, and note the switches, before the model is called at all."""
        self._answers = {"at_start": known_answers(device)}
        # after them: what torch settles at a first call is as it will stay
        self._moments = {"before_imports": self._before, "at_start": _switches()}

    def begin(self, step: int) -> None:
        """Begin a stretch after `step` updates, and hold it against those before."""
        self._first = self._last = step
        self._check()

    def update_begins(self, step: int, optimizers: list[Optimizer]) -> None:
        """Look at the update that follows `step` others if it is one of the first, or the last."""
        is_last = step == self._last_step - 1 or self._may_end()
        is_due = step - self._first < FIRST_LOOKS or is_last
        if not is_due or self._unproven:
            return
        self._steps.append(step)
        self._open.enter_context(naming_modules(self._model, self._executed))
        if not self._update.was_seen:
            self._update.watch(optimizers)
        self._open.enter_context(self._executed)

    def backward_ended(self) -> None:
        """End the look at the model; what follows is clipping, and the optimizer's."""
        self._open.close()

    def optimizer_begins(self) -> None:
        """Let the optimizer's own work begin."""
        self._update.begin()

    def update_ended(self, step: int) -> None:
        """Hold a look against the label; with this one, `step` updates are made.

        The last one is held against it at the `end`.
        """
        self._last = step
        self.close()
        if self._steps and step - 1 == self._steps[-1] and step != self._last_step:
            self._check()
        if step == self._first + FIRST_LOOKS:
            # for a stretch that a kill ends: by now all is imported that each step needs
            self._note_modules()

    def end(self, step: int, device: torch.device) -> None:
        """End the stretch: switches and known answers again, and the witness is saved.

        Also of a run that is gone on with at its last step, and trains nothing. WitnessError as the
        class.
        """
        if self._last != step:
            self._first = self._last = step
        self._note_modules()
        self._moments["at_end"] = _switches()
        self._answers["at_end"] = known_answers(device)
        self._check()
        self._save(self.witness)

    def close(self) -> None:
        """Leave no mode and no hook behind."""
        self._update.close()
        self._open.close()

    def _note_modules(self) -> None:
        """Note the sources of modules; that of one that was known stands as it was imported."""
        self._modules = own_modules() | self._modules

    def _check(self) -> None:
        witness = self.witness
        found = contradictions(witness, self._label) if self._label else []
        found += [said] if (said := self._beside(witness)) else []
        if found:
            self._save(witness)
            raise WitnessError("; ".join(found))

    def state_dict(self) -> dict[str, Any]:
        """Return the stretches so far; the last would end here if a resume goes on from here."""
        stretch = self._stretch()
        stretch["switches"]["at_end"] = _switches()
        return {"stretches": [*self._earlier, stretch]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was witnessed up to a checkpoint."""
        self._earlier = list(state_dict["stretches"])


class _UpdatePhase:
    """Keeps the mode on from the end of backward to the end of the optimizer's step.

    Lightning's optimizers call forward and backward inside their step, a loss scaler before it, and
    not at all where it skips one: the optimizer's own hooks tell where it ends.
    """

    def __init__(self, executed: Executed) -> None:
        self._executed = executed
        self._stack = ExitStack()
        self._hooks: list[Any] = []
        self._is_stepping = self._may_begin = False
        self.was_seen = False
        """Whether an update has been looked at, whole."""

    def watch(self, optimizers: list[Optimizer]) -> None:
        self._is_stepping = self._may_begin = False
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._enter_step))
            self._hooks.append(optimizer.register_step_post_hook(self._leave_step))

    def begin(self) -> None:
        """Note that gradients are done; the optimizer's own work begins with its step."""
        self._may_begin = bool(self._hooks)
        self._start()

    def _enter_step(self, *_: Any) -> None:
        self._is_stepping = True
        self._start()

    def _start(self) -> None:
        if self._is_stepping and self._may_begin:
            self._is_stepping = False
            self._executed.is_optimizer = True
            self._stack.enter_context(self._executed)

    def _leave_step(self, *_: Any) -> None:
        self.was_seen |= self._executed.is_optimizer
        self._is_stepping = False
        self._stack.close()
        self._executed.is_optimizer = False

    def close(self) -> None:
        self._leave_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _switches() -> dict[str, Any]:
    return {**all_switches(), "threads": torch.get_num_threads()}
