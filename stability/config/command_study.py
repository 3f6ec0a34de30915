"""A study whose arms are commands: its YAML file, checked before anything runs.

Its base holds a `command` where that of our own trainer has a model; the rest of the file is the
same. What two arms differ in is one flag, one variable, the commit, the environment, or the nudge.
Leaves out how a command is run (`study.run_commands`).
"""

import difflib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stability.config.commands import (
    PLACEHOLDERS,
    attention_values,
    check_held_out,
    probe_settings,
)
from stability.config.convert import ConfigError, Place, from_mapping, merge, nearest, to_dict
from stability.config.diff import diff
from stability.config.flags import assigned_words, flag_words, setting_words
from stability.config.load import (
    arms_baseline_first,
    check_names,
    read_mapping,
    with_overrides,
)
from stability.config.masking import masked_values, secrets_in
from stability.config.roles import (
    check_in_question,
    check_one_reference,
    given_change,
    given_role,
    overrides_of,
    role_of,
)
from stability.config.schema import NudgeConfig, Role, require
from stability.config.study import PolicyConfig

__all__ = [
    "CommandArm",
    "CommandConfig",
    "CommandStudy",
    "expand_commands",
    "is_command_study",
    "load_command_study",
    "with_flags",
]

_SETTINGS = {"flags": flag_words, "settings": setting_words, "assigned": assigned_words}
"""Placeholders for an arm's flags: as `--lr 0.1`, as `lr=0.1` and as `--lr=0.1`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTrain:
    """How long every arm trains, and which of its states are kept."""

    steps: int
    """How many updates of the weights the command makes, at least 1."""
    snapshot_steps: tuple[int, ...] = ()
    """Updates after which the weights are kept; none: 1, 2, 5, 10, 20, ... and the last."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "train", "steps must be >= 1", self.steps)
        rule = f"snapshot_steps must be from 1 to steps, {self.steps}"
        inside = all(1 <= step <= self.steps for step in self.snapshot_steps)
        require(inside, "train", rule, list(self.snapshot_steps))

    def planned_snapshots(self) -> list[int]:
        """Return the steps with a snapshot, sorted: the first, the last and those asked for."""
        series = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
        kept = self.snapshot_steps or tuple(step for step in series if step < self.steps)
        return sorted({0, *kept, self.steps})


