"""What a probe has gathered at one step: tensors on the device with a name for each value.

One transfer brings all of them to the host; on CUDA it runs beside the training and is waited for
only when the numbers are read. Leaves out measuring (`probe`) and logging (`callbacks`, `session`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stability.records.metric_names import parse_deviation

__all__ = ["Finding", "Gathered", "Reading", "Transfer"]


class Finding(NamedTuple):
    """Something that a probe could not compare, or that is no number: a layer and a sentence."""

    layer: str
    text: str


class Reading(NamedTuple):
    """The probe's figures of one step."""

    metrics: dict[str, float]
    counts: dict[str, list[int]]
    findings: tuple[Finding, ...]


class Gathered:
    """Collects named values on the device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._counts: list[tuple[str, Tensor]] = []

    def add(self, names: Sequence[str], values: Tensor) -> None:
        """Take in one value a name."""
        assert len(names) == values.numel()
        self._names += names
        self._tensors.append(values.detach().double().flatten())

    def add_counts(self, name: str, counts: Tensor) -> None:
        """Take in a histogram."""
        self._counts.append((name, counts.detach().double().flatten()))

    def transfer(self, findings: Sequence[Finding]) -> "Transfer | None":
        """Start the one transfer of everything gathered, and forget it; None if there's nothing."""
        tensors = [*self._tensors, *(counts for _, counts in self._counts)]
        if not tensors and not findings:
            return None
        sizes = [(name, counts.numel()) for name, counts in self._counts]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float64)
        made = Transfer(self._names, sizes, values, tuple(findings))
        self._names, self._tensors, self._counts = [], [], []
        return made


class Transfer:
    """Values on their way to the host."""

    def __init__(
        self,
        names: list[str],
        counts: list[tuple[str, int]],
        values: Tensor,
        findings: tuple[Finding, ...],
    ) -> None:
        self._names, self._counts, self._findings = names, counts, findings
        self._arrived = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = values

    @property
    def is_here(self) -> bool:
        """Whether there is nothing to wait for, because nothing had to be moved."""
        return self._arrived is None

    def result(self) -> Reading:
        """Return the reading, once it has arrived. Values that are no numbers become findings."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._host.tolist()
        metrics = dict(zip(self._names, values, strict=False))
        counts, start = {}, len(self._names)
        for name, size in self._counts:
            counts[name] = [int(count) for count in values[start : start + size]]
            start += size
        return Reading(metrics, counts, (*self._findings, *_nonfinite(metrics)))


def _nonfinite(metrics: dict[str, float]) -> list[Finding]:
    found = []
    for name, value in metrics.items():
        parts = parse_deviation(name)
        if parts and parts.metric == "nonfinite" and not parts.part and value > 0:
            who = f"{parts.shadow}: " if parts.shadow else ""
            found.append(Finding(parts.layer, f"{who}{value:g} values of {parts.what} not finite"))
    return found
