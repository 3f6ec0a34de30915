"""What each arm of a study is there for, and up to which step it trains.

An arm's entry in the YAML may give both, as `role` and `until`, and the path of its `change`; they
are no part of the config of a run. A role that is not given follows from what the arm changes. The
roles:

- `baseline`: every other arm is paired with it;
- `candidate`: the change that is in question, and is judged;
- `reference`: plain attention one precision higher than the baseline's, from which both sides'
  distances are measured, so that the baseline's own error is not taken for the candidate's;
- `rerun`: changes nothing; what it drifts is the noise of machine and layout;
- `nudge`: other bits of the same start, so the same numerics under another draw of chaos;
- `broken`: a known error, planted to show that the study would have seen it;
- `yardstick`: a change that everybody accepts, such as another seed.

Leaves out which differences make a pair (`analysis.pair_contract`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

from stability.config.attentions import IMPLEMENTATIONS
from stability.config.axes import axes_of, touches
from stability.config.commands import PRECISION_QUESTION
from stability.config.convert import Place, nearest
from stability.config.schema import (
    BASELINE,
    ArmConfig,
    AttentionConfig,
    Role,
    TrainConfig,
)

__all__ = [
    "REFERENCE_AXES",
    "as_reference",
    "check_end",
    "check_in_question",
    "check_one_reference",
    "default_role",
    "given_change",
    "given_role",
    "given_until",
    "is_control",
    "order_of_role",
    "overrides_of",
    "role_of",
]

REFERENCE_AXES = ("attention", "precision")
"""The axes that a reference may change at once: no other role may change two."""

_KEYS = ("role", "until", "change")
_ROLES: tuple[Role, ...] = get_args(Role)
_ORDER: tuple[Role, ...] = ("baseline", "reference", "nudge", "rerun")
"""Roles in the order in which a seed's runs are trained; those of other roles come after them, as
they stand in the study. A candidate's first snapshot then finds every control it is held against,
and the step at which it is judged can be fixed before its own numbers exist."""
_RANK = {"64-true": 2, "32-true": 1}
"""How high a precision is; every other one has matmuls on 16 bits or fewer."""
_ACCEPTED_AXES = {"seed.init_offset", "model.init", "seed.order_offset"}


def overrides_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an arm's entry lays over the base: all but role, end and declared change."""
    return {key: value for key, value in entry.items() if key not in _KEYS}


def is_control(role: Role) -> bool:
    """Whether the arms of a seed are measured from this one's weights, so that it trains first."""
    return role in _ORDER


def order_of_role(role: Role) -> int:
    """Return the place of a role's runs among those of one seed."""
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


def given_role(entry: Mapping[str, Any], place: Place) -> Role | None:
    """Return the role that an arm's entry gives, None if it gives none.

    ConfigError names `place` and the nearest roles for a word that is none.
    """
    word = entry.get("role")
    if word is None:
        return None
    if word not in _ROLES:
        raise place.at("role").error(
            f"must be a role, got {word!r}; nearest: {nearest(word, _ROLES)}"
        )
    return word


def given_change(entry: Mapping[str, Any], place: Place) -> str:
    """Return the path that an arm's entry declares to hold its one change; empty if none is given.

    ConfigError for what is no text. Whether it holds all that differs, the pair contract says.
    """
    change = entry.get("change", "")
    if not isinstance(change, str) or ("change" in entry and not change):
        raise place.at("change").error(
            f"must be a path of the config, such as optimizer.lr, got {change!r}"
        )
    return change


def given_until(entry: Mapping[str, Any], train: TrainConfig, place: Place) -> int:
    """Return the last step that an arm trains to, the baseline's where its entry gives none.

    ConfigError unless it is a step with a snapshot: an arm that ended elsewhere could be compared
    at its last step with nobody.
    """
    until = entry.get("until")
    if until is None:
        return train.steps
    where = place.at("until")
    if type(until) is not int:
        raise where.error(f"must be a whole number, got {until!r}")
    if until > train.steps:
        raise where.error(f"must not lie beyond the last step, {train.steps}, got {until}")
    steps = train.planned_snapshots()[1:]
    if until not in steps:
        listed = ", ".join(map(str, steps))
        raise where.error(f"must be a step with a snapshot, got {until}; they are {listed}")
    return until


def check_end(until: int, train: TrainConfig, place: Place, *, is_judged: bool) -> None:
    """ConfigError where an arm that is judged ends before the study does.

    Its outcome, divergence and spikes included, would be that of a shorter training, and a PASS
    would speak of steps that it never took.
    """
    if is_judged and until < train.steps:
        raise place.at("until").error(
            f"must be the last step, {train.steps}, in an arm that is judged, got {until}; leave "
            "it out, or shorten train.steps for all arms"
        )


