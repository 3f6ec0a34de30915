"""Whether the weights P alone are rounded to a shorter format, before they are multiplied with v.

Triton's tutorial does so with FP16 whatever the inputs are. The error of out is then
(round(P) - P) @ v, which takes nothing away from an error of another cause. P is rounded as it is,
or as exp(scores - maximum) before the division by the row sum. Says nothing of what
the backward rounds: dP and dS, which a kernel that rounds P often rounds too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_kernels.testing.cells import DTYPES, Reference
from attention_kernels.testing.computed_in import SHORTER
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.limits import Excess
from attention_kernels.testing.measured import Measured

__all__ = ["rounded_weights"]

_EXPLAINED = 0.8
"""The share of the squared error of out that it must take away."""


def rounded_weights(
    found: Sequence[Excess], measured: Sequence[Measured], wheres: Sequence[Reference]
) -> str:
    """Return that out errs as of weights P in a shorter format, with what fails; "" if not."""
    failing = [name for name in RESULTS if name in {excess.result for excess in found}]
    outs = [x for x in measured if x.result == "out" and any(x.where is at for at in wheres)]
    if "out" not in failing or "lse" in failing or not outs:
        return ""
    for format in SHORTER.get(outs[0].where.dtype, ()):
        for before_division in (False, True):
            if min(_explained(one, format, before_division) for one in outs) > _EXPLAINED:
                return (
                    f"out errs as of weights P that are rounded to {format.upper()} before P @ v: "
                    f"keep P in the dtype of v (seen in {', '.join(failing)})"
                )
    return ""


def _explained(out: Measured, format: str, before_division: bool) -> float:
    """Return the share of the error of out that a rounding of P takes away."""
    error = (out.values.double() - out.where.golden["out"]).nan_to_num(0, 0, 0)
    left = error - _change(out.where, format, before_division)
    return 1 - (left.square().sum() / error.square().sum().clamp(min=1e-300)).item()


def _change(where: Reference, format: str, before_division: bool) -> Tensor:
    """Return what rounding P adds to out."""
    formula = where.formula()
    weights_BHQK = formula.weights()
    largest_BHQ1 = weights_BHQK.amax(-1, keepdim=True).clamp(min=1e-300)
    unit = largest_BHQ1 if before_division else torch.ones_like(largest_BHQ1)
    p_BHQK = (weights_BHQK / unit).float()
    rounded_BHQK = p_BHQK.to(DTYPES[format]).double() - p_BHQK
    return (rounded_BHQK * unit) @ formula.values()
