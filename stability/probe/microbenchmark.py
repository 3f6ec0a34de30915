"""Errors of one attention call at chosen numerics, and which rounding point makes them.

A `Problem` says everything that decides the numbers. `measure` compares candidate, baseline and
golden on it. `waterfall` attributes the candidate's error to its rounding points in two ways.
Lowering one point, with every other point at FP64, measures that point's own error. Raising one
point to FP64, with the rest as in the profile, measures the error that remains without it. The
waterfall's inputs lie on the format's grid but are carried in FP64, and its errors are Frobenius
norms relative to the golden. Leaves out the sweep over problems and its tables (`cli.deviate`), and
the inputs (`attention_inputs`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    BaselineNumerics,
    FlashNumerics,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.points import FIELDS, UNROUNDED
from attention_kernels.rounding import INPUT_DTYPES
from attention_kernels.testing import Shape
from stability.config.convert import nearest
from stability.metrics.deviation import deviation
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor
from stability.probe.attention_inputs import AttentionInputs, draw_inputs

__all__ = [
    "POINTS",
    "Problem",
    "ResultDeviations",
    "WaterfallRow",
    "at_format",
    "attend_with_gradients",
    "measure",
    "waterfall",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One attention problem, with the numerics of candidate and baseline."""

    profile: str = "fa2"
    baseline: str = "plain"
    format: str = "bf16"
    length: int = 512
    head_dim: int = 64
    value_dim: int | None = None
    """The head_dim of v; None: as q's."""
    block_q: int | None = None
    """None: as the profile says; so is block_k."""
    block_k: int | None = None
    key_len: int | None = None
    """None: as long as the queries."""
    batch: int = 1
    heads: int = 4
    kv_heads: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    scale: float | None = None
    distribution: str = "normal"
    seed: int = 0
    engine: str = "auto"
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the profile's numerics that are set to other values."""

    def shape(self) -> Shape:
        """Return the shape of the inputs."""
        return Shape(
            self.batch,
            self.heads,
            self.kv_heads or self.heads,
            self.length,
            self.key_len or self.length,
            self.head_dim,
            self.value_dim,
        )

    def mask(self) -> dict[str, Any]:
        """Return the arguments of the mask, and the scale."""
        names = ("causal", "window", "softcap", "scale")
        return {name: getattr(self, name) for name in names}

    def numerics(self) -> FlashNumerics:
        """Return the candidate's numerics; ValueError for an unknown profile, field or value."""
        numerics = _named("profile", self.profile, PROFILES)
        blocks = {"block_q": self.block_q, "block_k": self.block_k}
        given = {name: size for name, size in blocks.items() if size is not None}
        return at_format(numerics.with_(**given, **dict(self.changes)), self.format)

    def baseline_numerics(self) -> BaselineNumerics:
        """Return the baseline's numerics; ValueError for an unknown profile."""
        return at_format(_named("baseline", self.baseline, BASELINE_PROFILES), self.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultDeviations:
    """Deviations of one result: `what` is out, dq, dk or dv; metrics by name."""

    what: str
    candidate: Mapping[str, float]
    """Of the candidate against the golden."""
    baseline: Mapping[str, float]
    """Of the baseline against the golden."""
    pair: Mapping[str, float]
    """Of the candidate against the baseline."""
    golden: Mapping[str, float]
    """`GOLDEN_COLUMNS`: error_ratio and both relative errors."""

    def to_dict(self) -> dict[str, Any]:
        """Return the deviations as plain dicts."""
        return asdict(self)


def at_format(numerics: Any, format: str, *, stored: bool = True) -> Any:
    """Return numerics whose "input" points are `format` where the inputs' dtype is not.

    `stored` says that inputs are in a dtype of their own format, if torch has one for it.
    """
    if stored and format in INPUT_DTYPES.values():
        return numerics
    points = {name: format for name, value in numerics.to_dict().items() if value == "input"}
    return numerics.with_(**points)


def measure(
    problem: Problem, *, backward: bool, inputs: AttentionInputs | None = None
) -> list[ResultDeviations]:
    """Run candidate, baseline and golden on one set of inputs, drawn if not given.

    Gradients are those under one dO for all three. ValueError for what the numerics refuse.
    """
    numerics, baseline = problem.numerics(), problem.baseline_numerics()
    if inputs is None:
        inputs = draw_inputs(problem.distribution, problem.shape(), problem.format, problem.seed)
    mask = problem.mask()
    candidate = attend_with_gradients(
        flash_attention, inputs, backward, numerics=numerics, engine=problem.engine, **mask
    )
    plain = attend_with_gradients(baseline_attention, inputs, backward, numerics=baseline, **mask)
    # the golden gets FP64 leaves: autograd rounds a gradient to the dtype of its leaf
    exact = attend_with_gradients(
        golden_attention, AttentionInputs(*(x.double() for x in inputs)), backward, **mask
    )
    format = problem.format
    return [_deviations(what, candidate[what], plain[what], exact[what], format) for what in exact]


def attend_with_gradients(
    attention: Any, inputs: AttentionInputs, backward: bool, **options: Any
) -> dict[str, Tensor]:
    """Return out and, if asked, dq, dk and dv of an attention, by name."""
    # detached, or requires_grad_ would mark the caller's own tensors
    leaves = [x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v)]
    out = attention(*leaves, **options)
    results = {"out": out.detach()}
    if backward:
        # widening is exact, so the golden gets the dO of the others
        gradients = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
        results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return results


