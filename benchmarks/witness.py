"""What the witness costs a run, on this machine: the first arms of the demo's study.

    PYTHONPATH=.:kernels python benchmarks/witness.py

Each run is trained in a process of its own, as a study does, with the witness's hooks and its
dispatch mode timed from outside by the CPU time of the thread they run in, without the operators
that the mode runs. What torch needs to hand an operator to any mode is measured apart, by a mode
that does nothing, and counted with each operator; what the timers need for one, measured likewise,
is taken off. Printed are the seconds, the run's CPU time, and the share. Exit code 1 where the
share of all runs together is not under 1 %.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stability.callbacks.study_observer import StudyObserver
from stability.config.load import load_study
from stability.probe.executed import Executed
from stability.recorder.witnessing import Witnessing
from stability.study.fresh_process import call_alone
from stability.study.run import Run
from stability.study.run_study import plan_study
from stability.study.train_run import TrainOptions, train

ROOT = Path(__file__).parents[1]
LIMIT = 0.01


class Mute:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Stopwatch:
    """The CPU time of a thread inside some functions, without that of what they call for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_on = False

    def time(self, owner: type, name: str) -> None:
        """Time each call of a method; one inside another counts once."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_on:
                return inner(*args, **kwargs)
            self._is_on, start = True, time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self._is_on = False

        setattr(owner, name, timed)

    def without(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what `call` returns; its time is not counted."""
        self._is_on, start = False, time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds -= time.thread_time() - start
            self._is_on = True


class _Operator:
    """An operator whose run is not counted; to a table it is a key of its own."""

    def __init__(self, func: Any, stopwatch: Stopwatch) -> None:
        self.func = func
        self._stopwatch = stopwatch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stopwatch.without(self.func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)


class _Nothing(TorchDispatchMode):
    """A mode that runs each operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _count(mode: type[TorchDispatchMode], stopwatch: Stopwatch) -> list[int]:
    """Time a mode's own work, and return a list whose one number counts its operators."""
    dispatch, count = mode.__torch_dispatch__, [0]
    operators: dict[Any, _Operator] = {}

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count[0] += 1
        operator = operators.get(func)
        if operator is None:
            operator = operators[func] = _Operator(func, stopwatch)
        return dispatch(self, operator, types, args, kwargs or {})

    mode.__torch_dispatch__ = counted  # pyright: ignore[reportAttributeAccessIssue]
    stopwatch.time(mode, "__torch_dispatch__")
    return count


def _seconds_of_an_operator(repetitions: int = 20_000) -> tuple[float, float]:
    """Return what torch needs to hand an operator to a mode, and what our timers need for it."""
    x, seconds, stopwatch = torch.zeros(4), [], Stopwatch()
    for mode in (_Nothing(), torch.no_grad()) * 3:
        with torch.no_grad(), mode:
            start = time.thread_time()
            for _ in range(repetitions):
                torch.neg(x)
            seconds.append((time.thread_time() - start) / repetitions)
    count = _count(_Nothing, stopwatch)
    with torch.no_grad(), _Nothing():
        for _ in range(repetitions):
            torch.neg(x)
    return min(seconds[::2]) - min(seconds[1::2]), stopwatch.seconds / count[0]


def cost_of(run: Run) -> tuple[float, int, float]:
    """Train `run`; return the witness's seconds, its operators, and the CPU seconds of it all."""
    stopwatch = Stopwatch()
    for name, value in list(vars(Witnessing).items()):
        if callable(value) and not name.startswith("_"):
            stopwatch.time(Witnessing, name)
    count = _count(Executed, stopwatch)
    for name in ("enter", "leave", "note"):
        stopwatch.time(Executed, name)
    before = _cpu_seconds()
    manifest = train(run, TrainOptions(wandb_mode="offline"), cast(StudyObserver, Mute()))
    if manifest.state != "finished":
        raise SystemExit(f"{run.arm.name}: {manifest.state}")
    return stopwatch.seconds, count[0], _cpu_seconds() - before


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def main() -> int:
    """Print the cost in each run; return 1 if the share of all misses its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=12, help="how many runs (default: 12)")
    wanted = parser.parse_args().runs
    handed, timed = _seconds_of_an_operator()
    print(
        f"an operator: torch hands it to a mode in {handed * 1e6:.1f} us (counted), and the timers"
    )
    print(f"need {timed * 1e6:.1f} us (taken off)")
    own, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        study = load_study(ROOT / "configs" / "quickstart.yaml")
        for run in plan_study(study, Path(folder))[:wanted]:
            seconds, operators, total = call_alone(cost_of, run)
            own.append(seconds + operators * (handed - timed))
            whole.append(total)
            share = own[-1] / total
            name = f"{run.arm.name}, seed {run.seed}"
            print(f"{name:32} {own[-1]:.3f} s of {total:5.2f} s of CPU  {share:.2%}")
    share = sum(own) / sum(whole)
    print(f"witness: {sum(own):.2f} s of {sum(whole):.1f} s, {share:.2%} (limit {LIMIT:.0%})")
    return int(share >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
