"""The record of a probe on a model that no study describes: `probe.json` beside its metric log.

Once the probe has ended, the record holds the length and the SHA-256 of its log, so that a log that
has lost its end is not read as that of a shorter probe. Leaves out the measurements themselves
(`metric_log`) and the runs of studies (`manifest`).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from stability.records.record_types import Count
from stability.records.sealed_json import read_record, write_sealed

__all__ = [
    "METRICS_FILE",
    "PROBE_FILE",
    "ProbeRecord",
    "SealedLog",
    "check_probe_log",
    "rank_folder",
    "read_probe_record",
    "write_probe_record",
]

PROBE_FILE = "probe.json"
METRICS_FILE = "metrics.jsonl"


class SealedLog(TypedDict):
    """A metric log that nobody appends to any more."""

    bytes: Count
    sha256: str


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
    state: Literal["", "running", "ended"] = ""
    """Whether the probe has closed its log; empty in records of an older version."""
    log: SealedLog | None = None
    """The log as it was when the probe ended."""
    rank: Count = 0
    ranks: Count = 1
    """How many processes train the model together; each has a record of its own."""


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank's record lies: that of the first in `folder`, the others' inside it."""
    return folder / f"rank-{rank}" if rank else folder


def write_probe_record(folder: Path, record: ProbeRecord) -> None:
    """Write `record` into `folder`, whole or not at all, with its checksum."""
    write_sealed(folder / PROBE_FILE, asdict(record))


def read_probe_record(folder: Path) -> ProbeRecord:
    """Return the record in `folder`.

    ValueError, one line that names the file, if it is missing, damaged, or not made of a record's
    fields.
    """
    return read_record(folder / PROBE_FILE, ProbeRecord, writer="`stability probe`")


def check_probe_log(folder: Path, record: ProbeRecord) -> None:
    """ValueError, which names the file, if the log is not the one that an ended probe has closed.

    Nothing is known of the log of a probe that has not ended, or of an older version's.
    """
    if record.state != "ended":
        return
    from stability.records.metric_log import difference_from  # heavy: numpy

    if record.log is None:
        raise ValueError(f"{folder / PROBE_FILE}: must say which log an ended probe has closed")
    log = folder / METRICS_FILE
    wrong = difference_from(log, record.log["bytes"], record.log["sha256"], is_whole=True)
    if wrong:
        raise ValueError(f"{log}: {wrong}")
