"""When the probe looks: at which steps, and with a bound on its time at how many layers of a step.

Under a bound the layers take turns. Which ones are looked at then depends on the speed of the
machine; what the run computes does not.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Budget", "Schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The due steps: those in `steps`, else multiples of `every`, and `per_decade` log-spaced ones.

    Where `steps` are given `every` does not apply. The log-spaced steps are 0 and
    10^(i / per_decade), rounded, for i = 0, 1, 2, ...: with 3 they are 0, 1, 2, 5, 10, 22, 46, 100,
    ... Each of the three is off at 0 or empty. ValueError for a negative number.
    """

    every: int = 0
    steps: tuple[int, ...] = ()
    per_decade: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("every", self.every),
            ("per_decade", self.per_decade),
            ("steps", min(self.steps, default=0)),
        ):
            if value < 0:
                raise ValueError(f"Schedule: {name} must be >= 0, got {value}; 0 switches it off")

    def is_due(self, step: int) -> bool:
        """Whether `step`, counted in updates from 0, is to be probed."""
        if step in self.steps:
            return True
        if not self.steps and self.every > 0 and step % self.every == 0:
            return True
        return self.per_decade > 0 and self._is_log_spaced(step)

    def _is_log_spaced(self, step: int) -> bool:
        if step == 0:
            return True
        # only the rounded powers in the step's own decade can be equal to it
        power = len(str(step)) - 1
        first, last = power * self.per_decade, (power + 1) * self.per_decade
        return any(round(10 ** (i / self.per_decade)) == step for i in range(first, last + 1))


class Budget:
    """Grants layers while the probe's time is below `share` of the time since the first step.

    `share=0` grants every layer. On CUDA the probe's time is that between two events of the stream,
    read once both have happened: reading a clock instead would need a synchronisation.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._layers: list[str] = []
        self._turn = 0
        self._granted: frozenset[str] = frozenset()
        self._began: float | None = None
        self._spent, self._n_looks = 0.0, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Choose this step's layers. The first step has one, to learn what a layer costs."""
        if not self._share:
            return
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        self._read_events()
        count = 1
        # a granted call may not have been compared, and CUDA's time is read later: still one
        if self._n_looks and self._spent:
            # as many layers as the time still granted pays for, at the mean cost of those so far
            # since the first step and not this one alone, so that what is not spent can be saved up
            left = self._share * (now - self._began) - self._spent
            count = int(left / (self._spent / self._n_looks))
        # below 0 when looks have overdrawn their share: none until the run has caught up
        count = max(0, min(count, len(self._layers)))
        order = self._layers[self._turn :] + self._layers[: self._turn]
        self._granted = frozenset(order[:count])
        if self._layers:
            # the next step goes on where this one ends, so that no layer is left out for good
            self._turn = (self._turn + count) % len(self._layers)

    def grants(self, layer: str) -> bool:
        """Whether to look at `layer` in this step; each layer that asks joins the turn."""
        if not self._share:
            return True
        if layer not in self._layers:
            self._layers.append(layer)
            if not self._n_looks and not self._granted:
                self._granted = frozenset({layer})
        granted = layer in self._granted
        self._n_looks += granted
        return granted

    @contextmanager
    def spending(self, device: torch.device) -> Iterator[None]:
        """Count the time of the block as the probe's."""
        if not self._share:
            yield
            return
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._spent += time.perf_counter() - start
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def _read_events(self) -> None:
        # asked, not waited for: a pair that is not through yet is counted at a later step
        finished = [pair for pair in self._events if pair[1].query()]
        # CUDA's events count in milliseconds
        self._spent += sum(first.elapsed_time(last) / 1000 for first, last in finished)
        self._events = [pair for pair in self._events if pair not in finished]
