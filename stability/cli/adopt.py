"""`stability adopt NAME=FOLDER ...`: make a study of series of checkpoints that exist already."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stability.cli.output import HOLDS, print_line
from stability.records.object_store import at_hand, is_url, shown_url

__all__ = ["adopt", "option_help", "split_options"]

_PAIRS = ("--change", "--role", "--rename")


def adopt(
    study: str = "adopted",
    out: Path = Path("runs"),
    seed: int = 0,
    question: str = "",
    words: dict[str, dict[str, str]] | None = None,
) -> int:
    """Adopt series of checkpoints as the arms of a study: drift over steps, ladder and report.

    Each folder holds checkpoints with their step in the name: Hugging Face folders, safetensors,
    Lightning's, what torch.save wrote, or folders of torch.distributed.checkpoint. One series is
    called `baseline`. A folder may be a URL in an object store, such as s3://bucket/folder. What
    checkpoints can't prove of the pair contract is said to be declared or
    unknown.

    Args:
        study: the study's name, and that of its folder
        out: folder that gets a folder named after the study
        seed: the seed that these series share; adopt once for each
        question: what the study asks
        words: series, changes, roles and new names
    """
    from rich.console import Console  # heavy from here on: torch
    from rich.table import Table

    from stability.study import adopt as adoption

    given = words or {}
    series = given.get("series", {})
    with ExitStack() as copies:
        folders = {
            name: copies.enter_context(at_hand(place, print_line)) for name, place in series.items()
        }
        planned = adoption.plan_adoption(folders, given.get("--rename"))
        adopted = adoption.adopt(
            planned,
            out,
            study,
            seed,
            changes=given.get("--change"),
            roles=given.get("--role"),
            question=question,
            urls={name: shown_url(place) for name, place in series.items() if is_url(place)},
        )
    steps = planned.steps
    print_line(
        f"{study}, seed {seed}: {len(planned.series)} arms, {_steps_text(steps)}, "
        f"{len(planned.names['baseline'])} weights"
    )
    table = Table("the pair contract", "", "", box=None, pad_edge=False)
    for part, standing, said in adopted.contract:
        table.add_row(part, standing, said)
    Console().print(table)
    for note in adopted.notes:
        print_line(f"  {note}")
    print_line(f"ladder: stability show {adopted.folder}")
    return HOLDS


def _steps_text(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"1 step, {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def option_help() -> str:
    """Return what the words are."""
    return (
        "NAME=FOLDER ...: the series, two or more, one of them baseline=FOLDER\n"
        "--change NAME=TEXT: what the arm differs in, as far as you know\n"
        "--role NAME=ROLE: candidate, reference, rerun, broken or yardstick\n"
        "--rename OLD=NEW: what names begin with, and what they are to begin with"
    )


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `NAME=FOLDER` and the options that name an arm from the verb's other arguments.

    ValueError for one without a value, or given twice.
    """
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {"series": {}, **{name: {} for name in _PAIRS}}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        option, equals, value = word.partition("=")
        if option in _PAIRS:
            _add(found[option], option, value if equals else (remaining or [""]).pop(0))
        elif word.startswith("-"):
            rest.append(word)
            if not equals and remaining and word not in ("-h", "--help"):
                rest.append(remaining.pop(0))
        else:
            _add(found["series"], "a series", word)
    return rest, {"words": found}


def _add(pairs: dict[str, str], what: str, text: str) -> None:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise ValueError(f"adopt: {what} must be NAME=VALUE, got {text!r}")
    if name in pairs:
        raise ValueError(f"adopt: {what} must name {name} once, got {pairs[name]!r} and {value!r}")
    pairs[name] = value
