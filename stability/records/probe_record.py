"""What a probe of a model was: the file beside its metric log, for models that no study describes.

`<folder>/probe.json` and `<folder>/metrics.jsonl`. Leaves out the figures (`metric_log`) and runs
of studies (`manifest`).
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from stability.records.sealed_json import read_sealed, write_sealed

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
    steps: int
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
    path = folder / PROBE_FILE
    content = read_sealed(path, writer="`stability probe`")
    hints = get_type_hints(ProbeRecord)
    names = [field.name for field in fields(ProbeRecord)]
    odd = [name for name in content if name not in names] or [n for n in names if n not in content]
    if odd:
        raise ValueError(f"{path}: must have the keys {', '.join(names)}; look at {odd[0]!r}")
    for name in names:
        kind = get_origin(hints[name]) or hints[name]
        if not isinstance(content[name], kind):
            raise ValueError(
                f"{path}: {name} must be of type {kind.__name__}, is {content[name]!r}"
            )
    return ProbeRecord(**content)
