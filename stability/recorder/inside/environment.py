"""What the process of a training tells of itself: versions, switches, threads, the user's sources.

The names are those of `records.identity`; what can be told from outside, as variables and the CPU,
is left to the command that started the training.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from functools import lru_cache
from typing import Any, Dict, Iterable, List, Mapping

import torch
from torch import Tensor

from .installed import driver_version, is_of_compiler

__all__ = ["changed_since", "environment", "hash_state", "own_files", "own_modules"]

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep
"""Where the recorder's own modules lie, whatever they are called here."""
_LARGEST = 2**26
"""Bytes of the largest source that is hashed."""


def environment(switches: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what decides the bits in this process, besides its command, as flat JSON values.

    `switches` are torch's, by name (`records.numeric_switches`).
    """
    found: Dict[str, Any] = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python_optimize": sys.flags.optimize,
        "platform": f"{platform.system()} {platform.machine()}",
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    if found["gpu"]:
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = torch.backends.cudnn.version()
        found["driver"] = driver_version()
    for name, version in _versions().items():
        found[f"package.{name}"] = version
    for name, value in switches.items():
        found[f"switch.{name}"] = value
    return found


def _versions() -> Dict[str, str]:
    """Return the version of each installed package that is imported."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if "." in name or name.startswith("_") or not _is_package(str(file)):
            continue
        version = vars(module).get("__version__")
        if isinstance(version, str):
            found[name] = version
    # a subclass of str in some versions
    return {**found, "torch": str(torch.__version__)}


def own_modules() -> Dict[str, str]:
    """Return the SHA-256 of each imported file that is no installed package's, by module name."""
    found = {}
    for name, file in own_files().items():
        with open(file, "rb") as content:
            found[name] = _sha256(content.read())
    return found


def own_files() -> Dict[str, str]:
    """Return each imported file that is no installed package's, by module name."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        # whether it is a file comes last: thousands of modules are installed, and few are not
        if not isinstance(file, str) or _is_installed(module) or not os.path.isfile(file):
            continue
        if _real(file).startswith(_OURS) or os.path.getsize(file) > _LARGEST:
            continue
        if is_of_compiler(_real(file)) or ("." in name and _is_made_by_package(name)):
            continue
        found["__main__" if name == "__mp_main__" else name] = _real(file)
    return dict(sorted(found.items()))


def changed_since(files: Iterable[str], begun: float) -> List[str]:
    """Return which of `files` were changed later than at `begun`, in seconds since the epoch.

    A source is executed when it is imported and hashed later: of one that is changed in between it
    is not known what was executed. A time of change can't be set, that of a content can.
    """
    found = []
    for file in files:
        try:
            if os.stat(file).st_ctime > begun:
                found.append(file)
        except OSError:  # taken away
            found.append(file)
    return sorted(set(found))


def _is_made_by_package(name: str) -> bool:
    """Whether an installed package has written a module elsewhere, as a compiler does."""
    top = sys.modules.get(name.partition(".")[0])
    file = getattr(top, "__dict__", {}).get("__file__")
    return isinstance(file, str) and _is_installed(top)


def _is_installed(module: Any) -> bool:
    file = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(file, str):
        return True
    return _is_package(file) or _real(file).startswith(_real(os.path.dirname(os.__file__)) + os.sep)


def _is_package(file: str) -> bool:
    # a project may keep its environment beside its sources, never its sources in an environment
    path = _real(file)
    return "site-packages" in path or "dist-packages" in path


def _real(file: str) -> str:
    return _resolved(file if os.path.isabs(file) else os.path.join(os.getcwd(), file))


@lru_cache(maxsize=None)
def _resolved(file: str) -> str:
    # kept: thousands of modules are asked for at each snapshot of what was imported
    return os.path.realpath(file)


def hash_state(state: Dict[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bits, as `records.snapshots` does."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        gather = getattr(tensor, "full_tensor", None)
        tensor = (gather() if gather else tensor).to("cpu", copy=True).contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # by its address: there may be no numpy
        size = tensor.numel() * tensor.element_size()
        digest.update(ctypes.string_at(tensor.data_ptr(), size) if size else b"")
    return digest.hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
