"""What is known of a training: its updates, each with loss and batch hash, and its state at steps.

A row is an update: every optimizer that steps has stepped once in it. It is closed where the next
one begins, with the next forward pass that trains or with the second step of one optimizer, so that
an optimizer which is stepped after another, as AdamW beside Muon, belongs to the same row. What was
given to the model and the loss that was back-propagated go to the row whose step came after them.
The state of a step is taken as its row is closed: what the script does between two updates, as
clipping weights, is in it. Losses and hashes stay on the device until rows are written.

Leaves out how calls are seen (`hooks`) and how a script tells of them itself
(`recorder.recording`).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .batch_hash import hash_batch, hash_in_order, hash_inputs
from .environment import hash_state
from .evaluations import Evaluations, keys_by_name
from .forked import end_with_fork
from .gradients import UNBACKED, has_gradients, key_of, trains_some, weights_of
from .held_out import HeldOutLoss
from .labels import Labels
from .later_weights import later_names
from .loss_targets import Aim, place_in_graph
from .models_in_graph import ModelsInGraph
from .names import named_state, one_search, root_of
from .planned import PlannedStop, is_due
from .rows import Given, Row, held_out_line, trained_on, update_line
from .saved_hooks import SavedHooks
from .spool import Spool
from .taken_start import TakenStart, copied, time_when_idle
from .update_clock import UpdateClock

__all__ = ["Training"]

_MOST_ROWS = 32
_LONGEST_S = 1.0
"""How many rows are kept before they are written, and for how long: each time waits for the GPU."""


class Training:
    """Collects one process's part of a training, and writes it to a spool.

    `due` says after which updates the state is kept, besides the first and last; `steps` ends the
    training after as many (0: never). `begin` is called once, before the first update, with the
    start state by name; what it returns is written with the first line. What `end` returns is
    written with the last one. `evaluations` are what the script evaluates itself, and `held_out` is
    called with `model`, else with the one that owns most weights, where a state is kept.
    """

    _is_to_look = False
    sees_backward = False  # set where it is told what is back-propagated
    clock: Optional[UpdateClock] = None
    """Of a trial, times its updates and says when it has gone on for long enough."""

    _evaluated: Optional[torch.nn.Module] = None  # what `held_out` was called with last

    def __init__(
        self,
        spool: Spool,
        *,
        due: Callable[[int], bool] = is_due,
        steps: int = 0,
        keeps_state: bool = True,
        begin: Callable[[Dict[str, Tensor]], Dict[str, Any]] = lambda state: {},
        end: Callable[[], Dict[str, Any]] = dict,
        evaluations: Optional[Evaluations] = None,
        held_out: Optional[HeldOutLoss] = None,
        model: Optional[torch.nn.Module] = None,
    ) -> None:
        self.look: Optional[Callable[[torch.nn.Module], Any]] = None
        """Makes the instrument that looks at the model which trains (`recorder.instrument`)."""
        self.instrument: Any = None
        self.looks_away = False
        """Whether what is called now is an instrument's."""
        self.optimizers: List[Optimizer] = []
        """Every one that was made; they keep the weights, so that the last state can be taken."""
        self.untold: Set[str] = set()
        """What a loss was given beside the model's results and nothing is known of, in words."""
        self.doubts: Set[str] = set()
        """What was not seen of the training and makes a pair unproven, in words."""
        self.scales_loss = False
        """Whether a loss scaler has been called."""
        self.left_out: Set[str] = set()
        """Inputs that were not hashed, in words."""
        self.backwards = 0
        self.steps = 0
        """Steps of optimizers, those inside another one's left out."""
        self.step = 0
        """Updates whose rows are closed."""
        # whether `end` was called, and in words the error that ended the script, if one did
        self.has_ended, self.error = False, ""
        self.when_update_ends: Callable[[int], None] = lambda made: None
        """Called with the number of updates made, once one's row is closed."""
        self._spool, self._due, self._steps, self._held_out = spool, due, steps, held_out
        self._keeps_state, self._begin, self._end, self._model = keeps_state, begin, end, model
        self._state: Dict[str, Tensor] = {}
        self._begun: Dict[str, Any] = {}
        self._owners: List[str] = []
        self._start: Optional[TakenStart] = None
        self.evaluations = evaluations or Evaluations(watches=False)
        self._held_out_inputs: Optional[List[Tensor]] = None
        """Hashes of what the model is given while `held_out` is called."""
        self._measured: List[Dict[str, Any]] = []
        self._given: List[Given] = []
        self.models, self.saved_hooks, self._labels = ModelsInGraph(), SavedHooks(), Labels()
        self._closure_calls = 0
        """How often the step that runs has called its closure."""
        self._losses: List[Tensor] = []
        self._row, self._is_backed = Row(), False
        self._later: Dict[int, str] = {}
        """Names of the weights that did not train, or were not there, at the start."""
        self._places: Dict[int, int] = {}
        """Of optimizers, in the order in which they stepped first."""
        self._expected: Optional[Set[int]] = None
        self._inside: List[int] = []
        """The optimizers whose step runs now, outermost first."""
        self._lines: List[Tuple[int, Row]] = []
        self._written_at = time.monotonic()
        self._last_state, self._has_begun, self._gathers = -1, False, True
        self._ended_in, self._ended_weights = "", ""

    @property
    def is_planned(self) -> bool:
        """Whether the training is to end after a number of updates."""
        return self._steps > 0

    @property
    def is_complete(self) -> bool:
        """Whether as many updates as were asked for are made, the last one's row open or not."""
        is_whole = bool(self._row.stepped) and (self._expected or set()) <= self._row.stepped
        return bool(self._steps) and self.step + is_whole >= self._steps

    @property
    def is_over(self) -> bool:
        """Whether the row of the last planned update is closed."""
        return self.is_planned and self.step >= self._steps

    @property
    def state(self) -> Dict[str, Tensor]:
        """Weights and buffers by name, as they are; empty before the start state is taken."""
        return self._state

    @property
    def step_now(self) -> int:
        """Updates that were made, the one whose row is open among them."""
        return self.step + bool(self._row.stepped)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Tell of an optimizer that was made."""
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)

    def begin_with(self, state: Dict[str, Tensor], owners: List[str]) -> None:
        """Take the start state, of these names, from modules of these classes."""
        self._state, self._owners = state, owners
        with one_search():
            self._begun = self._begin(state)
            owned = {id(x) for optimizer in self.optimizers for x in weights_of(optimizer)}
            self._begun["unowned"] = [
                name
                for name, x in state.items()
                if isinstance(x, torch.nn.Parameter) and owned and id(x) not in owned
            ]
            self._start = TakenStart(state, self._begun, self.optimizers, self._measure_anew)
        self._measure(0)
        self._is_to_look = self.look is not None

    def update_ends(self) -> None:
        """Tell of a whole update that was made, of whatever optimizers: its row is complete.

        It raises no `PlannedStop`: who tells of the updates ends the training where it is over.
        """
        self.steps += 1
        self._note_step(-1)
        self._close(stops=False)

    def forward_begins(self) -> None:
        """Tell of a forward pass that trains: closes the row that is complete."""
        if self._held_out_inputs is not None:
            return
        if self.is_over and not self.has_ended:
            raise PlannedStop
        self.evaluations.end()
        if not self._inside:  # else a closure's: it belongs to the step that runs
            expected = self._expected
            if expected is None:
                expected = {key_of(optimizer) for optimizer in self.optimizers}
            if self._row.stepped and expected <= self._row.stepped:
                self._close()
        self._take_start()
        # not where a step begins: torch runs its hooks then, and may not be given others
        if self._is_to_look and self.look is not None and (root := self._root()) is not None:
            self.instrument = self.look(root)
        self._is_to_look = False

    def forward_ends(self) -> None:
        """Tell that a forward pass that trains has ended."""
        if self._start is not None and self._held_out_inputs is None:
            self._start.pass_ends()

    def given(
        self, tensors: List[Tensor], *, is_training: bool, names: Sequence[str] = (), model: int = 0
    ) -> None:
        """Tell what a `model` was given, and how it is called; `is_training` is its mode."""
        if not tensors or self._is_again or self._held_out_inputs is not None:
            return
        names = names or [f"argument {index}" for index in range(len(tensors))]
        samples, sums, keys = hash_inputs(tensors, names)
        inputs: Dict[str, Tensor] = {}
        for name, value in zip(names, sums):  # noqa: B905 Python 3.9 has no strict
            inputs[name] = inputs[name] + value if name in inputs else value
        known = keys_by_name(names, keys)
        self._given.append(Given(samples, known, inputs, is_training, place_in_graph(), model))

    def aimed_at(self, aims: List[Aim], untold: Set[str]) -> None:
        """Tell of the labels that only the loss was given, and in words of what else it was."""
        self.untold |= untold | self._labels.add(aims, self._given, is_counted=not self._is_again)

    def beside(self, model: torch.nn.Module) -> None:
        """Tell of a model that does not train and that gradients go through."""
        if not trains_some(model, self.optimizers):  # a critic's weights may rest for a while
            self.doubts.update(self.models.add_beside(model, is_start=not self._has_begun))

    def trains(self, x: Tensor) -> bool:
        """Whether an optimizer has a tensor as a weight."""
        return any(x is each for optimizer in self.optimizers for each in weights_of(optimizer))

    def evaluates(self, module: torch.nn.Module) -> bool:
        """Whether a call of `module` without gradients is an evaluation of what trains."""
        if self._held_out_inputs is not None:
            return True
        if module.training or not self.evaluations.watches:
            return False
        return trains_some(module, self.optimizers)

    def evaluated(self, tensors: List[Tensor], names: Sequence[str]) -> None:
        """Tell what such a call is given, and how it is called."""
        if self._held_out_inputs is None:
            self.evaluations.model_called(self.step_now, tensors, names)
        elif tensors:
            self._held_out_inputs.append(hash_batch(tensors)[0])

    def told_held_out(self, loss: float, tensors: List[Tensor]) -> None:
        """Take a held-out loss of the weights as they are now, and what it was computed on."""
        value, samples, _ = hash_batch(tensors) if tensors else (None, 1, None)
        self.measured(held_out_line(self.step_now, loss, value, samples))

    def back_propagated(self, loss: Optional[Tensor], doubt: str = "") -> None:
        """Tell of the loss that gradients are computed of, not scaled; of None there is a doubt."""
        self.backwards, self._is_backed = self.backwards + 1, True
        self.doubts.update([doubt] if doubt else [])
        if loss is not None and not self._is_again:
            # a copy: the script may write into its loss, as by summing it over ranks
            self._losses.append(loss.detach().clone())

    def evaluation_begins(self) -> None:
        """Tell that the step which runs calls its closure; the first call is the update's own."""
        self._closure_calls += 1

    @property
    def _is_again(self) -> bool:
        """Whether an optimizer that steps, as LBFGS, evaluates the same batch once more."""
        return bool(self._inside) and self._closure_calls > 1

    def step_begins(self, optimizer: Optimizer) -> None:
        """Tell that an optimizer is about to step."""
        if id(optimizer) in self._inside:  # its last step ended in an error
            self._inside.clear()
        if not self._inside:
            self._spool.check_own()
            self.add_optimizer(optimizer)
            if key_of(optimizer) in self._row.stepped:
                self._close()
            self._take_start()
            self._check_start()
            self._closure_calls = 0
        self._inside.append(id(optimizer))

    def step_ends(self, optimizer: Optimizer) -> None:
        """Tell that an optimizer has stepped; one inside another's step, as SAM's, is no update."""
        if id(optimizer) not in self._inside:
            return
        del self._inside[self._inside.index(id(optimizer)) :]
        if not self._inside:
            self.steps += 1
            self._row.moves |= has_gradients(optimizer)
            self._note_step(key_of(optimizer))

    def skipped(self, optimizer: Optimizer) -> None:
        """Tell of a step that a loss scaler has left out: it is an update that moved nothing."""
        self.add_optimizer(optimizer)
        if key_of(optimizer) in self._row.stepped:
            self._close()
        self._take_start()
        self._check_start()
        self._note_step(key_of(optimizer))
        self._row.skipped += 1

    def group_ends(self) -> None:
        """Tell that the ranks are about to part: what is sharded can't be gathered afterwards."""
        if self._row.stepped:
            self._close()
        if self.step and self._last_state != self.step:
            self._save(self.step)

    def end(self, reason: str) -> None:
        """Close the last row, write the last state and what else is known."""
        if self.has_ended or not self._spool.is_own:
            return
        self.has_ended = True
        self._gathers = not self.error and reason != "error"  # a rank that fails does so alone
        self.evaluations.end()
        if self._row.stepped:
            self._close(stops=False)
        if not self.step:
            if self.backwards:
                self._spool.write({"kind": "none", "backwards": self.backwards})
            return
        if self._gathers and self._last_state != self.step:
            self._save(self.step)
        if self.instrument is not None:
            self.instrument.end()
        self._flush()
        if keys := self.evaluations.keys():
            self._spool.write({"kind": "keys", "file": self._spool.keep("evaluated", keys)})
        self._note_later()
        self._spool.write(
            {
                "kind": "end",
                "step": self.step,
                "reason": "error" if self.error else reason,
                "error": self.error,
                "time": time.time(),
                "state": self._ended_in,
                "weights": self._ended_weights,
                "backwards": self.backwards,
                "left_out": sorted(self.left_out),
                "untold": sorted(self.untold),
                "doubts": sorted(self.doubts),
                "optimizers": self._first_names(),
                "later": sorted(self._later.values()),
                **self._end(),
            }
        )

    def _first_names(self) -> List[str]:
        """Return the name of each optimizer's first weight, in the order of their places."""
        names = {id(x): name for name, x in self._state.items()}
        return [names.get(key, "") for key in self._places]

    def _note_step(self, optimizer: int) -> None:
        row = self._row
        row.stepped.add(optimizer)
        row.is_backed |= self._is_backed
        place = self._places.setdefault(optimizer, len(self._places))
        if self._losses:
            row.losses.setdefault(place, []).extend(self._losses)
        for one in trained_on(self._given, self.models.is_reached):
            row.hashes.append(one.samples.sum())
            row.order.append(hash_in_order(one.samples, len(row.order)))
            row.samples += len(one.samples)
            self.evaluations.trained_on(one.keys)
            for name, value in one.inputs.items():
                row.inputs.setdefault(name, []).append(value)
            for name, value in one.labels:
                row.labels.setdefault(name, []).append(value)
        self._labels.step(self._given, row)
        self._losses, self._given, self._is_backed = [], [], False
        self.models.step()

    def _check_start(self) -> None:
        """See before the first step whether the script has left the weights as they were taken."""
        if self._start is not None and not self._has_begun:
            with one_search(), self._spool.telling_refusals():
                self._start.step_begins(self.optimizers)

    def _take_start(self) -> None:
        if self._start is not None:
            if not (self._has_begun or self._row.stepped or self._inside):
                self._start.pass_begins(self.optimizers)
            return
        if weights := [x for optimizer in self.optimizers for x in weights_of(optimizer)]:
            self.begin_with(*named_state(weights))

    def _measure_anew(self) -> None:
        if self._held_out is not None:
            self._measured = [x for x in self._measured if x["kind"] != "held_out"]
            self._measure(0)

    def _close(self, *, stops: bool = True) -> None:
        self.step += 1
        self.when_update_ends(self.step)
        row, self._row = self._row, Row()
        self._expected = row.stepped
        if self.sees_backward and row.moves and not row.is_backed:
            self.doubts.add(UNBACKED)
        if not self._has_begun:
            self._write_begin()
        self._lines.append((self.step, row))
        if self.instrument is not None:
            self.instrument.step()
        if self.clock is not None and self.clock.ends_trial(self.step, self._begun.get("world", 1)):
            self._steps = self.step
        is_planned = self.step == self._steps
        if self._gathers and (self._due(self.step) or is_planned):
            self._save(self.step)
        is_late = time.monotonic() - self._written_at > _LONGEST_S
        if len(self._lines) >= _MOST_ROWS or is_late or is_planned:
            self._flush()
        if is_planned and stops:
            self.end("planned")
            raise PlannedStop

    def _write_begin(self) -> None:
        self._has_begun = True
        if self._spool.is_forked:
            end_with_fork(self.end)
        start = self._start.released() if self._start is not None else {}
        state = self._spool.save(0, start) if self._keeps_state else ""
        self._begun.update(forked=self._spool.is_forked, start_models=self.models.beside)
        self._spool.write(
            {"kind": "begin", **self._begun, "owners": self._owners, "names": sorted(self._state)}
        )
        self._spool.write({"kind": "state", "step": 0, "file": state})

    def _save(self, step: int) -> None:
        began = time_when_idle()
        self._last_state = step
        self._note_later()
        self._measure(step)
        # every rank takes it, since sharded weights are gathered by all; the first one writes
        state = copied(self._state)
        if self._begun.get("world", 1) > 1:  # of buffers each rank may have its own
            own = [x for x, each in self._state.items() if isinstance(each, torch.nn.Parameter)]
            self._ended_weights = hash_state({x: state[x] for x in own})
        if self._keeps_state:
            self._flush()
            line = {"kind": "state", "step": step, "file": self._spool.save(step, state)}
            self._spool.write({**line, "began": began, "time": time.time()})
        else:  # of what another rank holds alone, as buffers, there is no other trace
            self._ended_in = hash_state(state)

    def _note_later(self) -> None:
        stepped = [x for x in self.optimizers if {key_of(x), -1} & self._places.keys()]
        # by the first name: a module may be gone at the end
        self._later = {**later_names(stepped, self._state), **self._later}

    def _measure(self, step: int) -> None:
        """Compute the user's held-out loss after `step` updates, if there is one."""
        root = self._root() if self._held_out is not None else None
        # kept: the last update is known to be over when the function whose model it is has returned
        self._evaluated = model = self._evaluated if root is None else root
        if self._held_out is None or model is None:
            return
        self._held_out_inputs = []
        try:
            loss = self._held_out.of(model)
            value = sum(self._held_out_inputs) if self._held_out_inputs else None
        finally:
            self._held_out_inputs = None
        self._measured.append(held_out_line(step, loss, value, 1))

    def _root(self) -> Optional[torch.nn.Module]:
        if self._model is not None:
            return self._model
        return root_of(x for optimizer in self.optimizers for x in weights_of(optimizer))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, what is called is no training of the script's."""
        before, self.looks_away = self.looks_away, True
        try:
            yield
        finally:
            self.looks_away = before

    def measured(self, line: Dict[str, Any]) -> None:
        """Take what an instrument has measured; after the end, which may take long, write it."""
        self._measured.append(line)
        if self.has_ended:
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._written_at = time.monotonic()
        told, self._measured = self._measured, []
        written = [update_line(step, row) for step, row in lines]
        written += [*told, *self.evaluations.take_lines()]
        if written:
            self._spool.write(*written)
