"""The sealed protocol of a study, `runs/<study>/protocol.json`: what its verdict will rest on.

It is written before the first run and never again, so a limit that was moved, or an arm that was
added, after results were there can be told. Each run's manifest keeps the hash of the protocol that
it was trained under; a file that was deleted and made anew, or edited with its checksum, has
another one. Leaves out what goes into a protocol and the comparison with what is asked now
(`analysis.protocol_check`).
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from stability.records import file_operations
from stability.records.atomic_files import naming, remove, temporary_name
from stability.records.paths import StudyPaths, is_run, list_runs
from stability.records.record_types import Count, Pair
from stability.records.sealed_json import file_checksum, read_record, write_sealed

__all__ = [
    "LEAVES_OUT",
    "Protocol",
    "has_begun",
    "leaves_out",
    "protocol_hash",
    "read_protocol",
    "seal_protocol",
]

LEAVES_OUT = "noise"
"""The key of `window` that a protocol lacks if its study leaves no values out."""


class SealedArm(TypedDict):
    """What is fixed of an arm."""

    role: str
    until: Count
    diff: dict[str, Pair]
    """Config path -> [baseline's value, the arm's]."""
    probe: NotRequired[dict[str, Any]]
    """Decides what is seen of the arm; older protocols do not hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """A study's plan in JSON values."""

    study: str
    policy: dict[str, Any]
    """Candidates, limits, margins and the error rate, by name."""
    arms: dict[str, SealedArm]
    """By name."""
    window: dict[str, Any]
    """How the judged step is chosen: `step` (0: by the rule), the rule's `limit`, the
    updates of `settling` that it passes over, the `steps` that it chooses from, and
    the limits by which values that noise moves are left out (`LEAVES_OUT`)."""
    looks: list[Count]
    """The numbers of seeds at which the study may be judged."""
    seeds: list[Count]
    """The seeds that were asked for, in the order in which they count."""
    base: dict[str, Any]
    """The baseline's config, the held-out text included."""


def has_begun(folder: Path) -> bool:
    """Whether any run of the study in `folder` has been started."""
    return any(is_run(run.root) for run in list_runs(folder))


def seal_protocol(folder: Path, protocol: Protocol) -> Protocol | None:
    """Write the study's protocol unless there is one, and return the one that holds.

    None where runs have begun without one: what is written then seals nothing, so nothing is. Of
    two processes that begin a study at once, the first to write decides for both. ValueError if the
    file that is there is damaged.
    """
    path = StudyPaths(folder).protocol
    if not path.exists() and not has_begun(folder):
        _write_first(path, protocol)
    return read_protocol(path) if path.exists() else None


def read_protocol(path: Path) -> Protocol:
    """Return the protocol at `path`; ValueError, which names the file, if it is not whole."""
    return read_record(path, Protocol, writer="`stability run`", kind="protocol")


def leaves_out(folder: Path) -> bool:
    """Whether the study in `folder` leaves values out: unless it was sealed before any were."""
    path = StudyPaths(folder).protocol
    try:
        return not path.exists() or LEAVES_OUT in read_protocol(path).window
    except ValueError:  # damaged: what follows is exploratory, and says so
        return True


def protocol_hash(folder: Path) -> str:
    """Return what a manifest keeps of the study's protocol; empty if there is none."""
    path = StudyPaths(folder).protocol
    return file_checksum(path) if path.exists() else ""


def _write_first(path: Path, protocol: Protocol) -> None:
    """Write the file unless another process has done so meanwhile: that one's is kept."""
    draft = temporary_name(path)
    content: Mapping[str, Any] = asdict(protocol)
    try:
        write_sealed(draft, content)
        # a link, unlike a rename, fails where the name is taken
        with naming(path), contextlib.suppress(FileExistsError):
            file_operations.link(draft, path)
    finally:
        remove(draft)
    with naming(path):
        # before any run begins: a study with runs and no protocol counts as one never sealed
        file_operations.sync(path.parent)
