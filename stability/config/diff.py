"""The difference between two arms, path by path.

Leaves out what the paths are called together (`axes`) and whether a difference is allowed
(`analysis.pair_contract`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from stability.config.commands import is_command
from stability.config.convert import from_dict, to_dict
from stability.config.schema import ArmConfig

__all__ = ["RunConfig", "are_same", "diff", "hash_without", "leaves", "recorded_config"]

RunConfig = ArmConfig | Mapping[str, Any]
"""The config of a run: of our trainer, or, as its values, of a command (`commands`)."""


def recorded_config(values: Mapping[str, Any], where: str) -> RunConfig:
    """Return the config that a record holds; ConfigError, which opens with `where`, for no such."""
    return values if is_command(values) else from_dict(ArmConfig, values, where)


def diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted path -> (value in a, value in b) for each value that differs.

    A key that only one of them has is None in the other. `probe` and `watch` are left out: looking
    changes nothing.
    """
    first, second = leaves(to_dict(a)), leaves(to_dict(b))
    paths = dict.fromkeys([*first, *second])
    return {
        path: (first.get(path), second.get(path))
        for path in paths
        if not path.startswith(("probe.", "watch."))
        and not are_same(first.get(path), second.get(path))
    }


def are_same(one: Any, other: Any) -> bool:
    """Whether two values are one; a command is told 1 and true, or 0 and false, in other words.

    NaN is the same as NaN.
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    is_nan = isinstance(one, float) and isinstance(other, float) and one != one and other != other
    return is_nan or (one == other and isinstance(one, bool) == isinstance(other, bool))


def hash_without(config: RunConfig, paths: Iterable[str]) -> str:
    """Return a SHA-256 of the config but for the values at `paths`, and for what only looks."""
    content = to_dict(config)
    for path in ("probe", "watch", *paths):
        _take_out(content, path)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _take_out(place: dict[str, Any], path: str) -> None:
    """Take the value at `path` out of nested mappings; a command's flag may have dots itself."""
    place.pop(path, None)
    for key, value in place.items():
        if isinstance(value, dict) and path.startswith(f"{key}."):
            _take_out(value, path.removeprefix(f"{key}."))
            return


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value for each value of nested mappings, whatever config they are."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found.update(leaves(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
