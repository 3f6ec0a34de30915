"""What two runs' environments may differ in: the modules of what only one of them computes with.

All other entries must be equal (`records.identity`), a package's version where both have it. A
module of the user's own that only one of two runs imported has run its code in that one, wherever
it came from: a hook of Python's start, a checkout on PYTHONPATH. So it is free only where the two
were asked for other attentions, to train with or to look at, or for other optimizers, and never in
the place of what is installed: an arm's attention is no reason for another PyTorch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import touches
from stability.config.commands import is_command
from stability.records.identity import (
    is_compared,
    is_module,
    is_on_record,
    may_be_missing,
)
from stability.records.manifest import Manifest

__all__ = [
    "NAMES_OF_MODULES",
    "TELLS_OF_CODE",
    "is_free_entry",
    "is_in_doubt",
    "is_known_of_both",
    "moved_by",
    "other_entries",
    "thread_lines",
]

NAMES_OF_MODULES = ("attention", "model.init", "optimizer.name", "optimizer.options")
"""The axes that may name a module of the user's own."""

_DETERMINISTIC = (
    "deterministic_algorithms",
    "deterministic_warn_only",
    "cudnn_deterministic",
    "cudnn_benchmark",
    "gemm_fp32",
    "gemm_bf16",
    "sum_fp32",
)
_MOVED_BY: Mapping[str, tuple[str, ...]] = {
    "train.matmul_precision": (
        "float32_matmul_precision",
        "fp32_precision",
        "cuda_matmul_tf32",
        "cuda_matmul_fp32",
        "mkldnn_matmul_fp32",
        "gemm_fp32",
        "attention_fp32",
        "fp32_product_bits",
    ),
    "train.deterministic": _DETERMINISTIC,
    "deterministic": _DETERMINISTIC,
}
"""The switches that a value of the config sets, and the known answers that they move."""

_INSTALLED = (
    "attention_kernels",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "numpy",
    "pytorch_lightning",
    "safetensors",
    "scipy",
    "stability",
    "tokenizers",
    "torch",
    "torchmetrics",
    "transformers",
    "triton",
)
"""Packages that compute in every run, or decide what is computed."""
_HOOKS = ("sitecustomize", "usercustomize")
"""What Python itself imports when it starts: it changes all that follows."""


