"""Attentions, metrics and models that other packages add by entry points.

A package names a function in its own metadata, e.g.
`[project.entry-points."stability.attentions"] mine = "mypkg:my_attention"`, and studies, probes and
`shadow` know it as `mine`. Leaves out loading anything: a name is looked up without an import.
"""

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

__all__ = ["ATTENTIONS", "METRICS", "MODELS", "plugins"]

ATTENTIONS = "stability.attentions"
"""Functions of (q, k, v, *, causal, scale=None, ...) -> out, as `AttentionFn` says."""

METRICS = "stability.metrics"
"""Functions of (x, reference, valid) -> a 0-d tensor on their device."""

MODELS = "stability.models"
"""Functions of (config, attention) -> a causal decoder, as `model.decoder` says."""


def plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, as the installed packages declare them."""
    return dict(_read(group, (*map(_state, sys.path), *map(id, sys.meta_path))))


@lru_cache(maxsize=8)
def _read(group: str, places: tuple[object, ...]) -> dict[str, EntryPoint]:
    # kept, as long as the folders of packages are what they were: it reads a file of each package
    return {entry.name: entry for entry in entry_points(group=group)}


def _state(folder: str) -> tuple[str, int]:
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:  # as of a zipped library that is not there
        return folder, 0
