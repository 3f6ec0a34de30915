"""Time, memory and size of the report on a large study, in a fresh process.

    PYTHONPATH=.:kernels python benchmarks/report.py [--study FOLDER]

Writes the records of 20 arms x 5 seeds x 2,000 steps x 48 layers with the writers that runs use,
without training, and renders them. Seconds are those of the whole process, imports included, with
the records in the page cache; its CPU seconds stand beside them, as on a machine that others use
they say more. Memory is the peak resident set of the process and those it starts, together, looked
at 20 times a second. Exit code 1 if a limit is missed. Linux only. With `--study`, the records are
written there and kept, or used if they are there already.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stability.analysis.study_records import read_study
from stability.metrics.ulp import ULP_EDGES
from stability.records.events import Event, log_event
from stability.records.manifest import Manifest, environment, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import (
    BATCH_HASH,
    TRAIN_LOSS,
    ULP_HISTOGRAM,
    deviation_name,
    drift_name,
    watch_name,
)
from stability.records.metric_table import DRIFT_METRICS, LAYER_METRICS, WATCH_METRICS
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import file_checksum, write_sealed
from stability.report.page.html import write_page

STEPS, LAYERS, SEEDS = 2000, 48, 5
SECONDS_LIMIT, MEMORY_LIMIT, SIZE_LIMIT = 20.0, 1000.0, 15.0
SNAPSHOTS = sorted({round(STEPS ** (i / 39)) for i in range(40)} | {*range(50, STEPS + 1, 50)})
HISTOGRAM_EVERY = STEPS // 20
PARAMETERS = ("all", *(f"blocks.{i}.{name}.weight" for i in range(4) for name in ("qkv", "up")))
AXES = {"rerun": "none", "nudge": "nudge", "fp32": "precision"}
ARMS = ("baseline", *(f"flash_{i:02}" for i in range(16)), *AXES)
DEVIATION_NAMES = [
    deviation_name(f"layer_{layer}", "out", metric)
    for layer in range(LAYERS)
    for metric in LAYER_METRICS
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
    log.append(step, {watch_name(name): float(random.random()) for name in WATCH_METRICS})
    sizes = np.exp(0.2 * random.standard_normal((LAYERS, len(LAYER_METRICS))))
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process and those it started took: seconds on the wall, on the cores, and MB."""

    seconds: float
    cpu: float
    memory: float


def cost(*words: object) -> Cost:
    """Run this file in a fresh process and return what that took."""
    start, before, most = time.perf_counter(), cpu_of_children(), 0.0
    process = subprocess.Popen([sys.executable, __file__, *map(str, words)])
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Cost(time.perf_counter() - start, cpu_of_children() - before, most)


def cpu_of_children() -> float:
    """Return the CPU seconds of every process that has ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident(process: int) -> float:
    """Return the MB in memory of a process and of all below it; 0 once it has ended."""
    folder = Path("/proc") / str(process)
    try:
        status = (folder / "status").read_text(encoding="utf-8")
        below = [task.read_text().split() for task in folder.glob("task/*/children")]
    except OSError:
        return 0.0
    own = sum(int(kilobytes) * 1024 / 1e6 for kilobytes in re.findall(r"VmRSS:\s+(\d+)", status))
    return own + sum(resident(int(child)) for each in below for child in each)


def rate_of_json(log: Path) -> float:
    """Return the bytes a CPU second at which `json.loads` alone reads the lines of a log."""
    lines = log.read_bytes().splitlines()
    start = time.process_time()
    for line in lines:
        json.loads(line)
    return log.stat().st_size / (time.process_time() - start)


def kept(what: str, value: float, limit: float, unit: str, beside: str = "") -> bool:
    """Print a figure beside its limit and return whether it is kept."""
    mark = "ok" if value <= limit else "MISSED"
    print(f"{what:17} {value:7.1f} {unit:2}  (limit {limit:g} {unit}) {mark:6} {beside}")
    return value <= limit


def measure(folder: Path) -> int:
    """Render the study in `folder` and return the exit code."""
    logs = list(folder.glob("*/seed-*/metrics.jsonl"))
    size = sum(log.stat().st_size for log in logs)
    print(f"{len(logs)} logs of {size / 1e9:.2f} GB, {os.cpu_count()} cores")
    plain = rate_of_json(logs[0])
    imports, reading, report = (cost("--do", what, folder) for what in ("import", "read", "report"))
    rate = size / (reading.cpu - imports.cpu)
    print(
        f"read at {rate / 1e6:.0f} MB per CPU second, {rate / plain:.1f} times json.loads alone; "
        f"CPU seconds: imports {imports.cpu:.1f}, reading {reading.cpu - imports.cpu:.1f}, "
        f"charts and page {report.cpu - reading.cpu:.1f}"
    )
    written = StudyPaths(folder).report.stat().st_size
    results = [
        kept("report", report.seconds, SECONDS_LIMIT, "s", f"CPU {report.cpu:.1f} s"),
        kept("peak memory", report.memory, MEMORY_LIMIT, "MB"),
        kept("size of the file", written / 1e6, SIZE_LIMIT, "MB"),
    ]
    return 0 if all(results) else 1


def _write(folder: Path) -> Path:
    return write_page(read_study(folder), folder)


def main() -> int:
    """Run all of it and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", type=Path)
    parser.add_argument("--do", nargs=2)
    options = parser.parse_args()
    if options.do:
        what, folder = options.do
        {"import": Path, "read": read_study, "report": _write}[what](Path(folder))
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