def as_reference(
    base: ArmConfig, config: ArmConfig, entry: Mapping[str, Any], place: Place
) -> ArmConfig:
    """Return `config` as a reference for `base`: plain attention, one precision higher.

    A precision or attention that the arm's entry gives is kept if it will do. ConfigError if it
    will not, or if there is no higher precision.
    """
    if base.precision == "64-true":
        raise place.at("role").error(
            f"must not be reference where the {BASELINE} is 64-true already: nothing is higher; "
            "leave the arm out, and the training level does not apply"
        )
    if "precision" not in entry:
        config = replace(config, precision="64-true" if _RANK.get(base.precision) else "32-true")
    elif _RANK.get(config.precision, 0) <= _RANK.get(base.precision, 0):
        raise place.at("precision").error(
            f"must be higher than the {BASELINE}'s {base.precision} in a reference, got "
            f"{config.precision!r}; leave it out for the next higher one"
        )
    if "attention" not in entry and not _is_plain(base.attention):
        config = replace(config, attention=AttentionConfig())
    if not _is_plain(config.attention):
        raise place.at("attention").error(
            f"must be plain in a reference, got {config.attention.implementation!r} with what it "
            "changes; leave it out"
        )
    return config


def role_of(
    given: Role | None,
    name: str,
    differences: Mapping[str, Any],
    yardstick: str,
    place: Place,
) -> Role:
    """Return the role of the arm `name`; ConfigError if the one `given` can't be that of the arm.

    `differences` are those of its config from the baseline's.
    """
    role = given or default_role(name, differences, yardstick)
    axes = axes_of(differences)
    problem = ""
    if (role == BASELINE) != (name == BASELINE):
        problem = f"must be {BASELINE} in the arm of that name alone, got {role!r}"
    elif role == "rerun" and axes:
        problem = f"must not be rerun in an arm that changes {', '.join(axes)}"
    elif role == "nudge" and axes != ["nudge"]:
        problem = f"must not be nudge in an arm that changes {', '.join(axes) or 'nothing'}"
    elif role == "reference" and (others := [axis for axis in axes if not _may_be_higher(axis)]):
        problem = f"must not be reference in an arm that also changes {', '.join(others)}"
    elif role == "broken" and not axes:
        problem = "must not be broken in an arm that changes nothing; plant a fault on it"
    if problem:
        raise place.at("role").error(problem)
    return role


def check_one_reference(role: Role, arms: Iterable[Any], place: Place) -> None:
    """ConfigError if an arm of this role is a second reference beside `arms`, which have roles."""
    first = next((arm for arm in arms if arm.role == role == "reference"), None)
    if first is not None:
        raise place.at("role").error(
            f"must be reference in one arm of a study, and {first.name} is one"
        )


def check_in_question(role: Role, name: str, candidates: Iterable[str], place: Place) -> None:
    """ConfigError for the reference among the policy's `candidates`.

    That it is no worse than the baseline says nothing of the baseline, which it is there to judge.
    """
    if role == "reference" and name in candidates:
        raise place.at("role").error(
            f"must not be reference in an arm of policy.candidates, got {name!r}: a "
            "reference that is no worse than the baseline proves nothing about the baseline; "
            f"{PRECISION_QUESTION}"
        )


def _may_be_higher(axis: str) -> bool:
    """Whether a reference may change `axis`; nobody can tell what a command's flags mean.

    Nor what a call's `config` does, or what was declared of checkpoints.
    """
    return axis in REFERENCE_AXES or touches([axis], ("program", "flags", "env", "config"))


def default_role(name: str, differences: Mapping[str, Any], yardstick: str) -> Role:
    """Return the role of an arm that gives none, by its name and what it changes."""
    axes = axes_of(differences)
    if name == BASELINE:
        return "baseline"
    if not differences:
        return "rerun"
    if axes == ["nudge"]:
        return "nudge"
    if {"attention.fault", "parallel.fault"} & differences.keys():
        return "broken"
    if name == yardstick or set(axes) <= _ACCEPTED_AXES:
        return "yardstick"
    return "candidate"


def _is_plain(attention: AttentionConfig) -> bool:
    """Whether an attention is the plain one, all of it, with nothing changed and no fault."""
    default = IMPLEMENTATIONS["baseline"].default
    return (
        attention.implementation == "baseline"
        and attention.profile in ("", default)
        and not attention.numerics
        and not attention.fault
        and not attention.is_partial
    )
