"""What an arm changes: its axis, a path of the config, and the group that the axis belongs to.

An axis is derived from the differences between two arms: the one path that all of them lie on. A
single value is its own axis, e.g. `optimizer.lr`; an attention and a nudge are chosen as a whole.
Several values of one group are one change where the arm declares it: `change: optimizer`. The
groups label tables, and are what the pair contract frees: `touches` says whether a difference lies
on a path. Leaves out whether a difference is allowed (`analysis.pair_contract`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from stability.config.launchers import layout_change
from stability.config.schema import BASELINE

__all__ = [
    "CHANGES_WEIGHTS",
    "MANY",
    "NO_AXIS",
    "WHOLES",
    "Group",
    "axes_of",
    "change_problem",
    "fixed_problem",
    "groups_of",
    "lies_on",
    "present_name",
    "touches",
    "why_fixed",
]

Group = Literal[
    "attention",
    "precision",
    "optimizer",
    "schedule",
    "data",
    "batch",
    "init",
    "model",
    "compile",
    "layout",
    "code",
    "flags",
    "environment",
]
"""What a change is about, in a word that tables and W&B show."""

NO_AXIS, MANY = "none", "many"
"""The axis of an arm that changes nothing, and of one that changes several at once."""

WHOLES = ("attention", "nudge", "parallel")
"""Paths whose values are chosen together: however many of them differ, it is one change."""

CHANGES_WEIGHTS = ("model.qk_norm",)
"""Axes whose arms have weights that the baseline has not, or lack some of its own.

