"""`stability.record`: a training that tells of itself, in a few lines of its own loop.

The process that trains writes the record too, once all its ranks have ended. Leaves out how a run
is held against its plan and its baseline (`foreign`).
"""

import argparse
import atexit
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from stability.config.commands import call_training
from stability.recorder.inside.environment import changed_since, own_files, own_modules
from stability.recorder.inside.evaluations import Evaluations
from stability.recorder.inside.hooks import install
from stability.recorder.inside.launched import note_start, started
from stability.recorder.inside.looks import Looks
from stability.recorder.inside.names import named_masters, state_of
from stability.recorder.inside.recorded import code_told, due_at, looks_at, start_of
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import PlannedStop, Training
from stability.recorder.inside.witness import InsideWitness
from stability.recorder.launch import Asked
from stability.records.numeric_switches import all_switches
from stability.study.call_variables import Told, told_by_variables, variable_of
from stability.study.process_end import ProcessEnd

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    # heavy at run time: nothing of it is loaded where nothing is recorded
    from stability.study.foreign import OpenRun
    from stability.study.foreign_plan import ForeignRun

__all__ = ["IdleRecorder", "Recorder", "record"]

_PATIENCE_S = 300.0
"""How long the first rank waits for the others to end: one may still evaluate or save."""


class IdleRecorder(AbstractContextManager["IdleRecorder"]):
    """Records nothing, and costs nothing: outside of a study, or where a launcher records."""

    failure = ""
    """Why the run does not count, in one sentence."""
    is_complete = False
    """Whether as many updates as were asked for are made."""
    unended = ""
    """What it means, in words, that the process ends before `end`; empty: that this is the end."""

    def batch(self, *tensors: "Tensor") -> None:
        """Tell what the model is given for the next update; once for each micro-batch."""

    def step(self, loss: "Tensor | float | None" = None) -> None:
        """Tell that the weights were updated, and of the loss that was back-propagated."""

    def held_out(self, loss: "Tensor | float", *tensors: "Tensor") -> None:
        """Tell of the loss on held-out data after the last update, and of the data."""

    def end(self) -> None:
        """Write the record; the end of a `with` block and of the process do so too."""

    def __exit__(self, *error: Any) -> None:
        self.end()


