"""The words of a single command as the `command` of a study, with a place for flags that change.

Of the words as they were typed only those of the flags that change are taken out: how a script
spells the others, and in which order it wants them, nobody need know.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stability.config.commands import end_of_program
from stability.config.flags import flag_values, has_settings, value_text, without_flags

__all__ = ["as_template", "as_texts", "with_dots"]


def as_template(
    words: Sequence[str], changed: Mapping[str, Any], dropped: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the command that has a place for the flags `changed`, and their values in `words`.

    The flags `dropped` are left out. ValueError for a changed flag that is there more than once, or
    that has another number of values there: what follows it may be no value of it.
    """
    end = end_of_program(words)
    given = words[end:]
    known = flag_values(given)
    flags: dict[str, Any] = {}
    for name, value in changed.items():
        found = [values for flag, values in known if flag == name]
        if not found:
            continue
        count = len(value) if isinstance(value, (list, tuple)) else 1
        if len(found) > 1 or len(found[0]) not in (0, 1, count):
            said = " ".join(" ".join(values) for values in found)
            raise ValueError(
                f"flags.{name} must be there once, with as many values as are given, got {value!r} "
                f"for {said!r}; a list is written [a, b]"
            )
        flags[name] = True if not found[0] else found[0][0] if len(found[0]) == 1 else found[0]
    rest = without_flags(given, {*changed, *dropped})
    own = without_flags(given, {name for name, _ in known if name not in changed})
    place = "{settings}" if has_settings(own or given) else "{flags}"
    return " ".join(_quoted(word) for word in [*words[:end], *rest, place]), flags


def _quoted(word: str) -> str:
    """Return a word as a shell wants it, but for the braces of a placeholder, which it leaves."""
    plain = word.replace("{", "").replace("}", "")
    return word if shlex.quote(plain) == plain else shlex.quote(word)


def as_texts(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags with the values that a command line gives them, which are texts."""
    return {name: _as_text(value) for name, value in flags.items()}


def _as_text(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    return [value_text(x) for x in value] if isinstance(value, list) else value_text(value)


def with_dots(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags whose names have dots, as `optimizer.lr`, where they were read as groups."""
    found: dict[str, Any] = {}
    for name, value in flags.items():
        below = with_dots(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): each for key, each in below.items()}
    return found