@dataclass(frozen=True, kw_only=True, slots=True)
class MeantChanges:
    """What an arm's change is meant to change besides the numerics: of a flag nobody can tell."""

    init: bool = False
    """The start weights: an arm may then start from others than the baseline's."""
    batches: bool = False
    """The batches: an arm may then train on others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandProbe:
    """The instrument in the script's process, of which `stability` must be a package there."""

    candidate: str = ""
    """Runs beside the script's own attention, as `flash:fa2`; empty: nothing is looked at. Where
    an arm has another `attention`, that one is compared with the script's own."""
    every: int = 10
    """Every so many updates its calls are compared, and held against FP64."""
    gradient_every: int = 0
    """Every so many updates also the whole model's gradient, of a model that returns its loss or
    all of its own that the loss is made of."""

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> dict[str, Any]:
        """Return it in JSON values; empty if nothing is looked at."""
        return probe_settings(self.candidate, self.every, self.gradient_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandConfig:
    """One arm: a training that a command does."""

    command: str
    """Split as a shell would; `{flags}`, `{settings}`, `{assigned}`, `{resume}`, `{seed}`, `{arm}`
    and `{out}`, a folder of the run's own, are filled in."""
    flags: dict[str, Any] = field(default_factory=dict)
    """By name without dashes. Null is not given, and as `{flags}` neither is false, and true has no
    value; as `{settings}` and `{assigned}` both are values, as `x=false`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that are set for the command, by name."""
    python: str = ""
    """The interpreter whose folder comes first on PATH; none: what PATH finds."""
    ref: str = ""
    """The git commit that is checked out for it; none: the working tree as it is."""
    setup: str = ""
    """A command that is run once in the checkout of each commit, as to build extensions."""
    start: str = ""
    """The checkpoint that `{resume}` stands for."""
    attention: str = field(
        default="", metadata={"form": '"module:function" or "module:function+fault"'}
    )
    """What takes the place of `scaled_dot_product_attention` in the script, `flash:fa2+dq_gain`
    for one with a planted fault; none: nothing."""
    held_out: str = ""
    """What is held out: MODULE:FUNCTION that returns the loss of a model, "all" that the script
    evaluates, or "none"; empty: what it evaluates every time and does not train on."""
    probe: CommandProbe = field(default_factory=CommandProbe)
    """What is looked at inside of the script's process."""
    deterministic: bool = True
    """Whether torch's deterministic algorithms are turned on for the script."""
    same_start: bool = False
    """Whether the baseline's start weights are given to every other arm of its seed."""
    nudge: NudgeConfig = field(default_factory=NudgeConfig)
    """The smallest change of the start weights, which shows what chaos makes of it."""
    changes: MeantChanges = field(default_factory=MeantChanges)
    """What the arm changes on purpose besides the numerics."""
    train: CommandTrain
    """How long every arm trains, and which of its states are kept."""

    def __post_init__(self) -> None:
        _words(self.command, "command")
        _words(self.setup, "setup")
        check_held_out(self.held_out)
        require(bool(self.command.strip()), "base", "command must not be empty", self.command)
        says = "{resume}" in self.command
        rule = "start must be given where the command has {resume}, and only there"
        require(says == bool(self.start), "base", rule, self.start)
        rule = "PATH must not be given with a python, whose folder comes first on it"
        require(not (self.python and "PATH" in self.env), "env", rule, self.env.get("PATH"))
        for name, value in self.flags.items():
            require(
                value is None or isinstance(value, (bool, int, float, str, list, tuple)),
                "flags",
                f"{name} must be a number, a text, true, false, null or a list",
                value,
            )

    def words(self) -> list[str]:
        """Return the command's words, with what differs from run to run still in braces."""
        # a command of a commit runs in another folder
        start = os.path.abspath(self.start)
        return [x.replace("{resume}", start) for x in with_flags(self.command, self.flags)]

    def recorded(self) -> dict[str, Any]:
        """Return what a record holds of it, in JSON values, what is secret masked."""
        values = masked_values(to_dict(self))
        program = values.pop("command")
        for secret, instead in secrets_in(_words(self.command, "command"), {}).items():
            program = program.replace(secret, instead)
        # no part of what a run is: its start is compared bit by bit, given or not
        values.pop("same_start")
        values["train"]["snapshot_steps"] = self.train.planned_snapshots()[1:]
        values["attention"] = attention_values(self.attention)
        values["flags"] = {k: v for k, v in values["flags"].items() if self._is_given(v)}
        if not self.held_out:
            del values["held_out"]  # older records have none
        if not self.probe.candidate:
            del values["probe"]
        return {"program": program, **values}

    def _is_given(self, value: Any) -> bool:
        """Whether a flag's value reaches the command; by identity, since 0 equals False."""
        says_false = any(place in self.command for place in ("{settings}", "{assigned}"))
        return value is not None and (value is not False or says_false)


def with_flags(command: str, flags: Mapping[str, Any]) -> list[str]:
    """Return a command's words with `flags` in their place, or at the end where it names none.

    ValueError for a text that is no words, or that has another placeholder than is known.
    """
    given: list[str] = []
    for word in _words(command, "command"):
        placed = [words for name, words in _SETTINGS.items() if word == f"{{{name}}}"]
        given += placed[0](flags) if placed else [word]
    is_placed = any(f"{{{name}}}" in command for name in _SETTINGS)
    return given if is_placed else [*given, *flag_words(flags)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandStudy:
    """As `StudyConfig`, of commands."""

    name: str
    question: str
    base: CommandConfig
    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...] = (0,)
    yardstick: str = ""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    allow_many: bool = False
    early_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandArm:
    """One arm of a study of commands: a run's description without its seed."""

    name: str
    config: CommandConfig
    diff: dict[str, tuple[Any, Any]]
    role: Role
    change: str


def is_command_study(path: Path) -> bool:
    """Whether a study's YAML file is one of commands; ConfigError if it can't be read."""
    if path.is_dir() or not path.exists():
        raise ConfigError(_no_file(path))
    base = read_mapping(path).get("base")
    return isinstance(base, Mapping) and "command" in base


def _no_file(path: Path) -> str:
    """Return that `path` is no file, which YAML files may have been meant, and how to get one."""
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    found = sorted(each for end in ("yaml", "yml") for each in folder.glob(f"*.{end}"))
    names = [str(each) for each in found if each.is_file()]
    near = difflib.get_close_matches(str(path), names, n=3, cutoff=0.6)
    there = f"nearest: {', '.join(near)}; " if near else ""
    if names and not near:
        there = f"there are {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; "
    return (
        f"{path}: must be a study's YAML file, got "
        f"{'a folder' if is_folder else 'no such file'}; "
        f"{there}`stability init` writes one, and `stability demo` needs none"
    )


def load_command_study(path: Path, overrides: Mapping[str, str] | None = None) -> CommandStudy:
    """Return the study of commands that the YAML file `path` describes.

    `overrides` maps dotted paths below `base`, e.g. `train.steps`, to values written as YAML.
    ConfigError, one line with file and key, for every mistake.
    """
    path = Path(path)
    changes = dict(overrides or {})
    root = Place(source=str(path), overridden=tuple(changes))
    content = read_mapping(path)
    content["base"] = with_overrides(content["base"], changes, root)
    content["arms"] = arms_baseline_first(content.get("arms"), root.at("arms"))
    study = from_mapping(CommandStudy, content, root)
    check_names(study, root)
    expand_commands(study, root)
    steps = study.base.train.planned_snapshots()
    if study.early_step and study.early_step not in steps:
        raise root.at("early_step").error(
            f"must be a step with a snapshot, got {study.early_step}; "
            f"they are {', '.join(map(str, steps))}"
        )
    return study


def expand_commands(study: CommandStudy, root: Place | None = None) -> list[CommandArm]:
    """Return the arms of `study`, the baseline first; ConfigError for an arm's mistake."""
    arms: list[CommandArm] = []
    base = study.base.recorded()
    for name, entry in study.arms.items():
        place = root.at("arms").at(name) if root else Place(source=f"arms.{name}")
        given = given_role(entry, place)
        if "until" in entry:
            raise place.at("until").error("must not be given: commands train to their end")
        config = from_mapping(CommandConfig, merge(to_dict(study.base), overrides_of(entry)), place)
        differences = diff(base, config.recorded())
        role = role_of(given, name, differences, study.yardstick, place)
        check_one_reference(role, arms, place)
        check_in_question(role, name, study.policy.candidates, place)
        arms.append(
            CommandArm(
                name=name,
                config=config,
                diff=differences,
                role=role,
                change=given_change(entry, place),
            )
        )
    return arms


def _words(text: str, name: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name}: must be words as of a shell, got {text!r}: {error}") from error
    known = (*PLACEHOLDERS, *_SETTINGS, "resume")
    for word in words:
        for each in _in_braces(word):
            if each.isidentifier() and each not in known:
                near = nearest(each, known)
                raise ValueError(f"{name}: {{{each}}} must be a known placeholder; nearest: {near}")
            if each in _SETTINGS and word != f"{{{each}}}":
                raise ValueError(f"{name}: {{{each}}} must be a word of its own, got {word!r}")
    return words


def _in_braces(word: str) -> list[str]:
    return [part.partition("}")[0] for part in word.split("{")[1:] if "}" in part]
