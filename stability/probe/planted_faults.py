"""What each planted fault shows on a candidate: at the operator, and in the whole model's gradient.

At the *operator* the q, k, v and dO that a model's attention was given are given again to the
candidate with each fault of `attention_kernels.testing.FAULTS`, to the baseline and to the golden,
and compared by the functions that the probe uses. In the *gradient* the whole model's gradient is
taken with the faulty candidate, the candidate as it is, the baseline and the golden, isolated as
gradient evidence is. A fault whose error is far too large is done after FEW looks; one that can
only be seen by what repeats from look to look, a bias, takes up to MOST of them. No two looks are
of one batch at the same weights: the rounding errors of these are the same bits, and would be taken
for a bias. Of a look nothing is kept but a sketch of each error.

Leaves out where looks come from (`study.assay`, `study.planting`), the file (`records.assay`) and
what counts as found (`analysis.assay`).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attention_kernels import golden_attention
from attention_kernels.testing.faults import FAULTS
from stability.metrics.coherence import Coherence, coherence_of
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor
from stability.metrics.sketch import sketch
from stability.probe.gradient_evidence import Attention, AttentionRole, Gradients
from stability.records.assay import STAGES, FaultRecord

__all__ = [
    "FEW",
    "MOST",
    "Advanced",
    "FaultLook",
    "IsSettled",
    "Plant",
    "TakePlanted",
    "distinct_looks",
    "plant_faults",
]

FEW = STAGES[0]
"""Looks at the operator, and at a gradient whose error is far too large."""
MOST = STAGES[-1]
"""Looks at a gradient whose error is near a limit."""
METRICS = ("error_ratio", "gain", "golden_bias_ulp")

Qkv = tuple[Tensor, Tensor, Tensor]

Plant = Callable[[Attention], Attention]
"""Puts a fault, or nothing, on the candidate in each layer that it computes."""


IsSettled = Callable[[FaultRecord], bool]
"""Whether more looks at the gradient would change nothing: given a fault's figures so far."""


Advanced = Callable[[int, int, int], None]
"""Told how many looks were taken, how many there are at most, and how many faults are open."""


class TakePlanted(Protocol):
    """Computes the gradient of one batch's loss at given weights."""

    def __call__(self, plant: Plant, role: AttentionRole, is_isolated: bool) -> Gradients:
        """Return it under the attention of that role, the candidate as `plant` leaves it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultLook:
    """One batch at the weights of one snapshot."""

    gradient: TakePlanted
    operator: TakePlanted
    """The same, of as many sequences as are enough at the operator."""
    dtype: torch.dtype | None = None
    """What q, k, v and dO are rounded to on their way into the kernel; None: they are already."""


def distinct_looks(batches: Sequence[Hashable], weights: int) -> list[tuple[int, int]]:
    """Return up to MOST looks: the places of a batch and of its weights, no pair of them twice.

    Of `batches` that are equal the first one counts. Each batch is looked at once, over the weights
    in turn, before any is looked at again at others.
    """
    first: dict[Hashable, int] = {}
    for place, batch in enumerate(batches):
        first.setdefault(batch, place)
    rounds = [
        (place, (number + turn) % weights)
        for turn in range(weights)
        for number, place in enumerate(first.values())
    ]
    return rounds[:MOST]


def plant_faults(
    looks: Sequence[FaultLook],
    due: Mapping[str, tuple[str, ...]],
    baseline: Attention,
    is_settled: IsSettled,
    advanced: Advanced,
) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
    """Return the candidate's figures without a fault, and those of each fault.

    `looks` are of different batches or weights (`distinct_looks`). `due` are the faults by name
    with their levels. `baseline` is what the candidate stands beside. `is_settled` is asked of each
    fault that is planted in the gradient after each of STAGES; `advanced` is told of each look
    there. ValueError without a look.
    """
    if not looks:
        raise ValueError("faults are planted on batches: the model was given none as a whole")
    operator = _operator(looks[:FEW], ["", *due], baseline)
    asked = [name for name, levels in due.items() if "gradient" in levels]
    in_gradient = _in_gradient(looks, asked, is_settled, advanced)
    own = FaultRecord(name="", what="no fault", levels=(), operator=operator[""])
    return own, tuple(
        FaultRecord(
            name=name,
            what=FAULTS[name].what,
            levels=levels,
            operator=operator[name],
            **in_gradient.get(name, {}),
        )
        for name, levels in due.items()
    )


def _as_it_is(attention: Attention) -> Attention:
    return attention


def _planted(attention: Attention, name: str) -> Attention:
    return FAULTS[name].plant(attention) if name else attention


def _operator(
    looks: Sequence[FaultLook], names: Sequence[str], baseline: Attention
) -> dict[str, dict[str, dict[str, tuple[float, ...]]]]:
    """Return by fault, result and metric a value for each look and layer; "" is no fault."""
    columns = [GOLDEN_COLUMNS.index(metric) for metric in METRICS]
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in names}
    for look in looks:
        for call in _captured(look):
            exact = call.results(golden_attention, torch.float64)
            accepted = call.results(baseline)
            for name in names:
                for result, value in call.results(_planted(call.attention, name)).items():
                    values = golden_tensor(value, accepted[result], exact[result])
                    of_result = found[name].setdefault(result, {m: [] for m in METRICS})
                    for metric, number in zip(METRICS, values[columns].tolist(), strict=True):
                        of_result[metric].append(number)
    return {
        fault: {
            result: {metric: tuple(values) for metric, values in metrics.items()}
            for result, metrics in results.items()
        }
        for fault, results in found.items()
    }


@dataclass(slots=True)
class _Call:
    """One call of the candidate, with the gradient that its out was given."""

    attention: Attention
    qkv: Qkv
    mask: Mapping[str, Any]
    dout: Tensor | None = None

    def results(self, attention: Attention, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return what `attention` makes of the call, forward and backward; computed in `dtype`."""
        assert self.dout is not None
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in self.qkv]
        out = attention(*leaves, **self.mask)
        grads = torch.autograd.grad(out, leaves, self.dout.to(out.dtype))
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _captured(look: FaultLook) -> list[_Call]:
    """Return the calls of the candidate as it is given them in the run."""
    kept: list[_Call] = []

    def catching(attention: Attention) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
            out = attention(q, k, v, **mask)
            q, k, v = (x.detach().to(look.dtype or x.dtype) for x in (q, k, v))
            call = _Call(attention, (q, k, v), mask)
            kept.append(call)

            def take(grad: Tensor) -> None:
                call.dout = grad.detach().to(look.dtype or grad.dtype)

            out.register_hook(take)
            return out

        return attend

    look.operator(catching, "candidate", False)
    # a layer that is computed again in the backward pass was called twice
    return [call for call in kept if call.dout is not None]


