"""The record of a probe on a model that no study describes: `probe.json` beside its metric log.

Leaves out the measurements themselves (`metric_log`) and the runs of studies (`manifest`).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stability.records.record_types import Count
from stability.records.sealed_json import read_record, write_sealed

__all__ = ["METRICS_FILE", "PROBE_FILE", "ProbeRecord", "read_probe_record", "write_probe_record"]

PROBE_FILE = "probe.json"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRecord:
    """One probe, in JSON values."""

    model: str
    """Its class, or the name or path it was loaded from."""
    primary: dict[str, Any]
    """What computes: the model's own attention, or what took its place."""
    shadows: dict[str, dict[str, Any]]
    """What each shadow is, by name, e.g. its numerics."""
    golden: bool
    layers: list[str]
    steps: Count
    """Updates or batches that the probe has seen."""
    environment: dict[str, Any]


def write_probe_record(folder: Path, record: ProbeRecord) -> None:
    """Write `record` into `folder`, whole or not at all, with its checksum."""
    write_sealed(folder / PROBE_FILE, asdict(record))


def read_probe_record(folder: Path) -> ProbeRecord:
    """Return the record in `folder`.

    ValueError, one line that names the file, if it is missing, damaged, or not made of a record's
    fields.
    """
    return read_record(folder / PROBE_FILE, ProbeRecord, writer="`stability probe`")
