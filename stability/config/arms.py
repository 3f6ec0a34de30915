"""The arms of a study: the whole config of each, and its difference from the baseline.

Everything here is a function of the config. Whether a difference is allowed is the pair contract's
matter (`analysis.pair_contract`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stability.config.axes import MANY
from stability.config.commands import attention_name, is_command
from stability.config.convert import Place, from_mapping, merge, to_dict
from stability.config.diff import diff
from stability.config.flags import PLACE
from stability.config.launchers import layout_change
from stability.config.precision import precision_change, with_precision_text
from stability.config.roles import (
    as_reference,
    check_end,
    check_in_question,
    check_one_reference,
    given_change,
    given_role,
    given_until,
    overrides_of,
    role_of,
)
from stability.config.schema import BASELINE, ArmConfig, ProbeConfig, Role, SeedConfig
from stability.config.study import StudyConfig

__all__ = [
    "INDEPENDENT_AXES",
    "INIT_SEED",
    "Arm",
    "describe_change",
    "expand",
    "override",
    "probe_of_seed",
    "with_seed",
]

INIT_SEED = "seed.init_offset"
"""The axis of arms that start from another draw of the baseline's own init scheme."""

INDEPENDENT_AXES = (INIT_SEED, "model.init")
"""Axes whose arms start from weights that were drawn independently of the baseline's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One arm of a study: a run's description without its seed."""

    name: str
    config: ArmConfig
    diff: dict[str, tuple[Any, Any]]
    """Dotted config path -> (baseline's value, this arm's value)."""
    role: Role
    """What it is there for."""
    until: int
    """The step at which it stops; its learning rate follows the schedule of the whole length."""
    change: str = ""
    """The path that is declared to hold all that differs; empty if none is."""


def override(arm: ArmConfig, mapping: Mapping[str, Any], where: str | Place) -> ArmConfig:
    """Return `arm` with the values of `mapping` laid over it, group by group.

    An `attention` that names another implementation starts from that implementation's defaults.
    ConfigError names `where`, the key and the nearest valid names.
    """
    below = to_dict(arm)
    attention = mapping.get("attention")
    if isinstance(attention, Mapping):
        implementation = attention.get("implementation", arm.attention.implementation)
        if implementation != arm.attention.implementation:
            below["attention"] = {}
    place = where if isinstance(where, Place) else Place(source=where)
    mapping = with_precision_text(mapping, arm.precision, place)
    return from_mapping(ArmConfig, merge(below, mapping), place)


def expand(study: StudyConfig, root: Place | None = None) -> list[Arm]:
    """Return the arms of `study`, the baseline first.

    An arm that changes the attention is shadowed by the baseline's attention, every other arm by
    the study's `probe.shadows`. ConfigError names the place of an arm's mistake below `root`.
    """
    arms = []
    for name, entry in study.arms.items():
        place = root.at("arms").at(name) if root else Place(source=f"arms.{name}")
        arm = _arm(study, name, entry, place)
        check_one_reference(arm.role, arms, place)
        arms.append(arm)
    return sorted(arms, key=lambda arm: arm.name != BASELINE)


def _arm(study: StudyConfig, name: str, entry: Mapping[str, Any], place: Place) -> Arm:
    given = given_role(entry, place)
    changes = overrides_of(entry)
    config = override(study.base, changes, place)
    if given == "reference":
        config = as_reference(study.base, config, changes, place)
    if config.attention != study.base.attention:
        probe = replace(config.probe, shadows=(study.base.attention,), shadows_are="baseline")
        config = replace(config, probe=probe)
    differences = diff(study.base, config)
    role = role_of(given, name, differences, study.yardstick, place)
    until = given_until(entry, study.base.train, place)
    named = study.policy.candidates
    check_in_question(role, name, named, place)
    is_judged = name in named if named else role == "candidate"
    check_end(until, study.base.train, place, is_judged=is_judged)
    return Arm(
        name=name,
        config=config,
        diff=differences,
        role=role,
        until=until,
        change=given_change(entry, place),
    )


def with_seed(config: ArmConfig, seed: int) -> ArmConfig:
    """Return `config` with the study's seed; the arm's own offsets stay."""
    offsets = config.seed
    return replace(
        config,
        seed=SeedConfig(
            base=seed, init_offset=offsets.init_offset, order_offset=offsets.order_offset
        ),
    )


def probe_of_seed(probe: ProbeConfig, *, is_first: bool) -> ProbeConfig:
    """Return `probe` as a seed of the study is looked at: not at all if only the first one is.

    The whole model's gradient, six backward passes a look, is always the first seed's alone.
    """
    if is_first:
        return probe
    if probe.seeds == "first":
        return replace(probe, gradient_every=0, every=0, steps=(), per_decade=0)
    return replace(probe, gradient_every=0)


