"""What each planted fault shows on a candidate: at the operator, and in the whole model's gradient.

At the *operator* the q, k, v and dO that a model's attention was given are given again to the
candidate with each fault of `attention_kernels.testing.FAULTS`, to the baseline and to the golden,
and compared by the functions that the probe uses. In the *gradient* the whole model's gradient is
taken with the faulty candidate, the baseline and the golden, isolated as gradient evidence is. A
fault whose error is surely larger than allowed is done after FEW looks; one that can only be seen
by what repeats from look to look, a bias, takes SHARE_LOOKS of them, on different batches. Of a
look nothing is kept but a sketch of each error.

Leaves out where looks come from (`study.assay`, `study.planting`), the file (`records.assay`) and
what counts as found (`analysis.assay`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attention_kernels import golden_attention
from attention_kernels.testing.faults import FAULTS
from stability.metrics.coherence import coherence_of
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor
from stability.metrics.sketch import sketch
from stability.probe.gradient_evidence import Attention, AttentionRole, Gradients
from stability.records.assay import FaultRecord

__all__ = ["FEW", "SHARE_LOOKS", "TRIES", "FaultLook", "Plant", "TakePlanted", "plant_faults"]

FEW = 3
"""Looks at the operator, and at a gradient whose error is far too large."""
SHARE_LOOKS = 24
"""Looks at a gradient whose error is not; the study's own evidence asks for 20."""
STAGES = (FEW, 6, 12)
"""Looks after which a ratio of errors may be enough, each with its share of the error rate."""
TRIES = len(STAGES) + 1
"""How often a ratio is tried: at each stage and at the end."""
METRICS = ("error_ratio", "gain", "golden_bias_ulp")

Qkv = tuple[Tensor, Tensor, Tensor]

Plant = Callable[[Attention], Attention]
"""Puts a fault, or nothing, on the candidate in each layer that it computes."""


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


def plant_faults(
    looks: Sequence[FaultLook],
    due: Mapping[str, tuple[str, ...]],
    baseline: Attention,
    is_enough: Callable[[Sequence[float]], bool],
) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
    """Return the candidate's figures at the operator without a fault, and those of each fault.

    `due` are the faults by name with their levels. `baseline` is what the candidate stands beside.
    `is_enough` is asked after each of STAGES whether these ratios of a fault's errors in the
    gradient tell enough.
    """
    operator = _operator(looks[:FEW], ["", *due], baseline)
    asked = [name for name, levels in due.items() if "gradient" in levels]
    in_gradient = _in_gradient(looks, asked, is_enough)
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

    def figures(self) -> dict[str, Any]:
        """Return the figures of `FaultRecord` on the gradient."""
        errors = torch.stack(self.sketches).double()
        found = coherence_of((errors @ errors.mT).cpu().numpy())
        return {
            "ratios": tuple(self.ratios),
            "share": float(found.share),
            "share_se": float(found.share_se),
            "share_looks": found.looks,
        }


def _in_gradient(
    looks: Sequence[FaultLook], names: Sequence[str], is_enough: Callable[[Sequence[float]], bool]
) -> dict[str, dict[str, Any]]:
    """Return the figures of each fault, look by look as long as one is open."""
    found = {name: _Errors() for name in names}
    is_open = list(names)
    for look in looks:
        if not is_open:
            break
        golden = look.gradient(_as_it_is, "golden", True)
        accepted = _norm(_error(look.gradient(_as_it_is, "baseline", True), golden))
        for name in tuple(is_open):
            planted = look.gradient(FAULTS[name].plant, "candidate", True)
            error = _error(planted, golden)
            of_fault = found[name]
            of_fault.ratios.append(_norm(error) / accepted if accepted else math.inf)
            of_fault.sketches.append(sketch(error))
            if len(of_fault.ratios) in STAGES and is_enough(of_fault.ratios):
                is_open.remove(name)
    return {name: errors.figures() for name, errors in found.items()}


def _error(one: Gradients, golden: Gradients) -> list[Tensor]:
    return [one[name] - exact for name, exact in golden.items()]


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
