"""The entry point of the command `stability`: calls a verb's function with the parsed arguments.

A verb is the first word, e.g. `run` in `stability run study.yaml`. Errors of the user are printed
as one line, without a traceback. A verb's module is imported only when that verb is used, and the
verb imports torch, Lightning, plotly and the like only once it needs them. So `--help` and mistakes
in the command or the YAML take a fraction of a second. The exit codes are defined in `output`.
"""

import difflib
import importlib
import inspect
import io
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from stability import __version__
from stability.cli.help_text import EXAMPLES, PLAIN_WORDS, HelpFormatter, end_of_help
from stability.cli.output import (
    EXIT_CODES,
    FAILS,
    HOLDS,
    INTERRUPTED,
    UNREAD,
    WRONG,
    in_lines,
    of_the_verb,
)
from stability.records.atomic_files import DiskFullError
from stability.records.identity import WAITING
from stability.report.view.plain_text import readable

__all__ = ["main"]

VERBS = {
    "demo": (
        "stability.cli.demo",
        "train the study that comes with this package",
    ),
    "docs": ("stability.cli.docs", "read the documentation: list its pages, or show one"),
    "check": ("stability.cli.check", "say if an attention computes attention, or what is off"),
    "run": ("stability.cli.run", "train every arm of a study and show the ladder"),
    "estimate": ("stability.cli.estimate", "say what a study will take: hours, disk, memory"),
    "verdict": ("stability.cli.verdict", "say PASS, FAIL, INCONCLUSIVE or NO ASSAY of a candidate"),
    "verify": ("stability.cli.verdict", "prove that runs keep the pair contract"),
    "export": ("stability.cli.export", "pack a study into one file that others can verify"),
    "status": ("stability.cli.status", "show where every run stands: state, step, job, node"),
    "show": ("stability.cli.show", "print the ladder of a study, or all about one arm"),
    "report": ("stability.cli.report", "write the HTML report of a study"),
    "dashboard": ("stability.cli.report", "show all studies of a folder in the browser, live"),
    "figure": ("stability.cli.figure", "draw a picture of a study for a paper"),
    "workspace": ("stability.cli.workspace", "build a study's panels in the W&B app"),
    "fork": ("stability.cli.fork", "train on from a run's state with one thing changed"),
    "bisect": ("stability.cli.fork", "find the layers or rounding points that carry a change"),
    "init": ("stability.cli.init", "write a first study: of any command, or by --template"),
    "adopt": ("stability.cli.adopt", "make a study of checkpoints that exist already"),
    "record": ("stability.cli.record", "record the training of any command as an arm of a study"),
    "compare": ("stability.cli.compare", "measure the drift between any two sets of weights"),
    "deviate": ("stability.cli.deviate", "measure attention numerics against FP64, point by point"),
    "probe": ("stability.cli.probe", "compare a candidate attention inside a Hugging Face model"),
    "experiment": ("stability.cli.experiment", "put a published claim to the test"),
    "doctor": ("stability.cli.doctor", "show which attentions and formats run on this machine"),
}
"""For each verb: the module with the function of that name, and its line in `stability --help`."""


_TRUTH = {
    word: said
    for said, words in (("true", "yes on"), ("false", "no off"))
    for word in (said, *words.split())
}
"""What may follow a flag, in lower case, and what it says."""
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_UNKNOWN = "unrecognized arguments: "
"""How argparse begins to tell of words that no parameter takes."""
_MISSING = "the following arguments are required: "
"""How it begins to name the parameters without a default that were not given."""
_OUTPUT = 1
"""The file descriptor of standard output."""


