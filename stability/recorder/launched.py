"""What a training was started with, as it goes on record: arguments, files they name, variables.

What the recorded command says and what its process really got are two things: between them may lie
a shell script, a launcher, a file. Placeholders of the command stand in the place of their values,
so that two runs of one command say the same. Leaves out how this is seen (`inside.launched`) and
what two runs may differ in (`analysis.launch_contract`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stability.config.commands import end_of_program
from stability.config.masking import masked_words
from stability.recorder.inside.launched import NamedFiles, hash_of, names_in
from stability.records.session_variables import lasting

__all__ = ["GivenCommand", "launch_record"]


class GivenCommand:
    """A command as it was written and as it is started, and the files that it names."""

    def __init__(
        self,
        written: Sequence[str] = (),
        filled: Sequence[str] = (),
        values: Mapping[str, object] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.written, self.filled = list(written), list(filled)
        self.variables = variables
        self.values = {name: str(value) for name, value in (values or {}).items()}
        self.files: NamedFiles | None = None

    def begin(self, folder: Path | None) -> None:
        """Take the files as they are before the command starts, in `folder`."""
        programs = self.filled[: end_of_program(self.filled)]
        # the first word is the program that is installed
        self.files = NamedFiles(self.filled[1:], str(folder or Path.cwd()), programs)

    def as_written(self, arguments: Sequence[str]) -> list[str]:
        """Return a process's arguments as the command would have them written."""
        same = 0
        for own, given in zip(reversed(arguments), reversed(self.filled), strict=False):
            if own != given:
                break
            same += 1
        rest = [self._with_placeholders(word) for word in arguments[: len(arguments) - same]]
        return [*rest, *self.written[len(self.written) - same :]]

    def set_on_the_way(self, hashes: Mapping[str, str]) -> list[str]:
        """Return the variables that the command has set itself, before Python started."""
        given = self.variables
        if given is None:
            return []
        return [x for x, was in hashes.items() if x not in given or hash_of(given[x]) != was]

    def _with_placeholders(self, word: str) -> str:
        """Put `{out}`, and in a path `{arm}`, in the place of what they are filled in with."""
        if out := self.values.get("out", ""):
            word = word.replace(out, "{out}")
        arm = self.values.get("arm", "")
        # nowhere else: it may be the value of a flag, which is no name
        if arm and os.sep in word and any("{arm}" in each for each in self.written):
            return re.sub(rf"(?<![A-Za-z0-9]){re.escape(arm)}(?![A-Za-z0-9])", "{arm}", word)
        return word


def launch_record(told: Mapping[str, Any], command: GivenCommand) -> dict[str, Any]:
    """Return what goes on record of what a process tells that it was given; empty if it doesn't."""
    if not told:
        return {}
    given, later = list(told["arguments"]), list(told["later_arguments"])
    # of `python -m` the module's file is known once Python has found it
    begun = [*later[:1], *given[1:]] if given[:1] == ["-m"] and later else given
    files = _named(told["files"], given, command.as_written(given), told.get("written", ()))
    if command.files is not None:
        hashes, written = command.files.hashes(), command.files.written()
        files |= _named(hashes, command.filled, command.written, written)
    return {
        "arguments": masked_words(command.as_written(begun)),
        # what the script, or one that runs it, has made of them; mostly nothing
        "later_arguments": (
            masked_words(command.as_written(later)) if later[1:] != given[1:] else []
        ),
        "main": told["main"],
        "files": files,
        "variables": (variables := lasting(told["variables"])),
        "set_on_the_way": command.set_on_the_way(variables),
    }


def _named(
    files: Mapping[str, Mapping[str, Any]],
    words: Sequence[str],
    as_written: Sequence[str],
    written: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Return files by the names that the command has for them, and which were written meanwhile."""
    names = {
        name: written_name
        for word, written_word in zip(words, as_written, strict=True)
        for name, written_name in zip(names_in(word), names_in(written_word), strict=False)
    }
    return {
        names.get(name, name): {**known, **({"written": True} if name in written else {})}
        for name, known in files.items()
    }
