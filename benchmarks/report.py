"""Time, memory and size of the report on a large study, in a fresh process.

    PYTHONPATH=.:kernels python benchmarks/report.py [--study FOLDER]

Writes the records of 20 arms x 5 seeds x 2,000 steps x 48 layers with the writers that runs use,
without training, and renders them. Seconds are those of the whole process, imports included, with
the records in the page cache; memory is its peak resident set (VmHWM) with that of the processes
it starts. Exit code 1 if a limit is missed. Linux only. With `--study`, the records are written
there and kept, or used if they are there already.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from stability.analysis.recorded import read_study
from stability.metrics.deviation import ULP_EDGES
from stability.metrics.drift import DRIFT_METRICS
from stability.records.events import Event, log_event
from stability.records.layout import RunPaths, StudyPaths
from stability.records.manifest import Manifest, environment, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.names import (
    BATCH_HASH,
    TRAIN_LOSS,
    ULP_HISTOGRAM,
    deviation_name,
    drift_name,
    watch_name,
)
from stability.records.sealed_json import file_checksum, write_sealed
from stability.report.html import write_report

STEPS, LAYERS, SEEDS = 2000, 48, 5
SECONDS_LIMIT, MEMORY_LIMIT, SIZE_LIMIT = 20.0, 1000.0, 15.0
SNAPSHOTS = sorted({round(STEPS ** (i / 39)) for i in range(40)} | {*range(50, STEPS + 1, 50)})
HISTOGRAM_EVERY = STEPS // 20
DEVIATIONS = ("rel_fro", "error_ratio", "bias_ulp")
WATCHED = ("grad_norm", "rms_max", "log_z", "loss_spike", "nonfinite_gradients")
PARAMETERS = ("all", *(f"blocks.{i}.{name}.weight" for i in range(4) for name in ("qkv", "up")))
AXES = {"rerun": "none", "nudge": "nudge", "fp32": "precision"}
ARMS = ("baseline", *(f"flash_{i:02}" for i in range(16)), *AXES)
DEVIATION_NAMES = [
    deviation_name(f"layer_{layer}", "out", metric)
    for layer in range(LAYERS)
    for metric in DEVIATIONS
]


def describe(arm: str) -> dict[str, object]:
    """Return what study.json says of an arm."""
    axis = AXES.get(arm, "none" if arm == "baseline" else "attention")
    path = {"attention": "attention.profile", "nudge": "nudge.ulps", "precision": "precision"}
    return {"name": arm, "axis": axis, "diff": {path[axis]: ["", arm]} if axis in path else {}}


def write_study(folder: Path) -> None:
    """Write the records of the whole study."""
    config = {
        "name": folder.name,
        "question": "How long does a large report take?",
        "base": {"train": {"steps": STEPS, "snapshot_steps": SNAPSHOTS}},
        "seeds": list(range(SEEDS)),
        "yardstick": "fp32",
        "early_step": 20,
    }
    arms = [describe(arm) for arm in ARMS]
    folder.mkdir(parents=True, exist_ok=True)
    around = environment()
    for index, arm in enumerate(arms):
        for seed in range(SEEDS):
            write_run(folder, arm, np.random.default_rng([index, seed]), seed, around)
    write_sealed(StudyPaths(folder).study, {"config": config, "arms": arms})


def write_run(
    folder: Path,
    arm: dict[str, object],
    random: np.random.Generator,
    seed: int,
    around: dict[str, object],
) -> None:
    """Write the log and the manifest of one finished run."""
    paths = RunPaths.for_run(folder, str(arm["name"]), seed)
    log = MetricLog(paths.metrics)
    for step in range(STEPS):
        write_step(log, step, random)
        if step in SNAPSHOTS and arm["name"] != "baseline":
            log.append(step, drifts(step, random))
    log.append(STEPS, drifts(STEPS, random) if arm["name"] != "baseline" else {"watch/end": 1.0})
    for step in (STEPS // 3, STEPS // 2):
        log_event(log, Event(step, "alert", "layer_7", "watch/layer_7/max_logit is 1.2e+04"))
    log.close()
    same = {"hashes": {"init_weights": "ab" * 32, "text": "cd" * 32, "batches": f"{seed:064}"}}
    manifest = Manifest(
        study=folder.name,
        arm=paths.arm,
        seed=seed,
        axis=str(arm["axis"]),
        config={},
        diff={},
        environment=around,
        resolved={},
        **same,
        state="finished",
        step=STEPS,
        message="",
        files={paths.metrics.name: file_checksum(paths.metrics)},
    )
    write_manifest(paths.manifest, manifest)


def write_step(log: MetricLog, step: int, random: np.random.Generator) -> None:
    """Write what a run logs at each step: the loss, the batch, what is watched, each layer."""
    log.append(step, {TRAIN_LOSS: 2 + 3 * math.exp(-step / 300) + 0.05 * random.standard_normal()})
    log.append(step, {}, **{BATCH_HASH: random.bytes(32).hex()})
    log.append(step, {watch_name(name): float(random.random()) for name in WATCHED})
    sizes = np.exp(0.2 * random.standard_normal((LAYERS, len(DEVIATIONS))))
    values = sizes * (3e-3, 0.9, 0.02 * random.standard_normal())
    log.append(step, dict(zip(DEVIATION_NAMES, values.ravel().tolist(), strict=True)))
    if step % HISTOGRAM_EVERY == 0:
        counts = random.integers(0, 2**20, (LAYERS, len(ULP_EDGES) + 1)).tolist()
        names = [deviation_name(f"layer_{i}", "out", ULP_HISTOGRAM) for i in range(LAYERS)]
        log.append(step, {}, dict(zip(names, counts, strict=True)))


def drifts(step: int, random: np.random.Generator) -> dict[str, float]:
    """Return a drift of every parameter and metric that grows with the step."""
    sizes = 1e-5 * (1 + step) ** 0.8 * np.exp(0.1 * random.standard_normal(1000))
    names = [drift_name(name, metric) for name in PARAMETERS for metric in DRIFT_METRICS]
    return dict(zip(names, sizes.tolist(), strict=False))


def peak() -> float:
    """Return this process's peak resident set in MB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024 / 1e6


