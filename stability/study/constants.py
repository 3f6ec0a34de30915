"""Buffers that no update of a training moves, as a causal mask: they are code, and no weights.

One attention makes a mask and another none, so a constant is in no snapshot and in no drift. At the
start it is hashed like any buffer (`recorder.inside.start_parts`). Running statistics never count
as one: a model in evaluation mode has stopped them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stability.config.schema import BASELINE
from stability.recorder.inside.environment import hash_state
from stability.recorder.spooled import Spooled, read_state
from stability.records.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["find_constants", "moved_constants", "without"]

_STATISTICS = ("running_mean", "running_var")


def find_constants(spooled: Spooled, baseline: Manifest | None) -> list[str]:
    """Return the buffers that have the same bits in all states that were kept.

    Less those that `baseline` has in its snapshots, where drift is measured from them.
    """
    kept = baseline.resolved.get("names", ()) if baseline is not None else ()
    left = [x for x in spooled.buffers if not x.endswith(_STATISTICS) and x not in kept]
    if not left or len(spooled.states) < 2:
        return []
    steps = iter(sorted(spooled.states))
    first = read_state(spooled.states[next(steps)])
    first = {name: first[name] for name in left}  # one state is in memory, not all of them
    for step in steps:
        state = read_state(spooled.states[step]) if first else {}
        first = {name: x for name, x in first.items() if _same_bits(x, state[name])}
    return list(first)


def moved_constants(
    spooled: Spooled, baseline: Manifest | None, constants: list[str]
) -> dict[str, str]:
    """Return the buffers that are constants of the baseline and not here, each with a doubt."""
    known = baseline.resolved.get("constants", ()) if baseline is not None else ()
    return {
        name: f"the drift of {name}, which moves here and is a constant in the {BASELINE}"
        for name in spooled.buffers
        if name in known and name not in constants
    }


def without(state: "Mapping[str, Tensor]", names: Any) -> "dict[str, Tensor]":
    """Return a state less the tensors of these names."""
    return {name: x for name, x in state.items() if name not in names}


def _same_bits(one: "Tensor", other: "Tensor") -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return hash_state({"": one}) == hash_state({"": other})
