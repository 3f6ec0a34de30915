"""A study with everything a run can record, on top of `synthetic`: what pages have to show.

Backward deviations, errors made here and carried in, histograms, drifts of single parameters,
watched measurements and events.
"""

from pathlib import Path

from stability.metrics.ulp import ULP_EDGES
from stability.records.events import Event, log_event
from stability.records.metric_log import MetricLog
from stability.records.metric_names import ULP_HISTOGRAM, deviation_name, drift_name, watch_name
from stability.records.paths import RunPaths
from tests.stability.report.synthetic import (
    ARMS,
    LAYERS,
    SEEDS,
    SNAPSHOTS,
    STEPS,
    deviations,
    drifts,
    write_synthetic,
)

__all__ = ["ALERT", "FINDING", "PARAMETERS", "PROBED", "write_full"]

PROBED = range(0, STEPS, 20)
BACKWARD = {"lse": 0.2, "dq": 1.3, "dk": 1.7, "dv": 0.8, "carried": 2.5, "total": 3.1}
"""What is compared besides `out` -> its error over that of `out`."""
PARAMETERS = {f"blocks.layer_{n}.query.weight": 0.5 + 0.3 * n for n in range(LAYERS)}
"""A parameter -> its drift over that of all weights."""
FINDING = Event(40, "finding", "layer_2", "dk has 3 values that are no number")
ALERT = Event(120, "alert", "", "the loss spiked: 7 standard deviations above its mean")


def write_full(study_dir: Path) -> Path:
    """Write a whole finished study into `study_dir`, with every kind of measurement and event."""
    write_synthetic(study_dir)
    for arm in ARMS:
        for seed in SEEDS:
            log = MetricLog(RunPaths.for_run(study_dir, arm["name"], seed).metrics)
            for step in PROBED:
                log.append(step, _deviations(arm["name"], seed, step), _counts(seed, step))
            for step in SNAPSHOTS if arm["name"] != "baseline" else ():
                log.append(step, _drifts(arm["name"], seed, step))
            if arm["name"] == "flash_all_bf16" and seed == 1:
                log_event(log, FINDING)
                log_event(log, ALERT)
            log.close()
    return study_dir


def _deviations(arm: str, seed: int, step: int) -> dict[str, float]:
    values = {watch_name("grad_norm"): 1.0 + step / STEPS + seed}
    for layer in range(LAYERS):
        measured = deviations(arm, layer, step)
        values[watch_name("max_logit", layer=f"layer_{layer}")] = 4.0 + layer + step / 100
        for what, times in BACKWARD.items():
            for metric, value in measured.items():
                name = deviation_name(f"layer_{layer}", what, metric)
                values[name] = value * times * (1 + 0.1 * seed)
    return values


def _counts(seed: int, step: int) -> dict[str, list[int]]:
    bins = len(ULP_EDGES) + 1
    peak = [2 ** max(0, 12 - 2 * abs(place - bins // 2)) for place in range(bins)]
    return {
        deviation_name(f"layer_{layer}", what, ULP_HISTOGRAM): [n + seed + step for n in peak]
        for layer in range(LAYERS)
        for what in ("out", *BACKWARD)
    }


def _drifts(arm: str, seed: int, step: int) -> dict[str, float]:
    whole = drifts(arm, seed, step)
    names = {(name, metric): times for name, times in PARAMETERS.items() for metric in whole}
    return {drift_name(name, metric): whole[metric] * t for (name, metric), t in names.items()}