class _Parser(jsonargparse.ArgumentParser):
    """Prints an error as one line, without argparse's usage text."""

    takes_command = False
    """Whether the verb takes a command, and none was given after `--`."""
    options: Sequence[str] = ()
    """The verb's long options, as its help names them."""
    places: Sequence[str] = ()
    """What the verb takes by its place, as if it were a long option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = message.partition(_UNKNOWN)[2]
        if missing := message.partition(_MISSING)[2]:
            message = self._must_be_given(missing.split(", "))
        elif self.takes_command and unknown and not unknown.startswith("-"):
            message += "; a command comes last, after ` -- `, as in `-- python train.py`"
        else:
            message += _did_you_mean(unknown, self)
        _fail(_in_plain_words(message))

    def _must_be_given(self, names: Sequence[str]) -> str:
        """Return which words the verb lacks, what each of them is, and an example."""
        verb = self.prog.rpartition(" ")[2]
        said = {action.dest: (action.help or "").partition(";")[0] for action in self._actions}
        lacking = " and ".join(f"{name} ({said[name].rstrip('.')})" for name in names)
        return f"{verb}: {lacking} must be given, as in `{EXAMPLES[verb]}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    if sys.stdout is None:  # closed by the shell, as by `>&-`
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 it stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is printed as "?" and raises no error.
        sys.stdout.reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _answer(words)
        finally:
            # what is left in the buffer may meet a closed pipe too
            sys.stdout.flush()
    except (OSError, SystemExit, KeyboardInterrupt) as error:
        if _is_of_closed_output(error):
            code = UNREAD
        elif isinstance(error, OSError):
            sys.stderr.write(f"stability: standard output: {error.strerror}\n")
            code = FAILS
        else:
            raise
    # the interpreter flushes what is left once more as it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), _OUTPUT)
    return code


def _is_of_closed_output(error: BaseException | None) -> bool:
    """Whether nobody reads standard output any more, so that `error` is no one's mistake.

    rich turns the BrokenPipeError into SystemExit, and a run that is training that into
    KeyboardInterrupt.
    """
    if isinstance(error, SystemExit) and error.code == WRONG:
        return False  # it was told already
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _is_output_closed() -> bool:
    """Whether standard output is a pipe without a reader; else it was another pipe that broke."""
    poll = select.poll()
    poll.register(_OUTPUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _answer(words: list[str]) -> int:
    """Return the exit code of the command line."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return HOLDS
    if words[0] == "--version":
        sys.stdout.write(f"stability {__version__}\n")
        return HOLDS
    verb, *rest = words
    if verb == "help":
        return _answer([*rest[:1], "--help"])
    if verb not in VERBS:
        near = ", ".join(difflib.get_close_matches(verb, VERBS, n=3, cutoff=0.4))
        near = f"nearest: {near}; " if near else ""
        _fail(f"no verb {verb!r}; {near}`stability --help` lists them all")
    return _try_verb(verb, rest)


def _try_verb(verb: str, words: list[str]) -> int:
    """Run a verb; what goes wrong in it is one line on standard error, and an exit code."""
    try:
        return _run_verb(verb, words)
    except ValueError as error:
        _fail(of_the_verb(str(error), verb))
    except DiskFullError as error:
        sys.stderr.write(f"stability: {error}; free some, and the same command goes on from here\n")
        return FAILS
    except BrokenPipeError as error:
        if _is_output_closed():
            raise
        _fail(f"{verb}: {error.strerror}")
    except OSError as error:
        _fail(_refusal(error, verb))
    except KeyboardInterrupt as error:
        if _is_of_closed_output(error):
            raise
        sys.stderr.write("stability: interrupted; the same command goes on from here\n")
        return INTERRUPTED


def _refusal(error: OSError, verb: str) -> str:
    """Return what the system refuses, of which file or folder, and what to do.

    The user's own is named, not a temporary file in it.
    """
    if error.errno is None:
        return str(error)  # one that we raise
    if not error.filename or not isinstance(error.filename, str | bytes):
        return f"{verb}: {error.strerror}"
    path = Path(os.fsdecode(error.filename))
    there = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    if isinstance(error, NotADirectoryError):
        return f"{there}: must be a folder, is a file; name another one"
    if isinstance(error, PermissionError):
        # a new file is refused by the folder, whatever the one that is there lets in
        is_open = there.is_file() and os.access(there, os.R_OK | os.W_OK)
        closed = there.parent if is_open else there
        shown = closed.absolute() if closed == Path() else closed
        must = f"must be open to you, got {error.strerror}"
        return f"{shown}: {must}; name another one, or ask its owner"
    return f"{path}: {error.strerror}"


