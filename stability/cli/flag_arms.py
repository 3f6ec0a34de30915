"""The arms that `stability init` is given as FLAG=VALUE: `--candidate` and `--broken`.

A value is what it would be in the study's YAML. Leaves out how an arm is written (`study_text`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stability.cli.command_parts import CommandParts
from stability.cli.study_text import reference_flags
from stability.config.commands import PRECISION_QUESTION
from stability.config.diff import are_same
from stability.config.load import parse_value

__all__ = ["OPTIONS", "flags_of_arms", "is_lower_precision", "with_values_joined"]

OPTIONS = ("candidate", "broken")
"""The options, and the arms that they give."""
_NAME = re.compile(r"[A-Za-z_+~][\w.\-/@+~]*")
_VALUES = "a number, a text, true, false, null or a list of these"


def with_values_joined(words: Sequence[str]) -> list[str]:
    """Return the words with `--candidate` and its value in one, also where that begins with dashes.

    ValueError for a value that is not FLAG=VALUE, or an option that is given twice.
    """
    joined: list[str] = []
    seen: set[str] = set()
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        option, equals, text = word.partition("=")
        if option.removeprefix("--") not in OPTIONS or not option.startswith("--"):
            joined.append(word)
            continue
        if option in seen:
            raise ValueError(
                f"init: {option} must be given once; write a further arm into the study's file"
            )
        seen.add(option)
        text = text if equals else (remaining or [""]).pop(0)
        _name_and_value(option[2:], text)
        joined.append(f"{option}={text}")
    return joined


def flags_of_arms(parts: CommandParts, given: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the flags of each arm that is `given` as FLAG=VALUE, by its option in `OPTIONS`.

    ValueError for what is no FLAG=VALUE, a flag that an arm can't change, and an arm that would be
    the baseline, the reference that `init` writes, or the other arm.
    """
    arms: dict[str, dict[str, Any]] = {}
    others = {"": parts.flags}
    if reference := reference_flags(parts.flags):
        others["reference"] = parts.flags | reference
    for option, text in given.items():
        name, value = _name_and_value(option, text)
        if name in parts.fixed:
            raise ValueError(
                f"init: --{option} must name a flag that the study can set, got {name!r}, which "
                "the command gives as its seed, several times, or in another form than its other "
                "flags; write that arm into the study's file"
            )
        arms[option] = {name: _read(option, name, value, parts.flags.get(name))}
        own = parts.flags | arms[option]
        for other, flags in others.items():
            if _is_same_call(own, flags, parts.place):
                raise ValueError(_why_not(option, text, other))
        others[option] = own
    return arms


def is_lower_precision(parts: CommandParts, own: Mapping[str, Any]) -> bool:
    """Whether the flags `own` are known to ask for low precision, and the command's are not."""
    return bool(reference_flags(own)) and not reference_flags(parts.flags)


def _why_not(option: str, text: str, other: str) -> str:
    """Return what is said of an arm that is another one: the baseline if `other` is empty."""
    begin = f"init: --{option} must be another change than"
    if not other:
        return (
            f"init: --{option} must change what the command is given, got {text!r}, with which the "
            "command is the same"
        )
    if other != "reference":
        return f"{begin} --{other}, got {text!r}: what is in question is not known to be harmed"
    if option == "candidate":
        return (
            f"{begin} a reference to this command, got {text!r}: it would be measured from itself. "
            f"Leave --candidate out: {PRECISION_QUESTION}"
        )
    return f"{begin} a reference to this command, got {text!r}, which is no harm"


def _name_and_value(option: str, text: str) -> tuple[str, str]:
    """Return the flag's name without dashes, and its value as it was typed."""
    name, _, value = text.partition("=")
    name = name.lstrip("-")
    if not value or not _NAME.fullmatch(name):
        raise ValueError(
            f"init: --{option} must be FLAG=VALUE, as lr=0.01 or --lr=0.01, VALUE {_VALUES}, got "
            f"{text!r}"
        )
    return name, value


def _read(option: str, name: str, typed: str, of_command: Any) -> Any:
    """Return the value `typed`, as YAML has it; `of_command` is what the command gives, or None."""
    begin = f"init: --{option} must be FLAG=VALUE, VALUE {_VALUES}, got {name}={typed}"
    quote = f"""quote what is a text: '{name}="..."'"""
    try:
        value = parse_value(typed)
    except ValueError as error:
        raise ValueError(f"{begin}, which is no YAML ({error}); {quote}") from error
    is_word = isinstance(value, str) and typed[0] not in "'\""
    # YAML's on and no are words of a script, and only true is a switch
    is_word |= isinstance(value, bool) and typed.lower() not in ("true", "false")
    # beside a flag with a value, as `--compile false`, true is a value and no bare switch
    is_word |= isinstance(value, bool) and of_command is not None and of_command is not True
    if is_word or _is_other_number(value, typed):
        return typed
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
        raise ValueError(f"{begin}; {quote}")
    return value


def _is_other_number(value: Any, typed: str) -> bool:
    """Whether YAML reads another number than was typed, as 7, 16 and 90 of 007, 0x10 and 1:30."""
    if isinstance(value, float):
        return _number(typed) != value
    return isinstance(value, int) and not isinstance(value, bool) and str(value) != typed


def _number(text: str) -> Any:
    """Return the number that a script would read; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def _is_same_call(one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> bool:
    """Whether the command is told the same by both flags, numbers in whatever form."""
    a, b = _told(one, place), _told(other, place)
    return a.keys() == b.keys() and all(are_same(a[name], b[name]) for name in a)


def _told(flags: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the flags that reach the command, with what a script would read of their values."""
    return {
        name: [_meaning(item) for item in value] if isinstance(value, list) else _meaning(value)
        for name, value in flags.items()
        if value is not None and (value is not False or place != "{flags}")
    }


def _meaning(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    number = _number(value)
    said = {"true": True, "false": False}.get(value.lower(), value)
    return said if number is None else number