class Recorder(IdleRecorder):
    """Records the training of one model in this process, which may be one rank of several."""

    def __init__(self, training: Training, record: "OpenRun | None", stack: ExitStack) -> None:
        self._training, self._stack, self._record = training, stack, record
        self._is_open = True
        self._process = ProcessEnd()
        atexit.register(self._end_with_process)

    @property
    def is_complete(self) -> bool:
        """Whether as many updates as were asked for are made."""
        return self._training.is_complete

    def batch(self, *tensors: "Tensor") -> None:
        """Tell what the model is given for the next update; once for each micro-batch.

        `PlannedStop`, a SystemExit that the `with` block takes in, once as many updates as were
        asked for are made.
        """
        self._stop_if_over()
        self._training.given(list(tensors), is_training=True)

    def step(self, loss: "Tensor | float | None" = None) -> None:
        """Tell that the weights were updated, and of the loss that was back-propagated.

        To be called after the optimizer's step, once for each update. The last one that was asked
        for returns, so that what is evaluated after it can be told; one more is a `PlannedStop`.
        """
        if not self._is_open:
            raise RuntimeError("stability.record: step was called after the record's end")
        self._stop_if_over()
        self._process.went_on()
        if loss is not None:
            import torch  # heavy

            self._training.back_propagated(torch.as_tensor(loss))
        self._training.update_ends()

    def held_out(self, loss: "Tensor | float", *tensors: "Tensor") -> None:
        """Tell of the loss on held-out data after the last update, and of the data.

        Of several ranks each tells its own, weighed by the rows of `tensors`. What is evaluated is
        the same in all arms, and without `tensors` nobody can check that it is.
        """
        if not self._is_open:
            raise RuntimeError("stability.record: held_out was called after the record's end")
        self._training.told_held_out(float(loss), list(tensors))

    def _stop_if_over(self) -> None:
        if self._training.is_over:
            raise PlannedStop

    def end(self) -> None:
        """Write the record; the end of a `with` block and of the process do so too."""
        if not self._is_open:
            return
        from stability.study.foreign import RunFailedError, measure_study  # heavy

        with self._closing("exit"):
            if self._record is None:
                return
            try:
                _wait_for_ranks(self._record.spool)
                manifest = self._record.write()
            except RunFailedError as error:
                self._tell_failure(str(error))
                return
            run = self._record.run
            notes = [*manifest.resolved["notes"], *measure_study(run)]
            said = [
                f"stability: {run.arm}, seed {run.seed}: {manifest.state} after {manifest.step} "
                f"updates; ladder: stability show {run.folder}",
                *(f"  {note}" for note in notes),
            ]
            sys.stdout.write("\n".join(said) + "\n")

    def _end_with_process(self) -> None:
        error = self._process.error
        if error is None and self.unended and not self.is_complete:
            error = RuntimeError(self.unended)
        self.__exit__(type(error) if error else None, error, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        # a script that has done its work may leave by sys.exit(), also from inside of the block
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if kind is None or is_exit:
            self.end()
            return kind is PlannedStop
        if self._is_open:
            self._training.error = f"{kind.__name__}: {error}"[:200] if kind else ""
            with self._closing("error"):
                if kind is KeyboardInterrupt and self._record is not None:
                    from stability.recorder.writer import stopped  # heavy

                    stopped(self._record.files, "interrupted")
                elif self._record is not None:
                    self._tell_failure(str(self._record.failed(f"{kind.__name__}: {error}")))
        return False

    def _closing(self, reason: str) -> ExitStack:
        """End the training's rows; return what gives back the folder and whatever else is held."""
        atexit.unregister(self._end_with_process)
        self._process.restore()
        self._is_open = False
        self._training.end(reason)
        return self._stack

    def _tell_failure(self, said: str) -> None:
        # not raised: what the script does after its training, as saving the model, goes first
        self.failure = said
        sys.stderr.write(f"stability: FAILED: {said}\n")


def record(
    model: "nn.Module",
    optimizer: "Optimizer | Iterable[Optimizer]" = (),
    *,
    study: str = "",
    arm: str = "",
    seed: int = 0,
    config: Mapping[str, Any] | argparse.Namespace | None = None,
    change: str = "",
    may_change: Sequence[str] = (),
    role: str = "",
    question: str = "",
    steps: int = 0,
    snapshots: Sequence[int] = (),
    nudge: tuple[int, int] = (0, 0),
    out: str | Path = "runs",
    optional: bool = False,
    watch: bool = False,
) -> IdleRecorder:
    """Record the training of `model` as an arm of a study; call it before the first update.

    The recorder is told of each micro-batch by `batch(*tensors)` and of each update, after the
    optimizer's step, by `step(loss)`. It is a context manager, or ends with the process. Every rank
    of a process group calls all of it; the first one writes. The arm called `baseline` comes first,
    and every other arm is paired with it by the seed. Nothing of the training is changed, unless a
    nudge is asked for.

    A variable of the environment goes before the argument of its name, as `STABILITY_ARM` before
    `arm` and `STABILITY_MAY_CHANGE` before `may_change`: lists as words or numbers between spaces
    or commas, `STABILITY_CONFIG` as a mapping in JSON, `STABILITY_OPTIONAL` as 1 or 0, and
    `STABILITY_WATCH` as 1 where the script does not ask for it itself. Under `stability record`
    the launcher records, and this does nothing.

    Args:
        model: the module that trains, wrapped for ranks or compiled as it may be
        optimizer: what updates it, so that weights which nothing updates are told
        study: the study's name, and that of its folder
        arm: the arm's name
        seed: the seed that the script was given; it seeds nothing here
        config: what the training is told, as JSON values; by default the script's own flags
        change: the path of the one change where several values make it, e.g. config.optimizer
        may_change: what else the change is meant to change: "init", "batches"
        role: candidate, reference, rerun, nudge, broken or yardstick
        question: what the study asks
        steps: end the training after as many updates; 0: it ends by itself
        snapshots: updates after which the weights are kept; by default 1, 2, 5, 10, 20, ...
        nudge: units in the last place by which the start weights are moved, and which draw
        out: folder that gets a folder named after the study
        optional: without a study do nothing, instead of raising
        watch: see batches, loss and updates without being told, as `stability record` does: for a
            loop that is not the caller's own

    Raises:
        ValueError: for a name, seed or value that can't be, for an arm whose baseline is not on
            record, for one that differs from it in more than one change, for a run that is on
            record already; on every rank alike.
    """
    told = told_by_variables(
        Told(
            study=study,
            arm=arm,
            seed=seed,
            config=config,
            change=change,
            may_change=may_change,
            role=role,
            question=question,
            steps=steps,
            snapshots=snapshots,
            nudge=nudge,
            out=str(out),
            optional=optional,
            watch=watch,
        ),
        os.environ,
    )
    if (not told.study and told.optional) or os.environ.get("STABILITY_SPOOL"):
        return IdleRecorder()
    # a trainer's loop can't but be watched
    return _begun(model, optimizer, told._replace(watch=watch or told.watch))


def _begun(
    model: "nn.Module", optimizer: "Optimizer | Iterable[Optimizer]", told: Told
) -> Recorder:
    from stability.study.foreign import opened  # heavy

    stack = ExitStack()
    record: OpenRun | None = None
    answer = ("", "")
    if _rank() == 0:
        try:
            run = _planned(told)
            record = stack.enter_context(opened(run, os.environ))
            answer = ("", json.dumps([str(record.spool.resolve()), asdict(run.asked)]))
        except ValueError as error:
            answer = (str(error), "")
    failure, told_by_first = _from_first_rank(answer)
    if failure:
        raise ValueError(failure)
    note_start()
    spool, asked = json.loads(told_by_first)
    training, looks = _training(Spool(spool, _rank()), Asked(**asked), watch=told.watch)
    is_one = hasattr(optimizer, "param_groups")
    for each in cast("Iterable[Optimizer]", [optimizer] if is_one else optimizer):
        training.add_optimizer(each)
    groups = [group for each in training.optimizers for group in each.param_groups]
    state, owners = state_of(model)
    training.begin_with(
        {**state, **named_masters(x for group in groups for x in group["params"])}, owners
    )
    if told.watch:
        stack.callback(install(training))
    if looks:
        looks.begin()
        stack.callback(looks.end)  # also where no update was made
    return Recorder(training, record, stack)


def _planned(told: Told) -> "ForeignRun":
    for name in ("study", "arm"):
        if not getattr(told, name):
            raise ValueError(
                f"stability.record: {name} must be given, by {name}= or by {variable_of(name)}"
            )
    least = {"seed": [told.seed], "steps": [told.steps], "nudge": told.nudge}
    for name, values in least.items():
        if any(value < 0 for value in values):
            raise ValueError(f"stability.record: {name} must be >= 0, got {min(values)}")
    if any(step < 1 for step in told.snapshots):
        raise ValueError(f"stability.record: snapshots must be >= 1, got {min(told.snapshots)}")
    from stability.study.foreign_plan import plan_run  # heavy

    ulps, draw = (*told.nudge, 0)[:2] if told.nudge else (0, 0)
    run = plan_run(
        Path(told.out),
        told.study,
        told.arm,
        told.seed,
        call_training(told.config, sys.argv),
        asked=Asked(
            seed=told.seed,
            steps=told.steps,
            snapshot_steps=sorted(set(told.snapshots)),
            nudge=(ulps, draw),
        ),
        role=told.role,
        change=told.change,
        may_change=told.may_change,
        question=told.question,
    )
    if run.is_kept:
        raise ValueError(
            f"stability.record: {run.paths.root}: this run is on record; name another arm or seed, "
            "or another folder by out="
        )
    return run


def _training(spool: Spool, asked: Asked, *, watch: bool) -> tuple[Training, Looks | None]:
    rank = _rank()
    words = {
        "STABILITY_NUDGE": f"{asked.nudge[0]} {asked.nudge[1]}",
        "STABILITY_SEED": str(asked.seed),
        "STABILITY_STEPS": str(asked.steps),
        "STABILITY_LOOKS": ",".join(map(str, asked.looks)),
    }
    witness: InsideWitness | None = None

    def begin(state: "dict[str, Tensor]") -> dict[str, Any]:
        if witness:
            witness.begin(state)
        return start_of(state, words, rank, all_switches())

    training = Training(
        spool,
        due=due_at(",".join(map(str, asked.snapshot_steps))),
        steps=asked.steps,
        keeps_state=rank == 0,
        begin=begin,
        end=lambda: {
            "modules": own_modules(),
            "held_out": "" if watch else "call",
            "written": started().written(),
            "changed": changed_since(own_files().values(), started().time),
            **code_told(),
            **(witness.told() if witness else {}),
        },
        evaluations=Evaluations(watches=watch),
    )
    if rank:
        return training, None
    from stability.probe.executed import Executed  # heavy: nothing of it where nothing is recorded
    from stability.probe.known_answers import known_answers

    looks = Looks(training, Executed, looks_at(words))
    witness = InsideWitness(looks, all_switches, known_answers, {})
    return training, looks


def _rank() -> int:
    import torch  # heavy

    distributed = torch.distributed
    is_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if is_group else 0


def _from_first_rank(answer: tuple[str, str]) -> tuple[str, str]:
    """Return what the first rank has to say, on every rank."""
    import torch  # heavy

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return answer
    said: list[Any] = [answer]
    distributed.broadcast_object_list(said, src=0)
    return said[0]


def _wait_for_ranks(spool: Path) -> None:
    """Wait until all ranks have written their last line, or the patience is over."""
    from stability.recorder.spooled import has_ended  # heavy

    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and not has_ended(spool):
        time.sleep(0.05)