Drift is then over the weights that both have, and these must begin as the same bits."""

_GROUPS: dict[str, Group] = {
    "attention": "attention",
    "precision": "precision",
    "optimizer": "optimizer",
    "train.grad_clip": "optimizer",
    "train.trainer.gradient_clip_algorithm": "optimizer",
    "optimizer.warmup_steps": "schedule",
    "seed.order_offset": "data",
    "train.batch_size": "batch",
    "train.trainer.accumulate_grad_batches": "batch",
    "model.init": "init",
    "seed.init_offset": "init",
    "nudge": "init",
    "parallel": "layout",
    "model.init_std": "init",
    "model.dropout": "model",
    "model.heads": "model",
    "model.qk_norm": "model",
    "train.matmul_precision": "precision",
    "train.deterministic": "environment",
    "model.options": "model",
    "train.compile": "compile",
    "train.compile_options": "compile",
    "program": "code",
    "flags": "flags",
    "config": "flags",
    "env": "environment",
    "python": "environment",
    "deterministic": "environment",
    "ref": "code",
    "setup": "code",
    "start": "init",
    "changes.init": "init",
    "changes.batches": "batch",
}
"""The group of each path that an arm may change. The longest one that holds a path decides."""

_MEANT = "changes"
"""What an arm that is a command says of its own change (`commands`): part of that, and an axis only
where nothing else differs, as in a record of other batches that its environment gives."""

_OTHER_SHAPES = "its weights would have other shapes, and drift is measured weight by weight"
_OTHER_TEXT = "the text held out from training would be another, and outcomes are compared on it"
_STEP_BY_STEP = "the runs of a pair are compared step by step; `until` ends an arm early"
_NO_BITS = "it decides no bit of a run"

_FIXED: dict[str, str] = {
    "data": _OTHER_TEXT,
    "data.workers": _NO_BITS,
    "held_out": _OTHER_TEXT,
    "model": _OTHER_SHAPES,
    "model.options.folder": "it says where the config came from, which is in the arm itself",
    "model.options.mlp_width": _OTHER_SHAPES,
    "model.options.tied": _OTHER_SHAPES,
    "model.options.weights": "all arms begin from the same weights",
    "seed.base": "it is the study's own; list it in `seeds`",
    "train.accelerator": "both runs of a pair train on one kind of device",
    "train.checkpoint_every": _NO_BITS,
    "train.keep_checkpoints": _NO_BITS,
    "train.log_every": _STEP_BY_STEP,
    "train.snapshot_steps": _STEP_BY_STEP,
    "train.steps": _STEP_BY_STEP,
}
"""Why no arm may change the other paths. The longest one that holds a path decides here too."""

_FORMER_NAMES = {
    "data_order": "seed.order_offset",
    "init": "model.init",
    "optimizer_eps": "optimizer.eps",
    "seed": "seed.init_offset",
}
"""What four axes were called when each had a name of its own: older records say so."""


def lies_on(path: str, axis: str) -> bool:
    """Whether the dotted `path` is `axis` or lies below it."""
    return path == axis or path.startswith(f"{axis}.")


def touches(paths: Iterable[str], axes: Collection[str]) -> bool:
    """Whether one of the changed `paths` lies on one of `axes`."""
    return any(lies_on(path, axis) for path in paths for axis in axes)


def axes_of(paths: Iterable[str], change: str = "") -> list[str]:
    """Return the axes that changed `paths` lie on, each once, in their order.

    All that lies below `change`, the declared one, is one axis of that name, but for what is chosen
    as a whole.
    """
    wholes = (*WHOLES, change) if change else WHOLES
    found = (
        next((whole for whole in wholes if lies_on(path, whole)), path) for path in _own(paths)
    )
    return list(dict.fromkeys(found))


def _own(paths: Iterable[str]) -> list[str]:
    """Return the paths that are changes themselves: not what another one is meant to change."""
    every = list(paths)
    return [path for path in every if not lies_on(path, _MEANT)] or every


def groups_of(
    paths: Iterable[str] | Mapping[str, Sequence[Any]], *, is_other_layout: bool = False
) -> list[Group]:
    """Return the groups that changed `paths` lie in, each once, in the order of `Group`.

    By path -> (before, after) a program that is started in other processes is told from another
    program; `is_other_layout` where the runs themselves say that they were.
    """
    values = paths.get("program") if isinstance(paths, Mapping) else None
    is_launch = bool(values and layout_change(*map(str, values)))
    found: set[Group] = {
        "layout" if is_launch and path == "program" else _GROUPS[key]
        for path in _own(paths)
        if (key := _holding(path, _GROUPS))
    }
    if is_other_layout:
        found.add("layout")
    return [group for group in get_args(Group) if group in found]


def why_fixed(path: str) -> str:
    """Return why no arm may change `path`; empty if one may."""
    if lies_on(path, _MEANT):
        return ""
    free, fixed = _holding(path, _GROUPS), _holding(path, _FIXED)
    if free and len(free) >= len(fixed):
        return ""
    return _FIXED.get(fixed, "it is no value of an arm's config that decides its bits")


def fixed_problem(differences: Mapping[str, Sequence[Any]]) -> str:
    """Return what of `differences`, path -> (before, after), no arm may change; empty if nothing.

    A clause, for a sentence that begins with the arm.
    """
    for path, (before, after) in differences.items():
        if said := why_fixed(path):
            return f"{path} must be {before!r} as in the {BASELINE}, is {after!r}: {said}"
    return ""


def change_problem(paths: Collection[str], change: str = "") -> str:
    """Return why changes of `paths` are not one, the declared `change` if that is given.

    A clause as of `fixed_problem`; empty if they are one.
    """
    axes = axes_of(paths, change)
    own = _own(paths)
    if change and not (own and all(lies_on(path, change) for path in own)):
        return f"change must hold all that differs, {', '.join(axes) or 'nothing'}, got {change!r}"
    groups = groups_of(paths)
    if change and len(groups) > 1:
        return f"change must be of one group, got {change!r}, which is {' and '.join(groups)} here"
    if len(axes) < 2:
        return ""
    said = f"must differ in one axis, differs in {', '.join(axes)}; make an arm of each"
    whole = _common(axes)
    if whole and len(groups) == 1:
        said += f", declare them one change by `change: {whole}`"
    return f"{said}, or say allow_many: true"


def present_name(axis: str, paths: Collection[str] = ()) -> str:
    """Return today's name of an axis, of changed `paths`, that older records may call otherwise."""
    if axis == NO_AXIS and paths and all(lies_on(path, _MEANT) for path in paths):
        return next(iter(paths)) if len(paths) == 1 else MANY
    return _FORMER_NAMES.get(axis, axis)


def _holding(path: str, table: Iterable[str]) -> str:
    """Return the longest key of `table` that `path` lies on; empty if there is none."""
    return max((key for key in table if lies_on(path, key)), key=len, default="")


def _common(axes: Collection[str]) -> str:
    """Return the longest path that all `axes` lie below; empty if there is none."""
    split = [axis.split(".") for axis in axes]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
