"""Two recorded runs were started with the same things, but for the declared change.

What a command says is in its config, and is compared there. Here is what its process really got:
arguments, also behind a shell script or a launcher; the contents of the files that they name; the
variables that it could read. What differs and was declared, or follows from that in one place, is
by design. What else differs is refused where nothing was declared that reaches code, and else
unproven: a flag may be handed on as several.

Leaves out what is on record (`recorder.launched`), and files that no argument names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from stability.analysis.environment_contract import TELLS_OF_CODE
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import touches
from stability.config.commands import OF_THE_RUN, PLACEHOLDERS, is_command
from stability.config.flags import parse_flags, split_flags, value_text
from stability.config.masking import masked_values
from stability.records.manifest import Manifest

__all__ = ["launch_lines"]

_MOST_NAMES = 6
_OF_CHECKOUTS = ("ref", "setup")
"""What puts other files in the place of the same names."""
_UNREAD = {"unreadable", "unread", "stat"}
"""Of what a file has no hash: it could not be read, another rank's, one of too many."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".gin", ".py")
"""How the name of a file ends that says, line by line, what a training does."""
_OF_INTERPRETERS = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_SHLVL")
"""Variables that say which environment of Python is taken."""


def launch_lines(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Compare what two recorded runs were started with; `differences` are those of their configs.

    Nothing is said of runs of our own trainer, which takes all from its config.
    """
    if not is_command(first.config):
        return
    was, now = (each.resolved.get("launched") for each in (first, second))
    if not was or not now:
        yield _unknown("what the process was started with")
        return
    yield from _arguments(first, second, differences)
    yield from _programs(was, now, differences)
    yield from _ranks(first, second, differences)
    yield from _files(first, second, differences)
    yield from _named_by_flags(was["files"], now["files"], differences)
    yield from _variables(was, now, differences)


def _arguments(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    left = {
        path: tuple(map(_text, values))
        for path, values in differences.items()
        if path.startswith(("flags.", "env.", "config.")) or path == "start"
    }
    is_told_otherwise = "config" in first.config  # the caller says what counts of its flags
    changed = _changed(first, second)
    declared = {name for name, _, _ in changed if f"flags.{name}" in differences}
    for name in sorted(declared):  # it has reached its own name, and excuses no other one
        told = left.pop(f"flags.{name}")
        given = [(one, other) for x, one, other in changed if x == name]
        if not any(_is_given(told, pair) for pair in given):
            said = " and ".join(map(repr, told))
            shown = " and ".join(map(_shown, given[0]))
            yield _unknown(f"the declared values of {name} ({said}: the process got {shown})")
    for name, one, other in changed:
        if name in declared:
            continue
        # handed on under another name, as $1 of a shell script; once, or two things would differ
        given = _text(one), _text(other)
        source = next((x for x, values in left.items() if _are_same(x, values, given)), "")
        if left.pop(source, None):
            continue
        field = f"the process's argument {name}"
        if is_told_otherwise or touches(differences, TELLS_OF_CODE):
            yield _unknown(
                f"the same arguments ({name} is {_shown(one)} in one and {_shown(other)} in the "
                "other, which was not declared)"
            )
        else:
            yield compared(field, _shown(one), _shown(other))
    yield from _order(first, second, changed)


def _order(
    first: Manifest, second: Manifest, changed: Sequence[tuple[str, Any, Any]]
) -> Iterator[ProofLine]:
    """Doubt words that are the same by name, and in another order, or spelled otherwise.

    Of two that say the same thing, as a config and a flag, the last one holds in many scripts.
    """
    names = {name for name, _, _ in changed}
    one, other = (
        [
            (name, values, "" if word.startswith("-") else "no flag")
            for name, values, (word, *_) in split_flags(run.resolved["launched"]["arguments"][1:])
            if name not in names and (_is_command_line(run) or name not in OF_THE_RUN)
        ]
        for run in (first, second)
    )
    if one != other:
        apart = next(x for x, y in zip_longest(one, other) if x != y) or other[len(one)]
        yield _unknown(f"the same order of arguments ({apart[0]} has another place, or form)")


def _is_given(declared: tuple[str, ...], given: tuple[Any, Any]) -> bool:
    """Whether a process was given a flag's two values; a list may be one word of it."""
    if any(f"{{{name}}}" in value for value in declared for name in PLACEHOLDERS):
        return True  # filled in anew for each run
    return all(
        value.replace(",", " ").lower() == _text(word).replace(",", " ").lower()
        or (word is None and value in ("", "false"))
        for value, word in zip(declared, given, strict=True)
    )


def _are_same(path: str, declared: tuple[str, ...], given: tuple[str, ...]) -> bool:
    """Whether a process was given a change's two values; a checkpoint's may be a whole path."""
    if path != "start":
        return declared == given
    pairs = [(PurePath(x).parts, PurePath(y).parts) for x, y in zip(declared, given, strict=True)]
    return all(y[len(y) - len(x) :] == x for x, y in pairs)


def _changed(first: Manifest, second: Manifest) -> list[tuple[str, Any, Any]]:
    """Return each argument with its two values, where they differ; as begun with, and as changed.

    What a script has changed in one run alone is held against what the other one was given.
    """
    found = []
    runs = [each.resolved["launched"] for each in (first, second)]
    is_changed = any(each.get("later_arguments") for each in runs)
    for which in ("arguments", "later_arguments")[: 2 if is_changed else 1]:
        was, now = (
            _flags_of(manifest, each.get(which) or each["arguments"])
            for manifest, each in zip((first, second), runs, strict=True)
        )
        found += [(x, was.get(x), now.get(x)) for x in {**was, **now} if was.get(x) != now.get(x)]
    return list(dict.fromkeys(found))


def _flags_of(manifest: Manifest, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a process's arguments by name; where it tells of itself, less what names the run."""
    program = PurePath(arguments[0]).name if arguments else ""
    flags = {"(program)": program, **parse_flags(arguments[1:])}
    if _is_command_line(manifest):
        return flags
    if "ipykernel" in program:
        return {}
    return {name: value for name, value in flags.items() if name not in OF_THE_RUN}


def _is_command_line(manifest: Manifest) -> bool:
    return bool(manifest.resolved.get("command"))


def _programs(
    was: Mapping[str, Any], now: Mapping[str, Any], differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Compare a program that is no file, as Python's `-c`: of others the source is compared."""
    one, other = was["main"], now["main"]
    if not (one and other):
        yield _unknown("the program, which python was given in no file")
    elif one != other and not touches(differences, ("program", *_OF_CHECKOUTS, "flags")):
        yield compared("the program", one, other)


def _ranks(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    one, other = (each.resolved.get("ranks") for each in (first, second))
    if one == other or touches(differences, ("program",)):
        return
    if touches(differences, TELLS_OF_CODE):
        yield _unknown(f"the same number of ranks ({one} in one and {other} in the other)")
    else:
        yield compared("the number of ranks", one, other)


def _files(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Compare the files that both runs were given by one name.

    Of another commit those of its checkout are others, which are the commit's.
    """
    is_checkout = touches(differences, _OF_CHECKOUTS)
    was, now = (each.resolved["launched"]["files"] for each in (first, second))
    words = [_words_of(each) for each in (first, second)]
    for name in sorted({*was, *now}):
        # one absolute name is one place: each commit has a checkout of its own
        if is_checkout and not PurePath(name).is_absolute():
            continue
        one, other = was.get(name), now.get(name)
        if one is None or other is None:
            # named by one alone, it is a declared argument's value; else it was not there
            if all(_names(each, name) for each in words):
                yield _unknown(f"the same {name} (a file that one run alone has found)")
            continue
        if _is_same(one, other):
            continue
        is_read = not _UNREAD & {one["of"], other["of"]}
        is_known = is_read and one["sha256"] != other["sha256"]
        if is_known and not (one.get("written") or other.get("written")):
            yield compared(f"the content of {name}", one["sha256"], other["sha256"])
        elif is_known:
            yield _unknown(f"the same {name} (other content, and a run writes into it)")
        elif not is_read:
            yield _unknown(f"the same {name} (which was not read as a whole)")
        else:
            yield _unknown(f"the same {name} (the {one['of']} are compared, and it was rewritten)")


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("sha256", "of", "stat")
    is_told = one["of"] not in ("unreadable", "unread")
    return is_told and all(one.get(name) == other.get(name) for name in names)


def _words_of(manifest: Manifest) -> list[str]:
    launched = manifest.resolved["launched"]
    return [*manifest.resolved.get("command", ()), *launched["arguments"]]


def _names(words: Sequence[str], name: str) -> bool:
    """Whether one of the words is a name, or has it as its value or as a member of a list."""
    return any(name in word.replace("=", ",").replace("@", ",").split(",") for word in words)


def _named_by_flags(
    was: Mapping[str, Any], now: Mapping[str, Any], differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Compare the texts, as configs, that are named by the two values of a declared flag."""
    for path, (value, other_value) in differences.items():
        if not path.startswith("flags."):
            continue
        one, other = _names_in(_text(value), was), _names_in(_text(other_value), now)
        names = [x for x in one if x not in other], [x for x in other if x not in one]
        named = " and ".join(dict.fromkeys([*names[0], *names[1]]))
        texts = [_lines_of(x, was) for x in names[0]], [_lines_of(x, now) for x in names[1]]
        if None in texts[0] or None in texts[1]:
            yield _unknown(f"that {named} differ in one thing (their lines are not on record)")
            continue
        # of one alone all lines are others
        count = sum(_differing(a or [], b or []) for a, b in zip_longest(*texts))
        if count > 1:
            yield _unknown(f"that {named} differ in one thing ({count} lines differ)")


def _names_in(value: str, files: Mapping[str, Any]) -> list[str]:
    """Return the texts that a flag's value names: itself, or the members of a list."""
    hidden = {masked_values(name, "secret"): name for name in files}
    value = hidden.get(value, value)
    words = [value] if value in files else re.split(r"[\s,@=]+", value)
    return [word for word in words if "lines" in files.get(word, {}) or _is_config(word)]


def _is_config(name: str) -> bool:
    return PurePath(name).suffix.lower() in _CONFIGS


def _lines_of(name: str, files: Mapping[str, Any]) -> list[str] | None:
    return files.get(name, {}).get("lines")


def _differing(one: Sequence[str], other: Sequence[str]) -> int:
    changes = SequenceMatcher(a=one, b=other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def _variables(
    was: Mapping[str, Any], now: Mapping[str, Any], differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    one, other = was["variables"], now["variables"]
    declared = {path.removeprefix("env.") for path in differences if path.startswith("env.")}
    if touches(differences, ("python",)):
        declared |= {*_OF_INTERPRETERS}
    if touches(differences, ("program",)):  # as accelerate's, of a launcher's own flags
        declared |= {*was["set_on_the_way"], *now["set_on_the_way"]}
    names = [x for x in sorted({*one, *other}) if one.get(x) != other.get(x) and x not in declared]
    if names:
        more = ", ..." if len(names) > _MOST_NAMES else ""
        listed = ", ".join(names[:_MOST_NAMES]) + more
        yield _unknown(f"the same variables ({listed}: others, which the script may read)")


def _unknown(says: str) -> ProofLine:
    return ProofLine(field="launch", first="", second="", sameness="unknown", says=says)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(value_text, value))
    return value_text(value) if value is not None else ""


def _shown(value: Any) -> str:
    return "not given" if value is None else "given" if value is True else repr(value)
