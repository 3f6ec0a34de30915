"""Time, memory and size of the report on a large study, and of the dashboard on many small ones.

    PYTHONPATH=.:kernels python benchmarks/report.py [--study FOLDER | --dashboard]

Writes the records of 20 arms x 5 seeds x 2,000 steps x 48 layers with the writers that runs use,
without training, and renders them. Seconds are those of the whole process, imports included, with
the records in the page cache; its CPU seconds stand beside them, as on a machine that others use
they say more. Memory is the peak resident set of the process and those it starts, together, looked
at 20 times a second. Exit code 1 if a limit is missed. Linux only. With `--study`, the records are
written there and kept, or used if they are there already.

With `--dashboard`, the list of 60 small studies (600 runs) is timed instead, and what a page that
is open costs every other second: the look for records that have changed.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
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
from stability.records.identity import environment
from stability.records.manifest import Manifest, write_manifest
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
from stability.report.live.served_pages import ServedPages
from stability.report.page.html import write_page

SECONDS_LIMIT, MEMORY_LIMIT, SIZE_LIMIT = 20.0, 1000.0, 15.0
STUDIES, STAMP_LIMIT, LIST_LIMIT = 60, 50.0, 3.0
PARAMETERS = ("all", *(f"blocks.{i}.{name}.weight" for i in range(4) for name in ("qkv", "up")))
AXES = {"rerun": "none", "nudge": "nudge", "fp32": "precision"}


@dataclass(frozen=True, slots=True)
class Size:
    """How much a study holds."""

    steps: int
    layers: int
    seeds: int
    arms: tuple[str, ...]

    @property
    def snapshots(self) -> list[int]:
        """The steps of its snapshots: dense at first, then every 50th."""
        first = {round(self.steps ** (i / 39)) for i in range(40)}
        return sorted(first | {*range(50, self.steps + 1, 50)})

    @property
    def deviation_names(self) -> list[str]:
        """The names of what is logged of each layer."""
        layers = [f"layer_{layer}" for layer in range(self.layers)]
        return [deviation_name(each, "out", name) for each in layers for name in LAYER_METRICS]


LARGE = Size(2000, 48, 5, ("baseline", *(f"flash_{i:02}" for i in range(16)), *AXES))
SMALL = Size(60, 5, 2, ("baseline", "flash_00", "flash_01", "nudge", "fp32"))


def describe(arm: str) -> dict[str, object]:
    """Return what study.json says of an arm."""
    axis = AXES.get(arm, "none" if arm == "baseline" else "attention")
    path = {"attention": "attention.profile", "nudge": "nudge.ulps", "precision": "precision"}
    return {"name": arm, "axis": axis, "diff": {path[axis]: ["", arm]} if axis in path else {}}


def write_study(folder: Path, size: Size) -> None:
    """Write the records of a whole study."""
    config = {
        "name": folder.name,
        "question": "How long does a large report take?",
        "base": {"train": {"steps": size.steps, "snapshot_steps": size.snapshots}},
        "seeds": list(range(size.seeds)),
        "yardstick": "fp32",
        "early_step": 20,
    }
    arms = [describe(arm) for arm in size.arms]
    folder.mkdir(parents=True, exist_ok=True)
    around = environment()
    for index, arm in enumerate(arms):
        for seed in range(size.seeds):
            write_run(folder, arm, np.random.default_rng([index, seed]), seed, around, size)
    write_sealed(StudyPaths(folder).study, {"config": config, "arms": arms})


def write_run(
    folder: Path,
    arm: dict[str, object],
    random: np.random.Generator,
    seed: int,
    around: dict[str, object],
    size: Size,
) -> None:
    """Write the log and the manifest of one finished run."""
    paths = RunPaths.for_run(folder, str(arm["name"]), seed)
    log = MetricLog(paths.metrics)
    snapshots = size.snapshots
    for step in range(size.steps):
        write_step(log, step, random, size)
        if step in snapshots and arm["name"] != "baseline":
            log.append(step, drifts(step, random))
    end = drifts(size.steps, random) if arm["name"] != "baseline" else {"watch/end": 1.0}
    log.append(size.steps, end)
    for step in (size.steps // 3, size.steps // 2):
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
        step=size.steps,
        message="",
        files={paths.metrics.name: file_checksum(paths.metrics)},
    )
    write_manifest(paths.manifest, manifest)


def write_step(log: MetricLog, step: int, random: np.random.Generator, size: Size) -> None:
    """Write what a run logs at each step: the loss, the batch, what is watched, each layer."""
    log.append(step, {TRAIN_LOSS: 2 + 3 * math.exp(-step / 300) + 0.05 * random.standard_normal()})
    log.append(step, {}, **{BATCH_HASH: random.bytes(32).hex()})
    log.append(step, {watch_name(name): float(random.random()) for name in WATCH_METRICS})
    sizes = np.exp(0.2 * random.standard_normal((size.layers, len(LAYER_METRICS))))
    signed = 0.02 * random.standard_normal()
    typical = {
        "error_ratio": 0.9,
        "gain": 1e-2 * signed,
        "golden_bias_ulp": signed,
        "rel_fro": 3e-3,
        "bias_ulp": signed,
    }
    values = sizes * [typical[name] for name in LAYER_METRICS]
    log.append(step, dict(zip(size.deviation_names, values.ravel().tolist(), strict=True)))
    if step % (size.steps // 20) == 0:
        counts = random.integers(0, 2**20, (size.layers, len(ULP_EDGES) + 1)).tolist()
        names = [deviation_name(f"layer_{i}", "out", ULP_HISTOGRAM) for i in range(size.layers)]
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


def measure_dashboard(folder: Path) -> int:
    """Time the list of the studies in `folder`, in this process, and return the exit code."""
    with tempfile.TemporaryDirectory() as store:
        pages = ServedPages(folder, Path(store))
        states = seconds_until(pages, "records are being read")
        numbers = states + seconds_until(pages, "being read")
        again = seconds_until(ServedPages(folder, Path(store)), "being read")
    looks = []
    for _ in range(20):
        start = time.perf_counter()
        pages.index_stamp()
        looks.append(1000 * (time.perf_counter() - start))
    results = [
        kept("stamp", sorted(looks)[10], STAMP_LIMIT, "ms", f"at most {max(looks):.0f} ms"),
        kept("states of all", states, LIST_LIMIT, "s"),
        kept("every number", numbers, LIST_LIMIT, "s"),
        kept("next dashboard", again, LIST_LIMIT, "s", "every number"),
    ]
    return 0 if all(results) else 1


def seconds_until(pages: ServedPages, gone: str) -> float:
    """Return how long it takes until the list no longer says `gone`."""
    start = time.perf_counter()
    while gone in pages.index():
        pass
    return time.perf_counter() - start


def write_studies(folder: Path) -> None:
    """Write one small study, and the others as hard links to its records."""
    first = folder / "study-00"
    write_study(first, SMALL)
    for i in range(1, STUDIES):
        shutil.copytree(first, folder / f"study-{i:02}", copy_function=os.link)


def _write(folder: Path) -> Path:
    return write_page(read_study(folder), folder)


def main() -> int:
    """Run all of it and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", type=Path)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("--do", nargs=2)
    options = parser.parse_args()
    if options.do:
        what, folder = options.do
        {"import": Path, "read": read_study, "report": _write}[what](Path(folder))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        if options.dashboard:
            write_studies(Path(temporary))
            return measure_dashboard(Path(temporary))
        folder = options.study or Path(temporary) / "large"
        if not StudyPaths(folder).study.exists():
            start = time.perf_counter()
            write_study(folder, LARGE)
            print(f"records written in {time.perf_counter() - start:.0f} s")
        return measure(folder)


if __name__ == "__main__":
    sys.exit(main())
