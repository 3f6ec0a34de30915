"""Records a probe's measurements in a folder, for models that no study trains.

The folder gets a `probe.json` and a `metrics.jsonl`, as `stability show` and `stability report`
read them. The first is there before the second, and says that the probe runs until it has ended;
then it seals the log. Leaves out measuring (`attention_probe`) and Lightning's loggers
(`callbacks.probe_callbacks`).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from stability.metrics.instability import crossings
from stability.probe.measurements import StepMeasurements
from stability.records.atomic_files import make_folders
from stability.records.events import Event, log_event
from stability.records.identity import environment
from stability.records.metric_log import MetricLog, read_lines
from stability.records.metric_names import parse_gradient
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    ProbeRecord,
    SealedLog,
    check_probe_log,
    rank_folder,
    read_probe_record,
    write_probe_record,
)

__all__ = ["ProbeRecorder"]


class ProbeRecorder:
    """Writes measurements into `folder`, or goes on there after `first_step` updates.

    `primary` says what computes in the model, `shadows` what each shadow is, both as JSON values.
    Where several ranks train the model each has a folder of its own (`rank_folder`). What the
    folder holds of steps that will be made again is cut off. ValueError if it holds another probe,
    or one at all where `first_step` is 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        primary: dict[str, Any],
        shadows: dict[str, dict[str, Any]],
        golden: bool,
        first_step: int = 0,
    ) -> None:
        rank, ranks = _place_among_ranks()
        self._folder = rank_folder(folder, rank)
        self._log = MetricLog(self._folder / METRICS_FILE)
        self._watched: dict[str, float] = {}
        self._is_described = False
        self._record = {
            "model": model,
            "primary": primary,
            "shadows": shadows,
            "golden": golden,
            "environment": environment(),
            "rank": rank,
            "ranks": ranks,
        }
        if os.path.lexists(self._folder / PROBE_FILE):
            self._go_on(first_step)
        elif os.path.lexists(self._folder / METRICS_FILE):
            raise ValueError(
                f"folder must hold no other log, got {str(self._folder)!r}, which "
                f"has {METRICS_FILE}; name another one"
            )

    def _go_on(self, first_step: int) -> None:
        """Go on with the record that is here, from after `first_step` updates."""
        before = read_probe_record(self._folder)
        if not first_step:
            raise ValueError(
                f"folder must hold no probe yet, got {str(self._folder)!r}, which "
                f"has {PROBE_FILE}; name another one, or give first_step, the number of updates "
                "made before, to go on with it"
            )
        for name in ("model", "primary", "shadows", "golden", "rank", "ranks"):
            was, now = getattr(before, name), self._record[name]
            if was != now:
                raise ValueError(
                    f"{self._folder} must be of the probe that goes on, its {name} "
                    f"is {was!r}, not {now!r}; name another folder"
                )
        check_probe_log(self._folder, before)
        # first, or a process killed after the cut would leave a sealed log without its end
        self.describe(before.layers, first_step)
        self._log.truncate_to(_end_of_steps(self._folder / METRICS_FILE, first_step))
        texts = [
            f"from step {first_step} on {name} is {now!r}, before it was {was!r}"
            for name, was in before.environment.items()
            if was != (now := self._record["environment"].get(name))
        ]
        if before.state == "ended" and before.steps < first_step:
            texts.append(
                f"nothing is on record of updates {before.steps} to {first_step}: the probe ended "
                "before them"
            )
        for text in texts:
            log_event(self._log, Event(first_step, "finding", "model", text))

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


def _place_among_ranks() -> tuple[int, int]:
    """Return the rank of this process, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # torchrun says so before the processes have met
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _end_of_steps(log: Path, first_step: int) -> int:
    """Return the length of the log up to what will be measured again after `first_step` updates.

    A look at the whole model's gradient after as many updates is over, and stays.
    """
    end = 0
    if log.exists():
        with log.open("rb") as file:
            for _, line in read_lines(log):
                is_gradient = any(map(parse_gradient, line))
                if line["step"] > first_step or (line["step"] == first_step and not is_gradient):
                    break
                file.readline()
                end = file.tell()
    return end
