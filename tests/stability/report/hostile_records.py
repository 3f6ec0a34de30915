"""Studies and probes in whose records every text that a reader accepts has been replaced.

What is accepted is found out by trying: each text in each sealed file, and a new key in each
object. Leaves out what the texts are (`test_hostile_names`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stability.analysis.study_records import read_study
from stability.metrics.ulp import ULP_EDGES
from stability.records.events import Event, log_event
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import (
    ULP_HISTOGRAM,
    deviation_name,
    drift_name,
    head_part,
    watch_name,
)
from stability.records.paths import RunPaths, StudyPaths
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    read_probe_record,
    write_probe_record,
)
from stability.records.sealed_json import read_sealed, write_sealed
from tests.stability.report.synthetic import ARMS, CONFIG, write_run, write_study_json
from tests.stability.report.synthetic_probe import write_probe

__all__ = ["ODD_ARM", "write_hostile_probe", "write_hostile_study"]

ODD_ARM = "__proto__"
"""Names of arms are letters, digits and a few signs; this one means something to JavaScript."""
TRIED = "</script><img src=\"x\" onerror='a'>&amp;"
"""What a reader refuses of this, it refuses of any hostile text."""

METRICS = ("rel_fro", "error_ratio")

Place = tuple[str | int, ...]

STEPS = 50
"""Of the study's runs."""


def write_hostile_study(folder: Path, *texts: str) -> Path:
    """Write a study of three arms that says `texts`, in turn, wherever it can; return `folder`."""
    _write_plain_study(folder)
    for path, places in _study_places().items():
        _plant_all(folder / path, places, texts)
    for run in folder.glob("*/seed-*"):
        _log(MetricLog(RunPaths(run).metrics), texts)
    return folder


def write_hostile_probe(folder: Path, *texts: str) -> Path:
    """Write a probe that says `texts`, in turn, wherever it can; return `folder`."""
    write_probe(folder, layers=2, heads=2)
    # one that has not ended: what is logged below would else not be the log that it has closed
    write_probe_record(folder, replace(read_probe_record(folder), state="running", log=None))
    path = folder / PROBE_FILE
    _plant_all(path, _accepted(path, lambda: read_probe_record(folder)), texts)
    _log(MetricLog(folder / METRICS_FILE), texts)
    return folder


@cache
def _study_places() -> dict[str, list[Place]]:
    """Return the places of a study's files, each a path below the study's folder."""
    with TemporaryDirectory() as folder:
        study = _write_plain_study(Path(folder))

        def read() -> None:
            runs = [run for arm in read_study(study).arms for run in arm.runs.values()]
            errors = [run.error or run.breach for run in runs]
            if any(errors):
                raise ValueError(errors)

        files = [StudyPaths(study).study, *study.glob("*/seed-*/manifest.json")]
        return {str(path.relative_to(study)): _accepted(path, read) for path in files}


def _accepted(path: Path, read: Callable[[], object]) -> list[Place]:
    """Return the places of a sealed file whose texts can be anything, as `read` accepts them."""
    original, found = read_sealed(path, ""), []
    for place in _places(original):
        tried = read_sealed(path, "")
        _plant(tried, place, TRIED)
        write_sealed(path, tried)
        try:
            read()
            found.append(place)
        except ValueError:
            pass  # refused: no such text gets any further
        write_sealed(path, original)
    return found


def _places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Give the place of each text, and of a new key in each object, the deepest first."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inside:
        if isinstance(item, str):
            yield (*here, key)
        elif isinstance(item, dict | list):
            yield from _places(item, (*here, key))
    if isinstance(value, dict):
        yield (*here, TRIED)


def _plant_all(path: Path, places: Sequence[Place], texts: Sequence[str]) -> None:
    content = read_sealed(path, "")
    for place, text in zip(places, cycle(texts), strict=False):
        _plant(content, place, text)
    write_sealed(path, content)


def _plant(content: Any, place: Place, text: str) -> None:
    *way, last = place
    for key in way:
        content = content[key]
    changes_a_value = "diff" in way[-1:]
    key = text if last == TRIED else last
    content[key] = [text, text] if changes_a_value else text


def _write_plain_study(folder: Path) -> Path:
    """Write three short runs: the baseline, one under an odd name, and one that failed."""
    arms = [ARMS[0], {**ARMS[2], "name": ODD_ARM}, ARMS[5]]
    train = {**CONFIG["base"]["train"], "steps": STEPS, "snapshot_steps": [20]}
    base = {**CONFIG["base"], "train": train}
    write_study_json(folder, seeds=[0], base=base, policy={"candidates": [ODD_ARM]})
    study = StudyPaths(folder).study
    write_sealed(study, {**read_sealed(study, ""), "arms": arms})
    write_run(folder, ARMS[0], 0, until=STEPS)
    write_run(folder, ARMS[2], 0, until=STEPS).root.parent.rename(folder / ODD_ARM)
    odd = RunPaths.for_run(folder, ODD_ARM, 0).manifest
    write_manifest(odd, replace(read_manifest(odd), arm=ODD_ARM))
    write_run(folder, ARMS[5], 0, state="failed", until=STEPS)
    return folder


def _log(log: MetricLog, texts: Sequence[str]) -> None:
    """Log measurements and events whose layer, parameter, shadow or own name is one of `texts`."""
    for step, text in product((20, 40), texts):
        values = {drift_name(text, "rel_l2"): 1e-3, watch_name(text): 2.0}
        values |= {watch_name(name, layer=text): 3.0 for name in ("max_logit", text)}
        for shadow, what, part, metric in product(
            ("", text), ("out", "dq", "carried", "total"), ("", head_part(0)), METRICS
        ):
            name = deviation_name(text, what, metric, shadow=shadow, part=part)
            # the worst of all error ratios, since that is what a page opens on
            values[name] = 9.0 if metric == "error_ratio" else 2e-3
        counts = [1] * (len(ULP_EDGES) + 1)
        log.append(step, values, {deviation_name(text, "out", ULP_HISTOGRAM): counts})
        log_event(log, Event(step, "finding", text, text))
    log.close()