def other_entries(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[str]:
    """Give the entries in which two environments must be equal and are not."""
    for key in sorted({*first.environment, *second.environment}):
        one, other = first.environment.get(key), second.environment.get(key)
        if one == other or not is_compared(key) or not is_known_of_both(key, first, second):
            continue
        if is_in_doubt(key, first, second, differences):
            continue
        if not is_free_entry(key, first, second, differences):
            yield key


def is_known_of_both(key: str, first: Manifest, second: Manifest) -> bool:
    """Whether both runs have an entry on record, or would have it if there were anything to say."""
    was, now = first.environment, second.environment
    return is_on_record(key, was, now) and is_on_record(key, now, was)


def is_in_doubt(
    key: str, first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> bool:
    """Whether another installed package or loaded library may or may not be the declared change.

    Of another commit `setup` may have installed it, or somebody since. One that one run alone has
    loaded may have the place of another, where nothing was declared that loads it: a script may
    take whatever kernels it can import.
    """
    one, other = (each.environment.get(key) for each in (first, second))
    if one == other or not is_command(first.config) or touches(differences, ("python",)):
        return False
    if one is None or other is None:
        is_installed = key.startswith(("code.", "library.", "package."))
        return is_installed and not touches(differences, TELLS_OF_CODE)
    return key.startswith("code.") and touches(differences, ("ref", "setup"))


def moved_by(differences: Mapping[str, Any]) -> frozenset[str]:
    """Return the switches and known answers that runs with these `differences` may differ in."""
    changed = (names for path, names in _MOVED_BY.items() if touches(differences, (path,)))
    return frozenset(name for names in changed for name in names)


def is_free_entry(
    key: str, first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> bool:
    """Whether two runs whose configs have these `differences` may differ in an entry."""
    was, now = first.environment, second.environment
    is_in_one = key not in was or key not in now
    if is_command(first.config) and _follows_from_command(key, differences, is_in_one=is_in_one):
        return True
    if key.startswith("switch.") and key.removeprefix("switch.") in moved_by(differences):
        return True
    if not is_module(key):
        return may_be_missing(key) and is_in_one
    if _is_in_place_of_installed(key, was, now):
        return False
    # what is mended in the own modules of what is changed is its change
    if touches(differences, NAMES_OF_MODULES):
        return True
    return is_in_one and _looked_at(first.config) != _looked_at(second.config)


def thread_lines(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Doubt another number of threads, which comes from outside of a command as often as not.

    A flag or variable whose name speaks of threads sets them, and so may another environment.
    """
    if not is_command(first.config) or touches(differences, ("python",)):
        return
    if not differences or any("thread" in path.lower() for path in differences):
        return
    for name in ("threads", "interop_threads"):
        one, other = (each.environment.get(name) for each in (first, second))
        if one != other:
            said = f"{one} in one and {other} in the other, which was not declared"
            line = compared(f"environment.{name}", None, None)
            yield replace(line, says=f"the same {name} ({said})")


TELLS_OF_CODE = (
    "program",
    "attention",
    "flags",
    "config",
    "env",
    "ref",
    "setup",
    "python",
)
"""What of a command's config may turn switches and import other modules."""
_OF_INTERPRETERS = ("python", "python_optimize", "package", "code", "library", "cuda", "cudnn")
"""What is another one in another environment."""


def _follows_from_command(key: str, differences: Mapping[str, Any], *, is_in_one: bool) -> bool:
    """Whether an entry may be another one because a command has other flags, variables or code.

    Such as a switch that a flag has turned, or a module that only one of two programs imports. What
    is installed and the machine never follow from a command.
    """
    kind, _, name = key.partition(".")
    if touches(differences, ("python",)) and kind in _OF_INTERPRETERS:
        return True
    if key == "start":  # the checksum of the checkpoint that it begins from
        return touches(differences, ("start",))
    if key == "variable.CUBLAS_WORKSPACE_CONFIG":  # set with the deterministic algorithms
        return touches(differences, ("deterministic", f"env.{name}"))
    if not touches(differences, TELLS_OF_CODE):
        return False
    if kind == "variable":
        return f"env.{name}" in differences
    if kind == "module":
        # our own attentions are imported where they take a script's place
        known = _HOOKS if touches(differences, ("attention",)) else (*_INSTALLED, *_HOOKS)
        is_hook = name.partition(".")[0] in known
        return not is_hook and (is_in_one or touches(differences, ("program", "ref", "setup")))
    return kind in ("switch", "threads", "interop_threads", "simd")


def _is_in_place_of_installed(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a module is one of what is installed, or was taken from there by one of two runs."""
    top = key.removeprefix("module.").partition(".")[0]
    if top in _INSTALLED or top in _HOOKS:
        return True
    own = [any(_is_of(name, top) for name in each) for each in (was, now)]
    installed = [any(_is_version_of(name, top) for name in each) for each in (was, now)]
    # a plug-in has both a version and hashed modules, in each run that has imported it
    return all(installed) and own[0] != own[1]


def _is_of(key: str, top: str) -> bool:
    """Whether an entry is a module of the package `top`."""
    return key == f"module.{top}" or key.startswith(f"module.{top}.")


def _is_version_of(key: str, top: str) -> bool:
    """Whether an entry is the version of the distribution called as the package `top` is."""
    return key.startswith("package.") and (
        key.removeprefix("package.").replace("-", "_").replace(".", "_").lower() == top.lower()
    )


def _looked_at(config: Mapping[str, Any]) -> list[Any]:
    """Return the attentions that a run's probe needs besides its own; none where it is off."""
    probe = config.get("probe") or {}
    is_on = any(probe.get(name) for name in ("every", "steps", "per_decade", "gradient_every"))
    return list(probe.get("shadows") or ()) if is_on else []
