"""A command as `stability init` reads it: its seed, its flags by name, and where these go.

Leaves out what is written of it (`study_text`).
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stability.config.commands import end_of_program
from stability.config.flags import PLACE, split_flags

__all__ = ["CommandParts", "parts_of", "with_seed"]


@dataclass(frozen=True, slots=True)
class CommandParts:
    """A command in two: the words that all arms have, and the flags that an arm may change."""

    command: str
    """Ends with the `place` of the flags."""
    flags: dict[str, Any]
    place: str
    fixed: frozenset[str]
    """Names of flags that are words of `command`, so that no arm can change them."""


def parts_of(words: Sequence[str]) -> CommandParts:
    """Return the parts of the command `words`, which has its seed in braces."""
    end = end_of_program(words)
    flags = split_flags(words[end:])
    place = _place([own for flag, _, own in flags if not flag.startswith(PLACE)])
    names = [flag for flag, _, _ in flags]
    kept, rest, fixed = list(words[:end]), {}, set()
    for flag, values, own in flags:
        is_named = place == "{settings}" or own[0].startswith("-")
        is_other = flag.startswith(PLACE) or not is_named
        # as they are: what has no name, or another form, what is filled in, or given repeatedly
        if is_other or "{seed}" in values or names.count(flag) > 1:
            kept += own
            fixed.add(flag)
        else:
            rest[flag] = True if not values else [_value(text) for text in values]
            rest[flag] = rest[flag][0] if len(values) == 1 else rest[flag]
    # no shell reads it, and none needs its braces quoted
    command = re.sub(r"'([\w=./-]*\{seed\}[\w=./-]*)'", r"\1", shlex.join(kept))
    return CommandParts(f"{command} {place}", rest, place, frozenset(fixed))


def with_seed(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the command with its seed in braces, and whether it has one."""
    given = list(words)
    if any("{seed}" in word for word in given):
        return given, True
    for index, word in enumerate(given):
        name, equals, value = word.lstrip("-").partition("=")
        if name != "seed":
            continue
        if equals and value.isdigit():
            given[index] = f"{word.partition('=')[0]}={{seed}}"
            return given, True
        if index + 1 < len(given) and given[index + 1].isdigit():
            given[index + 1] = "{seed}"
            return given, True
    return given, False


def _place(flags: Sequence[Sequence[str]]) -> str:
    """Return where flags of these words go: a script may take no other form than it was given."""
    dashed = [own for own in flags if own[0].startswith("-")]
    if flags and not dashed:
        return "{settings}"
    is_assigned = bool(dashed) and all("=" in own[0] for own in dashed)
    return "{assigned}" if is_assigned else "{flags}"


def _value(text: str) -> Any:
    """Return a flag's value as YAML would have it: a number where it is one."""
    for kind in (int, float):
        try:
            found = kind(text)
        except ValueError:
            continue
        # only where it is written again as it was: 1e-3 and 007 stay what they are
        return found if str(found) == text else text
    return text
