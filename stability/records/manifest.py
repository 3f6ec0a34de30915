"""A run's manifest: what it is, what it ran on, and how it went.

Leaves out the numbers of the run (`metric_log`) and whether two manifests make a pair
(`analysis.pair_contract`).
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from stability.records.paths import RunPaths
from stability.records.record_types import Count, Pair
from stability.records.sealed_json import read_record, write_sealed

__all__ = [
    "ENDED",
    "PATIENCE",
    "Manifest",
    "RecordedFork",
    "RunState",
    "has_ended",
    "read_manifest",
    "write_manifest",
]

RunState = Literal["running", "interrupted", "failed", "diverged", "finished"]
"""`diverged` is an end like `finished`: the loss stopped being a number, and that is the result."""

ENDED: tuple[RunState, ...] = ("finished", "diverged")
"""States of a run that is never trained again."""

PATIENCE = 5
"""Updates in a row with a loss that is not finite, which make a run a diverged one.

A single such loss may be that of a step which a loss scaler skips."""


class RecordedAttention(TypedDict, total=False):
    """What readers look for in the attention of a config that may be of another version."""

    implementation: str
    profile: str
    numerics: dict[str, Any]
    layers: list[str]
    direction: str


class RecordedConfig(TypedDict, total=False):
    """What readers look for in a config that may be of another version."""

    attention: RecordedAttention
    precision: str
    probe: dict[str, Any]


RecordedFork = TypedDict("RecordedFork", {"from": str, "at": Count, "until": Count}, total=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One run in JSON values. `diff` maps config paths to [baseline's value, this arm's value]."""

    study: str
    arm: str
    seed: Count
    axis: str
    config: RecordedConfig
    diff: dict[str, Pair]
    environment: dict[str, str | int | float | bool | None]
    """What else decides the bits (`identity`)."""
    resolved: dict[str, Any]
    """What `auto` became: the attention's engine and its numerics."""
    hashes: dict[str, str]
    """`config_less_axis`, `environment`, `init_weights` (before a nudge), `shared_weights` (of them
    those that no `qk_norm` adds), `text`, `held_out` (the batches that are evaluated, empty without
    any); at the end also `batches`, `final_weights` and `record` (`record_hash`)."""
    state: RunState
    step: Count
    """Updates made when the manifest was written."""
    message: str
    """Why the run failed or diverged; else empty."""
    observer: dict[str, Any] = field(default_factory=dict)
    """The observer gate's result, if it was asked for: `steps`, `equal` and the two hashes."""
    fork: RecordedFork = field(default_factory=RecordedFork)
    """Where the run goes on from, if it is a fork: `from` (the parent's folder, seen
    from this one), `at`, `until`."""
    until: Count = 0
    """The step at which the run is planned to stop; 0 in manifests of before arms had an end of
    their own, whose runs all go on to `config.train.steps`."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each whole file of the run, by its path in the run's folder."""
    dropped: dict[str, str] = field(default_factory=dict)
    """The same of files that the study's `keep` has dropped once the run had ended."""
    role: str = ""
    """What its arm was there for when the run began; empty in forks, and in manifests of before
    it was kept."""

    @property
    def all_files(self) -> dict[str, str]:
        """The SHA-256 of each file that the run had when it ended, by its path, dropped or not."""
        return {**self.dropped, **self.files}

    @property
    def is_awaited(self) -> bool:
        """Whether its start is not on record yet: a command tells it as it ends."""
        return self.state == "running" and "init_weights" not in self.hashes

    @property
    def ranks(self) -> int:
        """How many processes trained, as far as that is on record."""
        found = self.resolved.get("ranks")
        return found if isinstance(found, int) else 1


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest`, whole or not at all, with its checksum."""
    write_sealed(path, asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`.

    ValueError, one line that names the file, if it is missing, damaged, or not made of a manifest's
    fields.
    """
    return read_record(path, Manifest, writer="`stability run`", kind="manifest")


def has_ended(paths: RunPaths) -> bool:
    """Whether the run's records are complete: it reached its last step, or diverged."""
    return paths.manifest.exists() and read_manifest(paths.manifest).state in ENDED
