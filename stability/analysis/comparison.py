"""Two sets of weights as a comparison: the drift of what they share, and a list of what they don't.

Parameters are matched by name alone. One that is missing on a side, has another shape, is empty or
is not floating-point is listed with that reason, never matched by guess. Leaves out where weights
are from (`records.weights`) and the arithmetic (`metrics.drift`).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stability.metrics.drift import ALL, drift
from stability.records.sealed_json import jsonable
from stability.records.weight_files import Weights

__all__ = ["Comparison", "compare_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was found; a is the candidate and b the reference."""

    a: str
    b: str
    drifts: Mapping[str, Mapping[str, float]]
    """The metrics of "all" and of each parameter compared."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes_differ: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_compared: Mapping[str, str]
    """The reasons by name."""

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as what JSON can hold; numbers that are not finite as strings."""
        return jsonable(
            {
                "a": self.a,
                "b": self.b,
                "drift": self.drifts,
                "only_in_a": self.only_in_a,
                "only_in_b": self.only_in_b,
                "shapes_differ": self.shapes_differ,
                "not_compared": self.not_compared,
            }
        )


def compare_weights(a: Weights, b: Weights) -> Comparison:
    """Return the drift of a from b over the parameters that both hold, and list all others.

    ValueError, with the nearest names, if there is no such parameter.
    """
    names_a, names_b = (dict.fromkeys((*x, *x.others)) for x in (a, b))
    shapes, reasons, shared = {}, {}, []
    for name in (name for name in names_b if name in names_a):
        reason = _misfit(name, a, b)
        if reason:
            reasons[name] = reason
        elif a.shapes[name] != b.shapes[name]:
            shapes[name] = (a.shapes[name], b.shapes[name])
        else:
            shared.append(name)
    if not shared:
        raise ValueError(_nothing_shared(a, b, shapes, reasons))
    return Comparison(
        a=a.label,
        b=b.label,
        drifts=drift(a.only(shared), b.only(shared)),
        only_in_a=tuple(name for name in names_a if name not in names_b),
        only_in_b=tuple(name for name in names_b if name not in names_a),
        shapes_differ=shapes,
        not_compared=reasons,
    )


def _misfit(name: str, a: Weights, b: Weights) -> str:
    """Return why a name that both sides know can't be compared whatever its shapes are, or ""."""
    for side in (a, b):
        if name in side.others:
            return f"no tensor with values: {side.others[name]}"
        if not _is_number(side.dtypes[name]):
            return f"not floating-point: {str(side.dtypes[name]).removeprefix('torch.')}"
    if name == ALL:
        return "its name stands for all parameters pooled"
    return "empty" if 0 in a.shapes[name] and a.shapes[name] == b.shapes[name] else ""


def _is_number(format: torch.dtype) -> bool:
    """Whether each element of the format is one floating-point number."""
    return format.is_floating_point and format is not getattr(torch, "float4_e2m1fn_x2", None)


def _nothing_shared(
    a: Weights,
    b: Weights,
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    reasons: Mapping[str, str],
) -> str:
    rule = f"compare: {a.label} and {b.label} must share a parameter"
    if shapes:
        name, (first, second) = next(iter(shapes.items()))
        return f"{rule}, got {name} of shapes {first} and {second}; compare runs of one model"
    if reasons:
        name, reason = next(iter(reasons.items()))
        return f"{rule}, got {name}: {reason}; compare weights"
    first = next(iter(a), "none")
    near = difflib.get_close_matches(first, b, n=3, cutoff=0.4) or list(b)[:3]
    return f"{rule}, got {first} on one side; nearest on the other: {', '.join(near) or 'none'}"
