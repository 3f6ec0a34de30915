"""Reads YAML files: strict about duplicate keys, and about files that are no mapping.

Numbers such as `1e-3` are read as floats, as YAML 1.2 does; PyYAML's YAML 1.1 makes them strings.
Leaves out what the keys mean (`convert`, `load`).
"""

import re
from pathlib import Path
from typing import Any

import yaml

from stability.config.convert import ConfigError

__all__ = ["parse_value", "read_mapping"]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, refusing duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+"),
    list("-+.0123456789"),
)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that the YAML file `path` holds.

    ConfigError, one line, for a file that is missing, unreadable, not YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a mapping, got {content!r}"[:200])
    return content


def parse_value(text: str) -> Any:
    """Return what `text` means as a YAML value; the empty text is the empty string.

    ValueError, one line, if it is not YAML.
    """
    if not text:
        return ""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from error


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else " ".join(problem.split())