def _deviations(
    what: str, candidate: Tensor, plain: Tensor, exact: Tensor, format: str
) -> ResultDeviations:
    def against(x: Tensor, reference: Tensor) -> dict[str, float]:
        return deviation(x.double(), reference.double(), output_format=format)

    golden = golden_tensor(candidate, plain, exact).tolist()
    return ResultDeviations(
        what=what,
        candidate=against(candidate, exact),
        baseline=against(plain, exact),
        pair=against(candidate, plain),
        golden=dict(zip(GOLDEN_COLUMNS, golden, strict=True)),
    )


def _named(what: str, name: str, profiles: Mapping[str, Any]) -> Any:
    if name not in profiles:
        raise ValueError(
            f"deviate: {what} must be a known profile, got {name!r}; "
            f"nearest: {nearest(name, profiles)}"
        )
    return profiles[name]


POINTS = [point for point in FIELDS if FlashNumerics().to_dict()[point] != UNROUNDED]
"""The rounding points that every profile has, in the order in which they occur."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterfallRow:
    """The relative errors of out, dq, dk and dv by name, after one change of the profile.

    `change` is "lowered", "raised", or "none" for the profile as it is, which has no `point`;
    `format` is what the point was set to.
    """

    change: str
    point: str
    format: str
    errors: dict[str, float]


def waterfall(problem: Problem, inputs: AttentionInputs | None = None) -> Iterator[WaterfallRow]:
    """Yield the profile as it is, each point alone lowered, and each alone raised.

    Points at which the profile rounds nothing have no row.

    ValueError as `measure`.
    """
    if inputs is None:
        inputs = draw_inputs(problem.distribution, problem.shape(), problem.format, problem.seed)
    wide = AttentionInputs(*(x.double() for x in inputs))
    # inputs are carried in FP64 here, so points that follow the input must be told the format
    low = problem.numerics()
    points = {p: low.to_dict()[p] for p in FIELDS}
    points = {
        p: problem.format if name == "input" else name
        for p, name in points.items()
        if name != UNROUNDED
    }
    low = low.with_(**points)
    # formats alone: tiles, the exponential and the scaling stay the profile's in every row
    exact = low.with_(**dict.fromkeys(FIELDS, "fp64"))
    golden = attend_with_gradients(golden_attention, wide, True, **problem.mask())

    def errors(numerics: FlashNumerics) -> dict[str, float]:
        found = attend_with_gradients(
            flash_attention, wide, True, numerics=numerics, engine=problem.engine, **problem.mask()
        )
        return {
            what: torch.div((x - golden[what]).norm(), golden[what].norm()).item()
            for what, x in found.items()
        }

    yield WaterfallRow(change="none", point="", format="", errors=errors(low))
    for point, name in points.items():
        lowered = exact.with_(**{point: name})
        yield WaterfallRow(change="lowered", point=point, format=name, errors=errors(lowered))
    for point in points:
        # one point at FP64 makes FP64 the work format of the call, as in the lowered rows
        raised = low.with_(**{point: "fp64"})
        yield WaterfallRow(change="raised", point=point, format="fp64", errors=errors(raised))
