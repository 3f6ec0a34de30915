"""What a session found and measured, handed to its sinks in the order of steps.

A due step's values are still on their way to the host when the next step begins, and what is told
of that one must not overtake them. Leaves out measuring (`probe`) and the record on disk
(`probe.probe_recorder`).
"""

from collections.abc import Callable, Sequence

from stability.intercept.other_functions import OtherFunctions
from stability.probe.measurements import HostTransfer, ProbeFinding, StepMeasurements

__all__ = ["SessionResults", "Sink"]

Sink = Callable[[int, StepMeasurements], None]
"""Is given each probed step's number and measurements, in order, once they have arrived."""


class SessionResults:
    """Hands each step's measurements and findings to `sinks`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.findings: list[tuple[int, str, str]] = []
        """(step, layer, what was wrong), as they arrive."""
        self._sinks = tuple(sinks)
        self._other_functions = OtherFunctions()
        self._latest = StepMeasurements({}, {}, ())
        self._awaited: tuple[int, HostTransfer] | None = None

    @property
    def latest(self) -> StepMeasurements:
        """The measurements of the last due step; waits for them on CUDA."""
        self.deliver()
        return self._latest

    def find(self, step: int, layer: str, text: str) -> None:
        """Tell of `layer` at `step`, after what was measured before."""
        self.take(step, StepMeasurements({}, {}, (ProbeFinding(layer, text),)))

    def take(self, step: int, measured: StepMeasurements) -> None:
        """Hand over what was measured at `step`, after what was measured before."""
        self.deliver()
        self._hand_over(step, measured)

    def wait_for(self, step: int, transfer: HostTransfer) -> None:
        """Hand over the measurements of `step` when they have arrived, by the next of these."""
        self.deliver()
        self._awaited = (step, transfer)

    def deliver(self) -> None:
        """Hand over the measurements that are on their way; waits for them on CUDA."""
        if self._awaited is None:
            return
        step, transfer = self._awaited
        self._awaited = None
        self._latest = transfer.result()
        for finding in self._other_functions.found(self._latest.metrics):
            self._hand_over(step, StepMeasurements({}, {}, (finding,)))
        self._hand_over(step, self._latest)

    def _hand_over(self, step: int, measured: StepMeasurements) -> None:
        self.findings += [(step, layer, text) for layer, text in measured.findings]
        for sink in self._sinks:
            sink(step, measured)
