"""Hashes of the code that no source of the user's tells of: installed packages, loaded libraries.

A package's version may stay while its files change, as of a kernel that is built again. Each entry
has the version and a hash of the RECORD that its installer wrote, and of those loaded libraries
that are no longer what RECORD says. A library that no RECORD names, as one that `torch.ops` or
`ctypes` has loaded, is hashed itself, on Linux. Leaves out sources that are edited where they were
installed, and torch's, NumPy's, the GPU driver's and the system's own libraries, which their
versions name.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
from typing import Dict, Iterator, List, Set, Tuple

__all__ = [
    "driver_version",
    "installed_code",
    "is_of_compiler",
    "loaded_libraries",
    "own_libraries",
]

_MAPS = "/proc/self/maps"
_LARGEST = 2**28
"""Bytes of the largest library that is hashed."""
_SITE = re.compile(r"(.*/(?:site|dist)-packages)/(.+)")
_FIRST = re.compile(rb'(?m)^"?([^/.,\n]+)')
_BY_VERSION = {"torch", "torchgen", "functorch", "nvidia", "triton", "numpy", "scipy"}
"""Packages whose libraries, of up to a GB, are not read again: their RECORD stands for them."""
_OF_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/local/cuda", "/nix/store/")
_DRIVER = re.compile(r"/libcuda\.so\.(\d+(?:\.\d+)+)$")
"""The library through which CUDA calls a GPU's driver; its name ends in the driver's version."""
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where compilers keep what they make of sources that are known, or else in these folders."""
_COMPILED = ("/torchinductor_", "/.triton/")
_BY_HASH = re.compile(r"/(?:c[a-z2-7]{51}[^/]*|(?:[A-Z2-7]{52}|[0-9a-f]{64}|[\w-]{43})/[^/]+)$")
"""How Inductor calls a file there, and Triton 2 and 3 a folder: the user's own may lie beside."""
_OF_INSTALLER = (b"../", b"/", b"__editable__")
"""How lines of a RECORD begin that tell where a package was installed, and not of its code."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep


def installed_code() -> Tuple[Dict[str, str], List[str]]:
    """Return entries of an environment, `code.PACKAGE` and `library.PATH`, and doubts in words."""
    found: Dict[str, str] = {}
    recorded: Dict[str, Tuple[str, str]] = {}  # by path: its hash by RECORD, its package's entry
    for root, modules in sorted(_imported().items()):
        distributions = _distributions(root)
        for top, files in sorted(modules.items()):
            own = [x for x in distributions if top in x[1]]
            found[f"code.{top}"] = " ".join(_named(x) for x in own) or _hash_of_sources(files)
            for _, _, lines in own:
                for path, sha256 in _libraries_of(lines):
                    where = os.path.join(os.path.realpath(root), path)
                    recorded[where] = sha256, f"code.{top}"
    doubts = []
    for path in loaded_libraries():
        if _is_by_version(path):
            continue
        sha256, why = _hash_of_library(path)
        if why:
            doubts.append(f"the same code of {path}, a library that {why}")
            continue
        said, package = recorded.get(path, ("", ""))
        if package and said != sha256:
            found[package] += f" but {os.path.basename(path)} {sha256}"
        elif not package:
            found[f"library.{_name_of(path)}"] = sha256
    return found, doubts


def loaded_libraries() -> List[str]:
    """Return the paths of the shared libraries in this process that are not the system's; sorted.

    None where the system does not tell, as it does on Linux alone.
    """
    paths = _mapped()
    driver = _driver_in(paths)
    # which of its libraries a driver loads depends on what it has compiled and kept already
    kept = (path for path in paths if not driver or not path.endswith(f".so.{driver}"))
    return sorted(path for path in kept if not _is_of_system(path))


def driver_version() -> str:
    """Return the version of the GPU's driver in this process; "" where none is loaded."""
    return _driver_in(_mapped())


def own_libraries() -> List[str]:
    """Return the paths of those that are no installed package's: a project may hold those, too."""
    return [path for path in loaded_libraries() if not _SITE.match(path)]


def is_of_compiler(path: str) -> bool:
    """Whether a file lies in a cache of Inductor or Triton: its source is known."""
    caches = tuple(os.path.realpath(x) + os.sep for x in map(os.environ.get, _CACHES) if x)
    is_there = any(part in path for part in _COMPILED) or path.startswith(caches)
    return is_there and _BY_HASH.search(path) is not None


