"""A run's manifest: what it is, what it ran on, and how it went.

Leaves out the numbers of the run (`metric_log`) and whether two manifests make a pair
(`study.contract`).
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import attention_kernels
import torch

from stability.records.atomic import write_text

__all__ = ["Manifest", "RunState", "environment", "read_manifest", "write_manifest"]

RunState = Literal["running", "interrupted", "failed", "finished"]

_PACKAGES = ("datasets", "lightning", "numpy", "torch", "triton")
"""Packages whose version can change the bits of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One run. `diff` maps config paths to [baseline's value, this arm's value]."""

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
    """`init_weights` (before a nudge), `text`; at the end also `batches`, `final_weights`."""
    state: RunState
    step: int
    """Updates made when the manifest was written."""
    message: str
    """Why the run failed; else empty."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest`, whole or not at all."""
    write_text(path, json.dumps(asdict(manifest), indent=2) + "\n")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`.

    ValueError, naming the file, if it is missing, no JSON, or has other fields than a manifest.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such manifest") from error
    except ValueError as error:
        raise ValueError(f"{path}: must be a JSON object: {error}") from error
    names = {field.name for field in fields(Manifest)}
    if not isinstance(content, dict) or set(content) != names:
        odd = sorted(names.symmetric_difference(content)) if isinstance(content, dict) else content
        raise ValueError(f"{path}: fields missing or unknown: {odd}")
    if content["state"] not in get_args(RunState):
        raise ValueError(f"{path}: state must be {get_args(RunState)}, is {content['state']!r}")
    return Manifest(**content)


def environment() -> dict[str, Any]:
    """Return what the bits of a run may depend on besides its config, as JSON values.

    `kernel_source` is the SHA-256 of the attention library's files.
    """
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "kernel_source": _kernel_source(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _kernel_source() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(str(attention_kernels.__file__)).parent.glob("*.py")):
        digest.update(f"{path.name}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()
