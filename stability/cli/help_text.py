"""How the help of a verb looks: options as they are typed, no types, an example at its end."""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import jsonargparse

__all__ = ["EXAMPLES", "PLAIN_WORDS", "HelpFormatter", "end_of_help"]

PLAIN_WORDS = (Path | None, str | None)
"""The types of the parameters that may be given as plain words after the required ones."""

EXAMPLES = {
    "demo": "stability demo --out runs",
    "docs": "stability docs my_kernel",
    "check": "stability check my_kernel:attend --quick --dtype bf16",
    "run": "stability run study.yaml --seeds 5 --keep none",
    "estimate": "stability estimate study.yaml --train.steps 1000",
    "verdict": "stability verdict runs/quickstart --arm flash_fa2 --markdown",
    "verify": "stability verify runs/quickstart --all",
    "export": "stability export runs/quickstart --to quickstart.bundle.tar.gz",
    "status": "stability status runs/quickstart",
    "show": "stability show runs/quickstart flash_fa2",
    "report": "stability report runs/quickstart --open",
    "dashboard": "stability dashboard runs --port 8765",
    "figure": "stability figure runs/quickstart --what drift --format pdf",
    "workspace": "stability workspace runs/quickstart --json",
    "fork": "stability fork runs/mine/baseline/seed-0 --at 20 --set flags.lr=0.001",
    "bisect": "stability bisect runs/s/fa2/seed-0 --at 9 --set attention.profile=fa3",
    "init": "stability init --candidate lr=0.2 -- python train.py --lr 0.1 --seed 0",
    "adopt": "stability adopt baseline=checkpoints/a candidate=checkpoints/b",
    "record": "stability record --study mine --arm baseline -- python train.py",
    "compare": "stability compare one.safetensors other.safetensors",
    "deviate": "stability deviate --profile fa2,all_bf16 --length 256,1024 --backward",
    "probe": "stability probe --model FOLDER --text README.md --candidate flash:fa2",
    "experiment": "stability experiment stable_fig3 --size quick",
    "doctor": "stability doctor",
}
"""A use of each verb, at the end of its help; no longer than the rest of a line of 80 columns."""


def end_of_help(verb: str, options: str = "") -> str:
    """Return what stands below the options: what no signature lists, by line, and an example."""
    lines = []
    for line in options.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped = textwrap.wrap(line, 79, subsequent_indent=indent, break_on_hyphens=False)
        lines += wrapped or [""]
    return "\n".join([*lines, "", f"example: {EXAMPLES[verb]}"]).lstrip("\n")


class HelpFormatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formats help for people: options as they are typed, words that they take, no Python types.

    The epilog is not rewrapped: `option_help` may list keys by line.
    """

    def start_section(self, heading: str | None) -> None:
        """Begin a group of options, whose heading may be long."""
        super().start_section(textwrap.fill(heading, self._width - 1) if heading else heading)

    def _get_help_string(self, action: argparse.Action) -> str:
        if "help" in action.dest and action.nargs == 0:
            return "show this help and exit"
        said = action.help or ""
        said = said if said.endswith("...") else said.rstrip(".")
        if action.default is True and action.option_strings:
            return f"{said}; on, unless {_spelt(action)} false"
        # percent signs would be filled in by argparse
        default = str(action.default).replace("%", "%%")
        is_given = action.default not in (None, "", False, 0, argparse.SUPPRESS)
        if action.option_strings and is_given and default not in said:
            said += f" (default: {default})"
        return said

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return action.dest.upper()
        option = _spelt(action)
        words = _choices(action)
        if action.nargs == 0 or words == ("true", "false"):
            return option
        return f"{option} {{{','.join(words)}}}" if words else f"{option} {_kind(action)}"

    def _format_usage(self, usage: str | None, actions: Iterable[argparse.Action], *_: Any) -> str:
        places = []
        for action in actions:
            if not action.option_strings:
                places.append(action.dest.upper())
            elif getattr(action, "_typehint", None) in PLAIN_WORDS:
                places.append(f"[{action.dest.upper()}]")
        return f"usage: {' '.join([self._prog, *places, '[options]'])}\n\n"


def _spelt(action: argparse.Action) -> str:
    """Return an option as it is typed."""
    return max(action.option_strings, key=len).replace("_", "-")


def _choices(action: argparse.Action) -> tuple[str, ...]:
    """Return the words that an option takes; none if it takes others than a list of them."""
    kind = getattr(action, "_typehint", None)
    kinds = (kind, *get_args(kind))
    if bool in kinds:
        return ("true", "false")
    found = next((get_args(each) for each in kinds if get_origin(each) is Literal), ())
    return tuple(map(str, found or action.choices or ()))


def _kind(action: argparse.Action) -> str:
    """Return what an option takes in one word."""
    kinds = (
        getattr(action, "_typehint", action.type),
        *get_args(getattr(action, "_typehint", None)),
    )
    names = {int: "N", float: "X", Path: "PATH"}
    return next((name for kind, name in names.items() if kind in kinds), "TEXT")
