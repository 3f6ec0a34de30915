"""A run's manifest: what it is, what it ran on, and how it went.

Leaves out the numbers of the run (`metric_log`) and whether two manifests make a pair
(`analysis.pair_contract`).
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import attention_kernels
from stability.records.sealed_json import read_record, write_sealed

__all__ = [
    "ENDED",
    "Manifest",
    "RunState",
    "environment",
    "hash_environment",
    "read_manifest",
    "write_manifest",
]

RunState = Literal["running", "interrupted", "failed", "diverged", "finished"]
"""`diverged` is an end like `finished`: the loss stopped being a number, and that is the result."""

ENDED: tuple[RunState, ...] = ("finished", "diverged")
"""States of a run that is never trained again."""

_PACKAGES = ("datasets", "lightning", "numpy", "torch", "triton")
"""Packages whose version can change the bits of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One run in JSON values. `diff` maps config paths to [baseline's value, this arm's value]."""

    study: str
    arm: str
    seed: int
    axis: str
    config: dict[str, Any]
    diff: dict[str, list[Any]]
    environment: dict[str, Any]
    resolved: dict[str, Any]
    """What `auto` became: the attention's engine and its numerics."""
    hashes: dict[str, str]
    """`config_less_axis`, `environment`, `init_weights` (before a nudge), `text`, `held_out` (the
    batches that are evaluated, empty without any); at the end also `batches`, `final_weights`."""
    state: RunState
    step: int
    """Updates made when the manifest was written."""
    message: str
    """Why the run failed or diverged; else empty."""
    observer: dict[str, Any] = field(default_factory=dict)
    """The observer gate's result, if it was asked for: `steps`, `equal` and the two hashes."""
    fork: dict[str, Any] = field(default_factory=dict)
    """Where the run goes on from, if it is a fork: `from` (the parent's folder, seen
    from this one), `at`, `until`."""
    until: int = 0
    """The step at which the run is planned to stop; 0 in manifests of before arms had an end of
    their own, whose runs all go on to `config.train.steps`."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each whole file of the run, by its path in the run's folder."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest`, whole or not at all, with its checksum."""
    write_sealed(path, asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`.

    ValueError, one line that names the file, if it is missing, damaged, or not made of a manifest's
    fields.
    """
    return read_record(path, Manifest, writer="`stability run`", kind="manifest")


def environment() -> dict[str, Any]:
    """Return what the bits of a run may depend on besides its config, as JSON values.

    `simd` is the widest instruction set that torch uses; `kernel_source` is the SHA-256 of the
    attention library's files. Versions come from package metadata: nothing is imported for them.
    """
    import torch  # heavy, and readers of a manifest need none of it

    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "kernel_source": _kernel_source(),
    }


def hash_environment(environment: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an environment: equal in two runs that may be a pair."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _kernel_source() -> str:
    digest = hashlib.sha256()
    folder = Path(str(attention_kernels.__file__)).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()
