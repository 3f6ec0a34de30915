"""What is installed: which distribution a file belongs to, and whose version names its content.

A release on a package index never changes, so that the version of one that this package depends on
says what its files hold. Of anything else that is installed the version may stay while the files
change, as in a plug-in that its author works on: `module_sources` hashes those. Leaves out who has
edited a release in its place.
"""

import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attention_kernels

__all__ = ["DEPENDENCIES", "imported_packages", "is_installed", "is_known_by_version"]

DEPENDENCIES = (
    "accelerate",
    "codespell",
    "datasets",
    "flask",
    "flask-cors",
    "fsspec",
    "gfloat",
    "huggingface_hub",
    "hypothesis",
    "import-linter",
    "jinja2",
    "jsonargparse[signatures]",
    "liger-kernel",
    "lightning",
    "markupsafe",
    "matplotlib",
    "mkdocstrings-python",
    "ml_dtypes",
    "moto[s3]",
    "numba",
    "numpy",
    "orjson",
    "pillow",
    "plotly",
    "pyright[nodejs]",
    "pytest",
    "pytest-xdist",
    "pyyaml",
    "ray",
    "rich",
    "ruff",
    "s3fs",
    "safetensors",
    "scipy",
    "selenium",
    "setuptools",
    "starlette",
    "statsmodels",
    "submitit",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "wandb",
    "wandb-workspaces",
    "zensical",
)
"""What this package needs, with its extras; theirs are found in what is installed. Written down
here, since this package itself may run from its folder without being installed."""

_SHARED_LIBRARIES = ("nvidia-", "nvidia_", "intel-", "mkl", "onemkl", "rocm", "amd-")
"""Beginnings of the names of distributions whose libraries torch loads without importing them."""

_REQUIRED = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
"""A requirement: name, extras, marker."""

_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_SITE = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")
_START_UP = ("sitecustomize.py", "usercustomize.py")
"""What `site` imports before anything else, from wherever it lies."""


def imported_packages() -> dict[str, str]:
    """Return the version of each distribution that is imported, or whose libraries are loaded."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    found = {name for top in tops for name in _distributions().get(top, ())}
    every = {name for names in _distributions().values() for name in names}
    found |= {name for name in every if name.lower().startswith(_SHARED_LIBRARIES)}
    return {name: _version(name) for name in sorted(found)}


def is_known_by_version(file: str) -> bool:
    """Whether an absolute path is of Python, of this package or of what this package depends on."""
    if file.startswith(_own_folders()):
        return True
    inside = _inside_site(file)
    if inside is not None:
        # a finder of setuptools holds the folders of what is installed in place, which may be moved
        return inside in _known_tops() or inside.startswith("__editable___")
    return file.startswith(_python_folders()) and os.path.basename(file) not in _START_UP


def is_installed(file: str) -> bool:
    """Whether an absolute path lies where packages are installed, or is of Python itself."""
    return _inside_site(file) is not None or is_known_by_version(file)


def _inside_site(file: str) -> str | None:
    """Return the top-level name of what is installed at `file`; None if it lies elsewhere."""
    folder = next((folder for folder in _site_folders() if file.startswith(folder)), "")
    if not folder:
        # of another Python, e.g. the one that a virtual environment was made from
        found = _SITE.match(file)
        folder = found.group() if found else ""
    if not folder:
        return None
    return re.split(r"[\\/.]", file[len(folder) :], maxsplit=1)[0]


@functools.cache
def _known_tops() -> frozenset[str]:
    """Return the top-level names that belong to nothing but what this package depends on."""
    known = _closure()
    return frozenset(
        top
        for top, names in _distributions().items()
        if all(_normalised(name) in known for name in names)
    )


@functools.cache
def _closure() -> frozenset[str]:
    """Return the normalised names of `DEPENDENCIES` and of all that they require in turn."""
    found: set[tuple[str, str]] = set()
    waiting = [each for required in DEPENDENCIES for each in _named(required)]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.add(each)
        name, extra = each
        for required in _requires(name):
            match = _REQUIRED.match(required)
            asked = _EXTRA.search(match[3] or "") if match else None
            # what an extra needs that nobody asks for is not there by our doing: it is hashed
            if asked is None or _normalised(asked[1]) == extra:
                waiting += _named(required)
    return frozenset(name for name, _ in found)


def _named(required: str) -> list[tuple[str, str]]:
    """Return the normalised name of a requirement, with "" and with each extra that it asks for."""
    match = _REQUIRED.match(required)
    if match is None:
        return []
    extras = [_normalised(extra.strip()) for extra in (match[2] or "").split(",")]
    return [(_normalised(match[1]), extra) for extra in {"", *extras}]


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    # a third of a second, once a process; the server of fresh processes has done it for all
    return metadata.packages_distributions()


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of this package and of the attention library, with a slash each."""
    return _with_slash([str(Path(__file__).parents[1]), *attention_kernels.__path__])


@functools.cache
def _python_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return _with_slash([paths[name] for name in ("stdlib", "platstdlib", "scripts")])


@functools.cache
def _site_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"]]
    return _with_slash([*folders, *site.getsitepackages(), site.getusersitepackages()])


def _with_slash(folders: list[str]) -> tuple[str, ...]:
    real = [os.path.realpath(folder) for folder in folders]
    return tuple(sorted({os.path.join(folder, "") for folder in [*folders, *real]}))
