"""The flags of a command: words as a shell gives them, and values by name as a record has them.

`--lr 0.1`, `--lr=0.1` and, in the manner of Hydra, `lr=0.1` are one thing, called `lr`.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "PLACE",
    "assigned_words",
    "flag_values",
    "flag_words",
    "has_settings",
    "parse_flags",
    "setting_words",
    "split_flags",
    "value_text",
    "without_flags",
]

PLACE = "argument_"
"""How the name of a word begins that is no flag: its place among them follows."""

_FLAG = re.compile(r"-{1,2}[A-Za-z][\w.\-/]*")
_SETTING = re.compile(r"([A-Za-z_+~][\w.\-/@+~]*)=(.*)", re.DOTALL)
"""What follows a program in the manner of Hydra and OmegaConf: `optimizer.lr=0.1`."""


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return a command's flags by name without their dashes; what is no flag has its place's name.

    `--lr 0.1`, `--lr=0.1` and `lr=0.1` are one thing. A flag without a value is True, and one that
    is given more than once has all its values.
    """
    flags: dict[str, Any] = {}
    for name, values in flag_values(words):
        found: Any = " ".join(values) if values else True
        flags[name] = f"{flags[name]} {found}" if name in flags else found
    return flags


def flag_values(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with its values, in their order, as `parse_flags` names them."""
    return [(name, values) for name, values, _ in split_flags(words)]


def without_flags(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words less those of the flags `names`, their values included."""
    return [word for name, _, own in split_flags(words) if name not in names for word in own]


def has_settings(words: Sequence[str]) -> bool:
    """Whether some of the words are in the manner of Hydra and OmegaConf, `optimizer.lr=0.1`."""
    return any(_SETTING.fullmatch(word) for word in words)


def split_flags(words: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Return each flag's name and values, as `flag_values`, and the words that say them."""
    return list(_split(words))


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    rest, places = list(words), 0
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        setting = _SETTING.fullmatch(word)
        if _FLAG.fullmatch(name):
            values = [value] if equals else _values(rest)
            yield name.lstrip("-"), values, [word] if equals else [word, *values]
        elif setting:
            yield setting.group(1), [setting.group(2)], [word]
        else:
            places += 1
            yield f"{PLACE}{places}", [word], [word]


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as a command takes them: `--lr 0.1`, a letter with one dash.

    True is given without a value, and a list with all its values; False and None are not given.
    `parse_flags` undoes it, as texts, if no value looks like a flag.
    """
    words = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"-{name}" if len(name) == 1 else f"--{name}")
        words += [] if value is True else [value_text(item) for item in _items(value)]
    return words


def setting_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags in the manner of Hydra and OmegaConf, `optimizer.lr=0.1`; None is not given."""
    return [
        f"{name}={','.join(value_text(item) for item in _items(value))}"
        for name, value in flags.items()
        if value is not None
    ]


def assigned_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as one word each, `--lr=0.1`, true and false as Python writes them.

    None is not given.
    """
    return [
        f"--{name}={','.join(str(item) for item in _items(value))}"
        for name, value in flags.items()
        if value is not None
    ]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def value_text(value: Any) -> str:
    """Return a flag's value as a word of a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(rest: list[str]) -> list[str]:
    """Take the words that follow a flag as its values."""
    taken = []
    while rest and not _FLAG.fullmatch(rest[0].partition("=")[0]):
        if _SETTING.fullmatch(rest[0]):
            break
        taken.append(rest.pop(0))
    return taken