def describe_change(
    arm: str,
    axis: str,
    differences: Mapping[str, list[Any]],
    base: Mapping[str, Any],
    role: Role = "candidate",
) -> str:
    """Return what `arm` changes in the config `base`, e.g. `attention: baseline -> flash:fa2`.

    `differences` are those of the arm's config, as JSON holds them; so is `base`. Several at once
    are called confounded but in a `reference`, of which nobody asks which one moved it.
    """
    before = base.get("attention", {})
    if arm == BASELINE and is_command(base):
        return _program(base)
    if arm == BASELINE:
        return f"{_attention_label(before)}, {base.get('precision', '?')}"
    if not differences:
        return "nothing (A/A)"
    attention = {k: v for k, v in differences.items() if k.startswith("attention.")}
    described = _describe_named if is_command(base) else _describe_attention
    parts = [described(before, attention)] if attention else []
    others = sorted(differences.keys() - attention.keys(), key=list(differences).index)
    # what a change is meant to bring with it comes after it
    others.sort(key=lambda path: path.startswith("changes."))
    parts += [_describe(path, *differences[path]) for path in others]
    is_confounded = axis == MANY and role != "reference"
    return f"confounded: {'; '.join(parts)}" if is_confounded else "; ".join(parts)


def _program(base: Mapping[str, Any]) -> str:
    """Return a command's program, and what of its words is no flag: often the file of a config."""
    flags = base.get("flags", {})
    places = [name for name in flags if name.startswith(PLACE) and name[len(PLACE) :].isdigit()]
    places.sort(key=lambda name: int(name[len(PLACE) :]))
    return " ".join([str(base["program"]), *(str(flags[name]) for name in places)])


def _attention_label(attention: Mapping[str, Any]) -> str:
    """Return an attention's name: `flash:fa2`, `flash:fa2 (block_k=32)`, `baseline`."""
    label = str(attention.get("implementation", "baseline"))
    if attention.get("profile"):
        label += f":{attention['profile']}"
    numerics = attention.get("numerics", {})
    extras = [f"{key}={value}" for key, value in numerics.items() if value is not None]
    if attention.get("engine", "auto") != "auto":
        extras.append(f"engine={attention['engine']}")
    if attention.get("fault"):
        extras.append(f"fault={attention['fault']}")
    return f"{label} ({', '.join(extras)})" if extras else label


def _describe_attention(before: Mapping[str, Any], differences: Mapping[str, list[Any]]) -> str:
    after = {**before, "numerics": dict(before.get("numerics", {}))}
    for path, (_, value) in differences.items():
        _, key, *field = path.split(".")
        if field:
            after[key][field[0]] = value
        else:
            after[key] = value
    return f"attention: {_attention_label(before)} -> {_attention_label(after)}"


def _describe_named(before: Mapping[str, Any], differences: Mapping[str, list[Any]]) -> str:
    """Return a command's change of attention by the names that a study's YAML gives."""
    was = {"implementation": "", **before}
    after = was | {path.removeprefix("attention."): now for path, (_, now) in differences.items()}
    return f"attention: {_given(attention_name(was))} -> {_given(attention_name(after))}"


_OF_COMMANDS = {
    "flags": "--{0}: {1} -> {2}",
    "config": "{0}: {1} -> {2}",
    "config.declared": "declared: {2}",
    "env": "{0}: {1} -> {2}",
    "ref": "commit: {1:.12} -> {2:.12}",
    "python": "python: {1} -> {2}",
    "changes": "and so other {0}",
}
"""How a difference between two commands is told, by what its path begins with."""


_OF_VALUES = {
    "model.init": "initialisation: {1} -> {2}",
    "nudge.draw": "another coin (draw {2})",
    "nudge.ulps": "initial weights moved by {2} ULP",
    "optimizer.eps": "epsilon of Adam: {1:g} -> {2:g}",
}
"""How a difference of one value is told, where its path and both values would not do."""


def _given(value: Any) -> str:
    """Return a flag's or a variable's value as it was typed."""
    return "not given" if value in (None, "") else "given" if value is True else str(value)


def _describe(path: str, before: Any, after: Any) -> str:
    kind, _, name = path.partition(".")
    if kind in _OF_COMMANDS:
        is_place = kind == "flags" and name.startswith(PLACE)
        words = "argument {0}: {1} -> {2}" if is_place else _OF_COMMANDS[kind]
        name = name[len(PLACE) :] if is_place else name
        return _OF_COMMANDS.get(path, words).format(name, _given(before), _given(after))
    if path == "program" and (words := layout_change(str(before), str(after))):
        return "layout: {} -> {}".format(*(each or "one process" for each in words))
    if path == "precision":
        return precision_change(before, after)
    if path == "seed.init_offset":
        return f"other initial weights (seed {after - before:+d})"
    if path == "seed.order_offset":
        return f"other batch order (seed {after - before:+d})"
    if path == "train.compile":
        return f"torch.compile: {before or 'none'} -> {after or 'none'}"
    return _OF_VALUES.get(path, "{0}: {1} -> {2}").format(path, before, after)
