"""Shows a run's metric log in W&B, line by line, while the run trains and afterwards.

The metric log is the truth and W&B a view of it: row n of the W&B run is the n-th line of the log
that holds numbers or counts. So there is one path: `row_of` turns a line into a row, and
`WandbRun.send` sends it. A run that is resumed or published reads the lines that W&B lacks from the
log and sends them the same way. This file does not start the W&B run (`wandb_run`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stability.config.axes import NO_AXIS, groups_of
from stability.metrics.ulp import ULP_EDGES
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.events import Event, event_of
from stability.records.metric_log import MetricLog, read_lines
from stability.records.metric_names import (
    DRIFTS,
    EVAL_LOSS,
    STEP_AXIS,
    TRAIN_LOSS,
    ULP_HISTOGRAM,
    WEIGHT_HISTOGRAM,
    parse_deviation,
)
from stability.records.metric_table import DEVIATION_METRICS
from stability.records.paths import RunPaths
from stability.records.sealed_json import NON_FINITE
from stability.tracking.environment import WandbMode
from stability.tracking.wandb_run import (
    TRAINING_PATIENCE_S,
    in_a_line,
    start_run,
    told_in_a_line,
)

if TYPE_CHECKING:
    import wandb

__all__ = [
    "MirroredLog",
    "WandbRun",
    "check_counts",
    "numbers_of",
    "open_wandb_run",
    "row_of",
    "send_alert",
]

_TITLE_LENGTH = 63
_WAIT = timedelta(milliseconds=1)  # W&B 0.31 takes 0 for its default, a minute without alerts
_STALE = "stale"
"""The text entry of a line whose drifts were replaced: it is a row even where no number is left."""
_PREFIXES = {
    "drift/*": "",
    "watch/*": "last,max",
    "weights/*": "",
}
"""What W&B's summary holds of the metrics under a prefix; "" is the last value alone."""


class WandbRun:
    """One run of W&B, which shows the metric log `log`; its first `rows_there` rows are sent."""

    def __init__(self, run: "wandb.Run", rows_there: int, log: Path) -> None:
        self.run = run
        self._log = log
        self._rows_there = rows_there
        self._row = 0
        self._values: dict[str, list[float]] = {}
        self._defined: set[str] = set()
        run.define_metric(STEP_AXIS, hidden=True)
        for name in (TRAIN_LOSS, EVAL_LOSS, *_PREFIXES):
            self._define(name)

    def send(self, line: Mapping[str, Any]) -> None:
        """Send one line of the log, as a row or an alert, unless W&B has it already.

        Lines must come in the order of the log. A line that holds only text is not sent. Raises
        ConnectionError if W&B's service has ended.
        """
        with told_in_a_line():
            self._send(line)

    def _send(self, line: Mapping[str, Any]) -> None:
        is_new = self._row >= self._rows_there
        if "event" in line:
            if is_new:
                send_alert(self.run, event_of(line, str(self._log)))
            return
        numbers = numbers_of(line)
        if not numbers and not _counts_of(line) and _STALE not in line:
            return
        if self._rows_there:
            for name, value in numbers.items():
                self._values.setdefault(name, []).append(value)
        if is_new:
            row = row_of(line)
            for name in row:
                self._define_unless_prefixed(name)
            # committed at once: W&B writes an open row after the summary, and so replaces that
            self.run.log({**row, STEP_AXIS: line["step"]}, step=self._row, commit=True)
        self._row += 1

    def send_history(self, instead: Mapping[int, Mapping[str, float]] | None = None) -> None:
        """Send every line that stands in the log now.

        `instead` holds drifts by step, none where they are stale: they are sent in the place of
        those in the log. Raises ValueError, which names the file and the line, if one is damaged.
        """
        if self._log.exists():
            for _, line in read_lines(self._log):
                self.send(_with_drifts(line, instead or {}))

    def complete_summary(self) -> None:
        """Let the summary cover every row: W&B by itself would cover those sent just now."""
        for name, values in self._values.items():
            numbers = [value for value in values if not math.isnan(value)] or values
            known = {"last": values[-1], "min": min(numbers), "max": max(numbers)}
            kinds = [kind for kind in _summary_of(name).split(",") if kind]
            self.run.summary[name] = {kind: known[kind] for kind in kinds} or values[-1]

    def close(self, *, failed: bool = False) -> None:
        """Write everything out and end the run; W&B shows a failed one as failed.

        Raises TimeoutError if the server takes too long, and ConnectionError if W&B's service has
        ended.
        """
        with told_in_a_line():
            self.run.finish(exit_code=1 if failed else 0)

    def _define_unless_prefixed(self, name: str) -> None:
        # Of two rules that fit a metric, its own and a prefix's, W&B 0.31 takes one by chance; and
        # a star in a name would make it a prefix.
        if name not in self._defined and _prefix_of(name) is None and "*" not in name:
            self._define(name)

    def _define(self, name: str) -> None:
        """Tell W&B to draw a metric over the optimizer step, and what to keep in the summary."""
        self._defined.add(name)
        self.run.define_metric(
            name, step_metric=STEP_AXIS, step_sync=True, summary=_summary_of(name) or None
        )