def _run_verb(verb: str, words: list[str]) -> int:
    _let_idle_threads_sleep(words)
    module = importlib.import_module(VERBS[verb][0])
    command = getattr(module, verb)
    # without abbreviations, since a misspelt option that begins as another one would be that one
    parser = _Parser(prog=f"stability {verb}", formatter_class=HelpFormatter, allow_abbrev=False)
    # `overrides` and `changes` collect options whose names no signature can list, such as
    # `--train.steps 50`, and `words` a command that follows `--`. A verb that takes them has a
    # `split_options`, which parses them.
    parser.add_function_arguments(
        command, as_positional=True, skip={"overrides", "changes", "words", "env"}
    )
    names = inspect.signature(command).parameters
    parser.takes_command = "words" in names and "--" not in words
    parser.options = _long_options(names)
    parser.places = [f"--{name}" for name, given in names.items() if given.default is given.empty]
    further: dict[str, Any] = {}
    parser.epilog = end_of_help(verb)
    if "split_options" in vars(module):
        parser.epilog = end_of_help(verb, module.option_help())
        words, further = module.split_options(words)
    arguments = parser.parse_args(_with_values(command, words)).as_dict()
    return command(**arguments, **further)


def _let_idle_threads_sleep(words: list[str]) -> None:
    """Let OpenMP threads that wait sleep soon, or at once where several runs train (`--jobs`).

    Whatever they wait for, they compute the same. The variable is read when torch is loaded, so it
    is set before the verb's module is imported; one of the user's is left as it is.
    """
    if any(name in os.environ for name in WAITING):
        return
    jobs = re.search(r"--jobs[ =](\d+)", " ".join(words))
    # An update of 12 million weights on 2 cores, with 3 ms of spinning, libgomp's own, with the
    # 10,000 turns set here, and with none: of two trainings at once 603, 511, 217 ms; of one on a
    # quiet machine 148, 141 and 194 ms (torch 2.13, benchmarks/waiting.py).
    if jobs and int(jobs[1]) > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _with_values(command: Callable[..., int], words: list[str]) -> list[str]:
    """Rewrite the command line `words` into the form that jsonargparse accepts.

    `--flag` of a bool parameter becomes `--flag=true`, and dashes in an option's name become
    underscores. jsonargparse takes only required parameters by position. Here further words may
    follow them; each is given to the next parameter whose type is one of `PLAIN_WORDS`.
    """
    every = inspect.signature(command).parameters
    parameters = {f"--{name}": parameter for name, parameter in every.items()}
    required = sum(parameter.default is parameter.empty for parameter in every.values())
    optional = [
        name for name, parameter in parameters.items() if parameter.annotation in PLAIN_WORDS
    ]
    flags = [name for name, parameter in parameters.items() if parameter.annotation is bool]
    rewritten: list[str] = []
    takes_value = False
    for word in _with_flags(flags, [_underscored(word, parameters) for word in words]):
        is_option = word.partition("=")[0] in parameters
        if not is_option and not word.startswith("-") and not takes_value:
            required -= 1
            if required < 0 and optional:
                word = f"{optional.pop(0)}={word}"
        takes_value = word.startswith("--") and "=" not in word
        rewritten.append(word)
    return rewritten


def _underscored(word: str, known: Container[str]) -> str:
    """Return `--max_gain=1` for `--max-gain=1`, where that is known; else the word itself."""
    name, equals, value = word.partition("=")
    name = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
    return f"{name}{equals}{value}" if name in known else word


