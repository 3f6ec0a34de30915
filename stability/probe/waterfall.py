"""Which rounding point makes the error: each lowered alone, then each raised alone.

Lowered: every point at FP64 but one, which rounds to the profile's format; what it costs alone.
Raised: the profile but for one point, which is FP64; what is left without it. Inputs lie on the
format's grid in both, carried in FP64, and the error is relative (Frobenius) to the golden. Leaves
out how it is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from attention_kernels import FlashNumerics, flash_attention, golden_attention
from attention_kernels.numerics import BackwardNumerics, ForwardNumerics
from stability.probe.inputs import Inputs, draw
from stability.probe.microbenchmark import Problem, compare

__all__ = ["POINTS", "Step", "waterfall"]

POINTS = [field.name for group in (ForwardNumerics, BackwardNumerics) for field in fields(group)]
"""The rounding points in the order in which they occur."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Relative errors of out, dq, dk and dv by name, with one point `lowered` or `raised`.

    `point` is empty for the profile as it is, `change` then "none"; `format` is the point's.
    """

    change: str
    point: str
    format: str
    errors: dict[str, float]


def waterfall(problem: Problem, inputs: Inputs | None = None) -> Iterator[Step]:
    """Yield the profile as it is, each point alone lowered, and each alone raised.

    ValueError as `microbenchmark.measure`.
    """
    if inputs is None:
        inputs = draw(problem.distribution, problem.shape(), problem.format, problem.seed)
    wide = Inputs(*(x.double() for x in inputs))
    # The points that a numerics leaves to its input round to the format under test.
    low = problem.numerics()
    points = {p: low.to_dict()[p] for p in POINTS}
    points = {p: problem.format if name == "input" else name for p, name in points.items()}
    low = low.with_(**points)
    exact = low.with_(**dict.fromkeys(POINTS, "fp64"))
    golden = compare(golden_attention, wide, True, **problem.mask())

    def errors(numerics: FlashNumerics) -> dict[str, float]:
        found = compare(
            flash_attention, wide, True, numerics=numerics, engine=problem.engine, **problem.mask()
        )
        return {
            what: torch.div((x - golden[what]).norm(), golden[what].norm()).item()
            for what, x in found.items()
        }

    yield Step(change="none", point="", format="", errors=errors(low))
    for point, name in points.items():
        lowered = exact.with_(**{point: name})
        yield Step(change="lowered", point=point, format=name, errors=errors(lowered))
    for point in points:
        raised = low.with_(**{point: "fp64"})
        yield Step(change="raised", point=point, format="fp64", errors=errors(raised))