def _mapped() -> Set[str]:
    try:
        with open(_MAPS, encoding="utf-8", errors="replace") as lines:
            return {line.rstrip("\n").split(None, 5)[5] for line in lines if ".so" in line}
    except (OSError, IndexError):
        return set()


def _driver_in(paths: Set[str]) -> str:
    found = (_DRIVER.search(path) for path in sorted(paths))
    return next((each[1] for each in found if each), "")


def _is_of_system(path: str) -> bool:
    name = os.path.basename(path)
    if ".so" not in name or name.startswith("libpython") or path.startswith(("/memfd:", "/dev/")):
        return True
    if is_of_compiler(path):
        return True
    if _SITE.match(path):
        return False
    of_python = [os.path.dirname(os.path.realpath(os.__file__)) + os.sep]
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        of_python.append(os.path.join(os.path.realpath(sys.prefix), "lib", ""))
    return path.startswith((*_OF_SYSTEM, *of_python))


def _is_by_version(path: str) -> bool:
    inside = _SITE.match(path)
    return inside is not None and re.split(r"[/.]", inside[2])[0] in _BY_VERSION


def _name_of(path: str) -> str:
    inside = _SITE.match(path)  # an environment may be made again elsewhere
    return inside[2] if inside else path


def _imported() -> Dict[str, Dict[str, List[str]]]:
    """Return the files of each imported package, by the folder in which it is installed."""
    found: Dict[str, Dict[str, List[str]]] = {}
    for module in list(sys.modules.values()):
        # not getattr: a module that imports lazily would answer by importing
        file = getattr(module, "__dict__", {}).get("__file__")
        path = file if isinstance(file, str) else ""
        inside = _SITE.match(path)
        if inside and not path.startswith(_OURS):
            # its folder's name: a package may make modules of other names
            top = re.split(r"[/.]", inside[2])[0]
            if not top.startswith("__editable__"):
                found.setdefault(inside[1], {}).setdefault(top, []).append(path)
    return found


def _distributions(root: str) -> List[Tuple[str, Set[str], List[bytes]]]:
    """Return the version, the top-level names and the lines of RECORD of what is installed."""
    found = []
    try:
        folders = sorted(os.listdir(root))
    except OSError:  # inside of a zip, or gone since
        return found
    for folder in folders:
        try:
            if not folder.endswith(".dist-info"):
                continue
            with open(os.path.join(root, folder, "RECORD"), "rb") as record:
                content = record.read()
        except OSError:
            continue
        tops = {top.decode(errors="replace") for top in _FIRST.findall(content)}
        version = folder[: -len(".dist-info")].rpartition("-")[2]
        found.append((version, tops, content.splitlines()))
    return found


def _named(distribution: Tuple[str, Set[str], List[bytes]]) -> str:
    version, _, lines = distribution
    hashed = (x for x in lines if b",sha256=" in x and b".dist-info/" not in x)
    kept = sorted(x for x in hashed if not x.startswith(_OF_INSTALLER))
    return f"{version} {hashlib.sha256(b'|'.join(kept)).hexdigest()}"


def _libraries_of(lines: List[bytes]) -> Iterator[Tuple[str, str]]:
    for line in lines:
        if b".so" in line and b",sha256=" in line:
            path, _, rest = line.decode(errors="replace").partition(",sha256=")
            digest = rest.partition(",")[0]
            yield path.strip('"'), base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()


def _hash_of_sources(files: List[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        if file.endswith(".py") and os.path.isfile(file):
            digest.update(f"{_name_of(file)}\0".encode())
            digest.update(_hash_of(file).encode())
    return f"unversioned {digest.hexdigest()}"


def _hash_of_library(path: str) -> Tuple[str, str]:
    """Return a library's hash, and why it has none, if it has none."""
    if path.endswith(" (deleted)"):
        return "", "was replaced while the process ran"
    try:
        size = os.path.getsize(path)
        if size > _LARGEST:
            return "", f"has {size >> 20} MiB, and up to {_LARGEST >> 20} are hashed"
        return _hash_of(path), ""
    except OSError:
        return "", "can't be read"


def _hash_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as content:
        for part in iter(lambda: content.read(2**20), b""):
            digest.update(part)
    return digest.hexdigest()