class MirroredLog(MetricLog):
    """A metric log whose lines go to W&B too, each after it was written to the file.

    W&B is a view: what goes wrong with it ends the view, and the log goes on.
    """

    def __init__(self, path: Path, mirror: WandbRun) -> None:
        super().__init__(path)
        self._mirror = mirror
        self._is_history_sent = False
        self._trouble = ""

    def append(
        self,
        step: int,
        metrics: Mapping[str, float],
        counts: Mapping[str, Sequence[int]] | None = None,
        **text: str,
    ) -> None:
        """Write a line as `MetricLog.append` does, and send it to W&B."""
        if not self._is_history_sent:
            # Only now: a resumed run cuts the log to its checkpoint after the log was made.
            self._try(self._mirror.send_history)
            self._is_history_sent = True
        super().append(step, metrics, counts, **text)
        lists = {name: list(values) for name, values in (counts or {}).items()}
        self._try(lambda: self._mirror.send({"step": step, **metrics, **lists, **text}))

    def end_mirror(self, *, failed: bool) -> str:
        """End the run of W&B; return what went wrong with it, mostly nothing."""
        self._try(lambda: self._mirror.close(failed=failed))
        return self._trouble

    def _try(self, call: Callable[[], None]) -> None:
        if not self._trouble:
            try:
                call()
            except Exception as error:  # the training must not die of a view, whatever W&B raises
                self._trouble = in_a_line(error)


def _with_drifts(
    line: Mapping[str, Any], instead: Mapping[int, Mapping[str, float]]
) -> Mapping[str, Any]:
    """Return a line of the log with the drifts that `instead` has of its step, if it has any."""
    if line["step"] not in instead or not any(name.startswith(DRIFTS) for name in line):
        return line
    others = {name: value for name, value in line.items() if not name.startswith(DRIFTS)}
    return {**others, **instead[line["step"]], _STALE: ""}


_MOST_OF_A_TAG = 64
"""Most characters of a tag; W&B refuses a run with a longer one."""


def open_wandb_run(
    mode: WandbMode,
    *,
    study: str,
    arm: str,
    seed: int,
    axis: str,
    changes: Iterable[str] | Mapping[str, Sequence[Any]],
    config: Mapping[str, Any],
    paths: RunPaths,
    is_other_layout: bool = False,
    patience_s: float = TRAINING_PATIENCE_S,
) -> WandbRun | None:
    """Start or resume the W&B run of one arm and seed, grouped by study; None if disabled.

    `config` is the arm's resolved config as JSON values; its group `seed` is called `seeds` in W&B,
    where `seed` is the number. `changes` are the paths that differ from the baseline's, with
    both values: their groups are tags, and `changed_group` in the config; `is_other_layout` where
    the two trained in other numbers of processes. Online the server is waited for `patience_s`
    seconds. Raises ConnectionError if W&B refuses.
    """
    if mode == "disabled":
        return None
    groups = groups_of(changes, is_other_layout=is_other_layout)
    run, rows_there = start_run(
        mode,
        paths.wandb_dir,
        patience_s=patience_s,
        name=f"{arm}-seed{seed}",
        group=study,
        job_type=arm,
        tags=list(dict.fromkeys([axis[:_MOST_OF_A_TAG], *groups, f"seed-{seed}"])),
        config={
            **{("seeds" if name == "seed" else name): value for name, value in config.items()},
            **{"study": study, "arm": arm, "seed": seed, "axis": axis},
            "changed_group": " + ".join(groups) or NO_AXIS,
        },
    )
    return WandbRun(run, rows_there, paths.metrics)


def row_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what W&B gets of a line of the metric log: its numbers, and its counts as histograms.

    Text is left out. Raises ValueError as `check_counts`.
    """
    row: dict[str, Any] = dict(numbers_of(line))
    counts = _counts_of(line)
    check_counts(counts)
    for name, values in counts.items():
        import wandb  # heavy

        inner = _edges_of(name)
        # The first and last bin are open; W&B draws them as wide as their neighbours.
        bounds = [2 * inner[0] - inner[1], *inner, 2 * inner[-1] - inner[-2]]
        row[name] = wandb.Histogram(np_histogram=(np.asarray(values), np.asarray(bounds)))
    return row


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, without its step, its counts and its text."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step"
        and not isinstance(value, list)
        and (not isinstance(value, str) or value in NON_FINITE)
    }


def check_counts(counts: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if a histogram has another number of bins than its edges make."""
    for name, values in counts.items():
        bins = len(_edges_of(name)) + 1
        if len(values) != bins:
            raise ValueError(
                f"check_counts: {name} must have {bins} bins, one more than it has inner edges, "
                f"got {len(values)}; count between those edges"
            )


def send_alert(run: "wandb.Run", event: Event) -> None:
    """Send an event of kind alert as an alert of W&B's, by mail or chat if its user wants that.

    Other events are not sent.
    """
    if event.kind == "alert":
        where = f" at step {event.step}"
        title = (event.layer or "run")[: _TITLE_LENGTH - len(where)] + where
        run.alert(title, event.text, level="WARN", wait_duration=_WAIT)


def _counts_of(line: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: value for name, value in line.items() if isinstance(value, list)}


def _edges_of(histogram: str) -> Sequence[float]:
    """Return the bounds between the bins of a histogram, one fewer than the bins."""
    return WEIGHT_EDGES if histogram == WEIGHT_HISTOGRAM else ULP_EDGES


def _summary_of(name: str) -> str:
    """Return what W&B's summary holds of a metric: some of last, min, max; "" is the last alone."""
    prefix = _prefix_of(name)
    if prefix is not None:
        return _PREFIXES[prefix]
    if name in (TRAIN_LOSS, EVAL_LOSS):
        return "last,min"
    parts = parse_deviation(name)
    if parts is None or parts.metric == ULP_HISTOGRAM:
        return ""
    metric = DEVIATION_METRICS.get(parts.metric)  # None for a metric that a plugin adds
    return "last,min" if metric and metric.worse == "lower" else "last,max"


def _prefix_of(name: str) -> str | None:
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix[:-1])), None)
