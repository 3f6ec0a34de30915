"""Finds the layers or rounding points that carry a divergence, by halving the change.

First a fork makes the whole change. Then one fork makes each half of it alone, and the half that
moves the weights further is halved again, as long as it alone carries most of the drift. Every fork
starts from the same bits and sees the same batches. How a fork is made is left to `fork`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attention_kernels.profiles import DEFAULT_FLASH_PROFILE, PROFILES
from stability.config.arms import override
from stability.config.convert import from_dict, to_dict
from stability.config.schema import ArmConfig, AttentionConfig
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import recorded_steps

__all__ = ["CARRIES", "Halving", "halve", "plan_layers", "plan_points", "step_to_compare"]

CARRIES = 0.5
"""A part carries the divergence if alone it moves the weights this share of the whole's drift."""


@dataclass(frozen=True, slots=True)
class Halving:
    """One fork of a bisection: the parts that were changed, and how far that moved the weights."""

    parts: tuple[str, ...]
    drift: float


def halve(parts: Sequence[str], measure: Callable[[tuple[str, ...]], float]) -> list[Halving]:
    """Return every measurement, the last being the smallest set found that carries the drift.

    `measure` returns the drift with only those parts changed. Stops where neither half alone moves
    the weights CARRIES times as far as both together: then the parts act together.
    """
    found = [Halving(tuple(parts), measure(tuple(parts)))]
    carrier = found[0]
    while len(carrier.parts) > 1 and carrier.drift > 0:
        middle = len(carrier.parts) // 2
        halves = [
            Halving(part, measure(part))
            for part in (carrier.parts[:middle], carrier.parts[middle:])
        ]
        best = max(halves, key=lambda half: half.drift)
        found += [half for half in halves if half is not best]
        if best.drift < CARRIES * carrier.drift:
            found += [best, carrier]
            break
        found.append(best)
        carrier = best
    return found


def plan_layers(
    parent: RunPaths, changes: Mapping[str, Any]
) -> tuple[list[str], Callable[[tuple[str, ...]], dict[str, Any]]]:
    """Return the layers of the run's model, and what changes only some of them.

    ValueError if `changes` are not of the attention, or the run's own attention is changed in parts
    already: a fork would lose them.
    """
    config = _config(parent)
    attention = _attention_of(config, changes)
    layers = config.model.layer_names
    return layers, lambda some: {"attention": {**attention, "layers": list(some)}}


def plan_points(
    parent: RunPaths, changes: Mapping[str, Any]
) -> tuple[list[str], Callable[[tuple[str, ...]], dict[str, Any]]]:
    """Return the numerics fields that `changes` sets away from the run's own flash attention.

    A run whose attention is no flash attention is taken from the profile fa2. ValueError if the
    changed attention is no flash attention, or equals it, and as `plan_layers`.
    """
    config = _config(parent)
    attention = from_dict(AttentionConfig, _attention_of(config, changes), "bisect")
    if attention.implementation != "flash":
        raise ValueError(
            "bisect: --over points needs a change to flash attention, got "
            f"{attention.implementation!r}; use --over layers"
        )
    before = (
        config.attention
        if config.attention.implementation == "flash"
        else AttentionConfig(implementation="flash", profile=DEFAULT_FLASH_PROFILE)
    )
    old, new = (
        PROFILES[one.profile or DEFAULT_FLASH_PROFILE].with_(**one.numerics).to_dict()
        for one in (before, attention)
    )
    points = [name for name in new if new[name] != old[name]]
    if not points:
        raise ValueError("bisect: the change must set a rounding point, it sets none")
    start = {"implementation": "flash", "profile": before.profile or DEFAULT_FLASH_PROFILE}
    return points, lambda some: {
        "attention": {
            **start,
            "numerics": {**before.numerics, **{name: new[name] for name in some}},
        }
    }


def step_to_compare(parent: RunPaths, at: int, until: int) -> int:
    """Return the step at which forks are compared with `parent`: the first snapshot after `at`.

    One that was dropped counts too: the parent is trained anew then.
    ValueError if `until` is given and is no such step, or if there is none.
    """
    later = [step for step in recorded_steps(parent) if step > at]
    if not later:
        raise ValueError(
            f"bisect: at must be a step with a snapshot after it, got {at}; {parent.root} has none"
        )
    if until and until not in later:
        raise ValueError(
            f"bisect: until must be a step after {at} with a snapshot, got {until}; {parent.root} "
            f"has {', '.join(map(str, later))}"
        )
    return until or later[0]


def _config(parent: RunPaths) -> ArmConfig:
    return from_dict(ArmConfig, read_manifest(parent.manifest).config, str(parent.manifest))


def _attention_of(config: ArmConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed attention, whole, as a mapping."""
    if config.attention.is_partial:
        raise ValueError(
            "bisect: the run's own attention must be the same in every layer and direction, got "
            f"layers {', '.join(config.attention.layers)}, direction {config.attention.direction}; "
            "take a run that changes no part, e.g. its baseline"
        )
    if set(changes) != {"attention"}:
        got = ", ".join(changes) or "none"
        raise ValueError(
            f"bisect: changes must be of the attention, got {got}; e.g. --set attention.profile=fa3"
        )
    return to_dict(override(config, changes, where="bisect").attention)
