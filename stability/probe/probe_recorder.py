"""Records a probe's measurements in a folder, for models that no study trains.

The folder gets a `probe.json` and a `metrics.jsonl`, as `stability show` and `stability report`
read them. The first is there before the second, and says that the probe runs until it has ended;
then it seals the log. Leaves out measuring (`attention_probe`) and Lightning's loggers
(`callbacks.probe_callbacks`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from stability.metrics.instability import crossings
from stability.probe.measurements import StepMeasurements
from stability.records.atomic_files import make_folders
from stability.records.events import Event, log_event
from stability.records.identity import environment
from stability.records.metric_log import MetricLog
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    ProbeRecord,
    SealedLog,
    write_probe_record,
)

__all__ = ["ProbeRecorder"]


class ProbeRecorder:
    """Writes measurements into `folder`, which must hold no probe yet; ValueError if it does.

    `primary` says what computes in the model, `shadows` what each shadow is, both as JSON values.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        primary: dict[str, Any],
        shadows: dict[str, dict[str, Any]],
        golden: bool,
    ) -> None:
        taken = [name for name in (PROBE_FILE, METRICS_FILE) if (folder / name).exists()]
        if taken:
            raise ValueError(
                f"ProbeRecorder: folder must hold no probe yet, got {str(folder)!r}, which has "
                f"{taken[0]}; name another one"
            )
        self._folder = folder
        self._log = MetricLog(folder / METRICS_FILE)
        self._watched: dict[str, float] = {}
        self._is_described = False
        self._record = {
            "model": model,
            "primary": primary,
            "shadows": shadows,
            "golden": golden,
            "environment": environment(),
        }

    def write(self, step: int, measured: StepMeasurements) -> None:
        """Append one step's values, histograms, findings and alerts."""
        if not self._is_described:
            self.describe((), step)
        if measured.metrics or measured.counts:
            self._log.append(step, measured.metrics, measured.counts)
        for layer, text in measured.findings:
            log_event(self._log, Event(step, "finding", layer, text))
        watched = measured.watched()
        for crossing in crossings(watched, self._watched):
            log_event(self._log, Event(step, "alert", crossing.layer, crossing.text))
        # merged: a value that this step did not measure keeps its last one, or it would alert twice
        self._watched |= watched

    def describe(self, layers: Sequence[str], steps: int) -> None:
        """Write `probe.json`: the layers that were caught by now, and how many steps were made."""
        self._write_record(layers, steps, "running", None)

    def end(self, layers: Sequence[str], steps: int) -> None:
        """Close the log, force it to disk, and seal it in `probe.json`."""
        self._log.close()
        length = self._log.position()
        self._log.truncate_to(length)  # less the line that a full disk has torn
        self._log.sync()
        sealed = SealedLog(bytes=length, sha256=self._log.hash_until(length))
        self._write_record(layers, steps, "ended", sealed)

    def _write_record(
        self,
        layers: Sequence[str],
        steps: int,
        state: Literal["running", "ended"],
        log: SealedLog | None,
    ) -> None:
        make_folders(self._folder)
        record = ProbeRecord(**self._record, layers=list(layers), steps=steps, state=state, log=log)
        write_probe_record(self._folder, record)
        self._is_described = True