def _with_flags(flags: Sequence[str], words: list[str]) -> list[str]:
    """Return `words` with a value for each flag: the next word if it is one, else true."""
    rewritten: list[str] = []
    for word in words:
        said = _TRUTH.get(word.lower())
        if said and rewritten and rewritten[-1] in flags:
            rewritten[-1] += f"={said}"
        else:
            rewritten.append(word)
    return [f"{word}=true" if word in flags else word for word in rewritten]


def _in_plain_words(message: str) -> str:
    """Return what jsonargparse says of a value of the wrong type, in the words of our errors."""
    text = " ".join(message.split())
    if lacking := re.fullmatch(r"argument (--\S+): expected one argument", text):
        return f"{lacking[1].replace('_', '-')} needs a value"
    of_key = re.match(r'Parser key "([^"]+)":', text)
    got = re.search(r"Given value: (.*)$", text) or re.search(r"Got value: (.*)$", text)
    if not of_key or not got:
        return message
    value = got[1].strip()
    option = f"--{of_key[1].replace('_', '-')}"
    if choices := re.search(r"Literal\[([^\]]*)\]", text):
        names = re.findall(r"'([^']*)'", choices[1])
        near = ", ".join(difflib.get_close_matches(value, names, n=1, cutoff=0.4))
        near = f"; nearest: {near}" if near else ""
        return f"{option} must be one of {', '.join(names)}, got {value!r}{near}"
    if kind := re.search(r"Expected a <class '(\w+)'>", text):
        return f"{option} must be {_KINDS.get(kind[1], kind[1])}, got {value!r}"
    return message


def _long_options(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the options of a verb whose function has these `parameters`."""
    return [
        f"--{name.replace('_', '-')}"
        for name, parameter in parameters.items()
        # what has no default is given by its place alone
        if name not in ("overrides", "changes", "words")
        and parameter.default is not parameter.empty
    ]


def _did_you_mean(unknown: str, parser: _Parser) -> str:
    """Return "; did you mean --quick?" for `unknown` words as "--quik", or what else to do."""
    if not unknown:
        return ""
    names = [word.partition("=")[0].replace("_", "-") for word in unknown.split()]
    names = [name for name in names if name.startswith("--")]
    placed = [name[2:] for name in names if name in parser.places]
    if placed:
        verb = parser.prog.rpartition(" ")[2]
        return f"; {' and '.join(placed)} must be given by place, as in `{EXAMPLES[verb]}`"
    off = [
        f"{name.replace('--no-', '--')} false"
        for name in names
        if name.replace("--no-", "--") in parser.options and name not in parser.options
    ]
    if off:
        return f"; did you mean {', '.join(off)}?"
    near = [
        x for name in names for x in difflib.get_close_matches(name, parser.options, 1, cutoff=0.7)
    ]
    if near:
        return f"; did you mean {', '.join(dict.fromkeys(near))}?"
    what = "its options are" if names else "what it takes is"
    return f"; {what} listed by `{parser.prog} --help`"


def _overview() -> str:
    """Return the text of `stability --help`."""
    verbs = "".join(f"  stability {verb:10} {text}\n" for verb, (_, text) in VERBS.items())
    codes = "".join(
        textwrap.fill(f"{code:<3} {text}", 80, initial_indent="  ", subsequent_indent=" " * 6)
        + "\n"
        for code, text in EXIT_CODES.items()
    )
    return (
        f"usage: stability VERB ...\n\n{verbs}\n`stability VERB --help` says what a verb takes, "
        f"`stability docs` lists tutorials\n\nexit codes:\n{codes}"
    )


def _fail(message: str) -> NoReturn:
    """Print `message` on standard error, and exit with the code for wrong input."""
    said = f"stability: {readable(' '.join(message.split()))}"
    sys.stderr.write(f"{in_lines(said, sys.stderr)}\n")
    sys.exit(WRONG)


if __name__ == "__main__":
    sys.exit(main())
