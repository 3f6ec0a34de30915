"""The entry point: finds a verb's function, parses its arguments, turns errors into one line.

It is built to start quickly: a verb's module is imported only when the verb is used, and a verb
imports torch, Lightning, plotly and their like only once it needs them. So `--help` and a mistake
in the command or the YAML take a fraction of a second. What the exit codes say stands in `output`.
"""

import argparse
import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from stability import __version__
from stability.cli.output import EXIT_CODES, FAILS, HOLDS, INTERRUPTED, WRONG
from stability.records.atomic_files import DiskFullError

__all__ = ["main"]

VERBS = {
    "run": ("stability.cli.run", "train every arm of a study and show the ladder"),
    "verdict": ("stability.cli.verdict", "say PASS, FAIL or INCONCLUSIVE of a candidate"),
    "verify": ("stability.cli.verdict", "prove that runs keep the pair contract"),
    "show": ("stability.cli.show", "print the ladder of a study, or all about one arm"),
    "report": ("stability.cli.report", "write the HTML report of a study"),
    "dashboard": ("stability.cli.report", "show all studies of a folder in the browser, live"),
    "figure": ("stability.cli.figure", "draw a picture of a study for a paper"),
    "workspace": ("stability.cli.workspace", "build a study's panels in the W&B app"),
    "fork": ("stability.cli.fork", "train on from a run's state with one thing changed"),
    "bisect": ("stability.cli.fork", "find the layers or rounding points that carry a change"),
    "compare": ("stability.cli.compare", "measure the drift between any two sets of weights"),
    "deviate": ("stability.cli.deviate", "measure attention numerics against FP64, point by point"),
    "probe": ("stability.cli.probe", "compare a candidate attention inside a Hugging Face model"),
    "experiment": ("stability.cli.experiment", "put a published claim to the test"),
    "doctor": ("stability.cli.doctor", "show which attentions and formats run on this machine"),
}


class _HelpFormatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help whose last paragraph keeps its lines."""


class _Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        _fail(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a dash that the terminal lacks stops nothing
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return HOLDS
    if words[0] == "--version":
        sys.stdout.write(f"stability {__version__}\n")
        return HOLDS
    verb, *rest = words
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=3, cutoff=0.4) or list(VERBS)
        _fail(f"no verb {verb!r}; nearest: {', '.join(near)}")
    try:
        return _run_verb(verb, rest)
    except (ValueError, FileNotFoundError) as error:
        _fail(str(error))
    except DiskFullError as error:
        sys.stderr.write(f"stability: {error}; free some, and the same command goes on from here\n")
        return FAILS
    except OSError as error:
        _fail(f"{error.filename or verb}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.stderr.write("stability: interrupted; the same command goes on from here\n")
        return INTERRUPTED


def _run_verb(verb: str, words: list[str]) -> int:
    # How long an idle OpenMP thread spins before it sleeps, read when torch is loaded; no bit
    # depends on it. By default it is so long that another busy process slows training 10- to
    # 30-fold; at this value 5-fold, and alone nothing is lost (2 cores, libgomp of torch 2.13).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    module = importlib.import_module(VERBS[verb][0])
    command = getattr(module, verb)
    parser = _Parser(prog=f"stability {verb}", formatter_class=_HelpFormatter)
    parser.add_function_arguments(command, as_positional=True, skip={"overrides", "changes"})
    further: dict[str, Any] = {}
    if "split_options" in vars(module):  # options whose names no signature can list
        parser.epilog = module.option_help()
        words, further = module.split_options(words)
    arguments = parser.parse_args(_with_values(command, words)).as_dict()
    return command(**arguments, **further)


def _with_values(command: Callable[..., int], words: list[str]) -> list[str]:
    """Return `words` as jsonargparse wants them.

    A bare bool option gets "=true", and a name written with dashes gets underscores. An argument
    without a name that comes after the required ones goes to the next optional parameter that is a
    path or a name.
    """
    every = inspect.signature(command).parameters
    parameters = {f"--{name}": parameter for name, parameter in every.items()}
    required = sum(parameter.default is parameter.empty for parameter in every.values())
    further = (Path | None, str | None)
    spare = [name for name, parameter in parameters.items() if parameter.annotation in further]
    found: list[str] = []
    takes_value = False
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name
        if name in parameters:
            bare = parameters[name].annotation is bool and not equals
            word = f"{name}=true" if bare else f"{name}{equals}{value}"
        elif not word.startswith("-") and not takes_value:
            required -= 1
            if required < 0 and spare:
                word = f"{spare.pop(0)}={word}"
        takes_value = word.startswith("--") and "=" not in word
        found.append(word)
    return found


def _overview() -> str:
    verbs = "".join(f"  stability {verb:9} {text}\n" for verb, (_, text) in VERBS.items())
    codes = "".join(f"  {code:<3} {text}\n" for code, text in EXIT_CODES.items())
    return (
        f"usage: stability VERB ...\n\n{verbs}\n`stability VERB --help` says what a verb takes.\n\n"
        f"exit codes:\n{codes}"
    )


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"stability: {' '.join(message.split())}\n")
    sys.exit(WRONG)


if __name__ == "__main__":
    sys.exit(main())