@dataclass(slots=True)
class _Errors:
    """What the gradient under one fault has shown so far."""

    ratios: list[float] = field(default_factory=list)
    sketches: list[Tensor] = field(default_factory=list)

    def add(self, error: list[Tensor], accepted: float) -> None:
        """Take the error of one look, and how long the baseline's is."""
        length = _norm(error)
        # an exact baseline beside an exact candidate: neither errs further
        equal = 1.0 if length == accepted else math.inf
        self.ratios.append(length / accepted if accepted else equal)
        self.sketches.append(sketch(error))

    def share(self) -> Coherence:
        """Return what repeats of the errors from look to look."""
        errors = torch.stack(self.sketches).double()
        return coherence_of((errors @ errors.mT).cpu().numpy())


def _in_gradient(
    looks: Sequence[FaultLook],
    names: Sequence[str],
    is_settled: IsSettled,
    advanced: Advanced,
) -> dict[str, dict[str, Any]]:
    """Return the figures of each fault on the gradient, look by look as long as one is open."""
    own, errors = _Errors(), {name: _Errors() for name in names}
    found: dict[str, dict[str, Any]] = {}
    is_open = list(names)
    for number, look in enumerate(looks, start=1):
        if not is_open:
            break
        golden = look.gradient(_as_it_is, "golden", True)
        accepted = _norm(_error(look.gradient(_as_it_is, "baseline", True), golden))
        own.add(_error(look.gradient(_as_it_is, "candidate", True), golden), accepted)
        for name in is_open:
            planted = look.gradient(FAULTS[name].plant, "candidate", True)
            errors[name].add(_error(planted, golden), accepted)
        if number in STAGES or number == len(looks):
            found |= {name: _figures(errors[name], own) for name in is_open}
            is_open = [name for name in is_open if not is_settled(_so_far(name, found[name]))]
        advanced(number, len(looks), len(is_open))
    return found


def _figures(errors: _Errors, own: _Errors) -> dict[str, Any]:
    """Return the figures of `FaultRecord` on the gradient, with the candidate's own so far."""
    found, of_own = errors.share(), own.share()
    return {
        "ratios": tuple(errors.ratios),
        "share": float(found.share),
        "share_se": float(found.share_se),
        "share_looks": found.looks,
        "own_ratios": tuple(own.ratios),
        "own_share": float(of_own.share),
        "own_share_se": float(of_own.share_se),
    }


def _so_far(name: str, figures: Mapping[str, Any]) -> FaultRecord:
    return FaultRecord(name=name, what="", levels=("gradient",), operator={}, **figures)


def _error(one: Gradients, golden: Gradients) -> list[Tensor]:
    return [one[name] - exact for name, exact in golden.items()]


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
