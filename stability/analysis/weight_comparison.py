"""Two sets of weights compared: the drift of the parameters they share, and a list of all others.

Parameters are matched by name alone. One that is missing on a side, has another shape, is empty or
is not floating-point is listed with that reason, and never matched by guess. Where weights are read
from is left to `records.weight_files`, the arithmetic to `metrics.drift`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stability.records.metric_names import ALL_WEIGHTS
from stability.records.sealed_json import jsonable

if TYPE_CHECKING:  # heavy: both import torch
    import torch

    from stability.records.weight_files import Weights

__all__ = ["WeightComparison", "compare_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightComparison:
    """The drift of the candidate a from the reference b, and all that was not compared."""

    a: str
    b: str
    drifts: Mapping[str, Mapping[str, float]]
    """The metrics of "all" and of each parameter compared."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes_differ: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_compared: Mapping[str, str]
    """Parameter -> the reason."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name -> the name of the same tensor, on both sides, that stands for it."""

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able values; numbers that are not finite as strings."""
        return jsonable(
            {
                "a": self.a,
                "b": self.b,
                "drift": self.drifts,
                "only_in_a": self.only_in_a,
                "only_in_b": self.only_in_b,
                "shapes_differ": self.shapes_differ,
                "not_compared": self.not_compared,
                "tied": self.tied,
            }
        )


def compare_weights(a: "Weights", b: "Weights") -> WeightComparison:
    """Return the drift of a from b over the parameters that both hold, and list all others.

    ValueError, with the nearest names, if there is no such parameter.
    """
    from stability.metrics.drift import drift  # heavy: torch
    from stability.records.weight_files import tied_names

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
    tied = tied_names((a, b), {name: (name, name) for name in shared})
    shared = [name for name in shared if name not in tied]
    return WeightComparison(
        a=a.label,
        b=b.label,
        drifts=drift(a.only(shared), b.only(shared)),
        only_in_a=tuple(name for name in names_a if name not in names_b),
        only_in_b=tuple(name for name in names_b if name not in names_a),
        shapes_differ=shapes,
        not_compared=reasons,
        tied=tied,
    )


def _misfit(name: str, a: "Weights", b: "Weights") -> str:
    """Return why a name on both sides can't be compared, whatever its shapes are; "" if it can."""
    for side in (a, b):
        if name in side.others:
            return f"no tensor with values: {side.others[name]}"
        if not _is_number(side.dtypes[name]):
            return f"not floating-point: {str(side.dtypes[name]).removeprefix('torch.')}"
    if name == ALL_WEIGHTS:
        return "its name stands for all parameters pooled"
    return "empty" if 0 in a.shapes[name] and a.shapes[name] == b.shapes[name] else ""


def _is_number(dtype: "torch.dtype") -> bool:
    """Whether each element is one floating-point number; of the type excluded here it is two."""
    return dtype.is_floating_point and str(dtype) != "torch.float4_e2m1fn_x2"


def _nothing_shared(
    a: "Weights",
    b: "Weights",
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