def rate_of_json(log: Path) -> float:
    """Return the bytes a second at which `json.loads` alone reads the lines of a log."""
    lines = log.read_bytes().splitlines()
    start = time.perf_counter()
    for line in lines:
        json.loads(line)
    return log.stat().st_size / (time.perf_counter() - start)


def kept(what: str, value: float, limit: float, unit: str) -> bool:
    """Print a figure beside its limit and return whether it is kept."""
    mark = "ok" if value <= limit else "MISSED"
    print(f"{what:30} {value:8.1f} {unit:2}  (limit {limit:g} {unit})  {mark}")
    return value <= limit


def measure(folder: Path) -> int:
    """Render the study in `folder` and return the exit code."""
    logs = list(folder.glob("*/seed-*/metrics.jsonl"))
    size = sum(log.stat().st_size for log in logs)
    print(f"{len(logs)} logs of {size / 1e9:.2f} GB, {os.cpu_count()} cores")
    command = [sys.executable, __file__, "--child", str(folder)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    reading, writing, memory = map(float, done.stdout.split())
    plain = rate_of_json(logs[0])
    print(
        f"imports {seconds - reading - writing:.1f} s, reading alone {reading:.1f} s, report "
        f"{writing:.1f} s; records are read at {size / reading / 1e6:.0f} MB/s, "
        f"{size / reading / plain:.1f}x as fast as json.loads alone ({plain / 1e6:.0f} MB/s)"
    )
    written = StudyPaths(folder).report.stat().st_size
    results = [
        kept("imports and report", seconds - reading, SECONDS_LIMIT, "s"),
        kept("peak memory", memory, MEMORY_LIMIT, "MB"),
        kept("size of the file", written / 1e6, SIZE_LIMIT, "MB"),
    ]
    return 0 if all(results) else 1


def render(folder: Path) -> None:
    """Print the seconds that reading takes, those of the whole report, and the peak memory."""
    start = time.perf_counter()
    read_study(folder)
    reading = time.perf_counter() - start
    start = time.perf_counter()
    write_report(folder)
    print(reading, time.perf_counter() - start, peak())


def main() -> int:
    """Run all of it and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", type=Path)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child:
        render(options.child)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.study or Path(temporary) / "large"
        if not StudyPaths(folder).study.exists():
            start = time.perf_counter()
            write_study(folder)
            print(f"records written in {time.perf_counter() - start:.0f} s")
        return measure(folder)


if __name__ == "__main__":
    sys.exit(main())
