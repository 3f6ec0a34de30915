"""Whether an attention computes in a shorter format than that of its inputs, as one that casts.

It is said on two proofs. Its error has the slope 1 on the change that rounding q, k and v to the
shorter format makes (an error of any other cause has the slope 0), in each result that fails. And
held against the golden of the rounded inputs, with that format's own limits, nothing in it is too
large. With the first proof alone more is wrong than the format.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_kernels.testing.cells import DTYPES, Reference, rounded
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.laws import Inputs
from attention_kernels.testing.limits import Excess, excesses
from attention_kernels.testing.measured import Measured, measure
from attention_kernels.testing.statistics import slope

__all__ = ["SHORTER", "computed_in"]

SHORTER = {torch.float32: ("bf16", "fp16"), torch.float16: ("bf16",)}
"""Formats with fewer bits, the shortest first: a rounding to it holds one to a longer format."""
_NAMES = {"bf16": "BF16", "fp16": "FP16, or TF32 that rounds to nearest,"}
_DO = {
    "bf16": "check it with `--dtype bf16`",
    "fp16": "check it with `--dtype fp16`, or switch TF32 off",
}
_OFF = 0.2
"""How far from 1 a slope may be."""
_ERROR = 0.1
"""How large its standard error may be: it then stands 8 of them from 0."""


def computed_in(
    found: Sequence[Excess], measured: Sequence[Measured], wheres: Sequence[Reference]
) -> str:
    """Return that an attention with these excesses in one dtype computes in a shorter one, or "".

    `wheres` are the cells, of those `measured`, whose errors are laid beside the rounding of q, k
    and v.
    """
    failing = [name for name in RESULTS if name in {excess.result for excess in found}]
    for format in SHORTER.get(measured[0].where.dtype, ()):
        if not all(_is_rounding(name, format, measured, wheres) for name in failing):
            continue
        name, do, seen = _NAMES[format], _DO[format], f"(seen in {', '.join(failing)})"
        if _too_large_in(format, measured):
            return f"q, k and v are rounded to {name} and more is wrong than that: {do} {seen}"
        return (
            f"it errs as {name} would: the kernel seems to compute in it, with q, k and v rounded "
            f"to it; {do}, or raise NotImplementedError for a dtype that it is not for {seen}"
        )
    return ""


def _is_rounding(
    result: str, format: str, measured: Sequence[Measured], wheres: Sequence[Reference]
) -> bool:
    """Whether the errors of a result follow the change that rounding q, k and v makes."""
    along, power = [], []
    for where in wheres:
        ours = [one for one in measured if one.where is where and one.result == result]
        for one in ours:
            golden = where.golden[result]
            error = _number(one.values.double() - golden)
            change = _number(_of_rounded(where, format)[result] - golden)
            # one weight a head: its errors in units of their own RMS
            weight = error.square().mean((0, 2, 3), keepdim=True).clamp(min=1e-300)
            along.append((error * change / weight).sum(-1).flatten())
            power.append((change.square() / weight).sum(-1).flatten())
    if not along:
        return False
    value, error = slope(torch.cat(along), torch.cat(power))
    return abs(value.item() - 1) < _OFF and error.item() < _ERROR


def _of_rounded(where: Reference, format: str) -> dict[str, Tensor]:
    """Return the results in FP64 of q, k and v after they were rounded, and dout as it is."""
    q, k, v = (x.to(DTYPES[format]) for x in where.inputs[:3])
    inputs = Inputs(q, k, v, where.inputs.dout)
    return where.formula().with_(inputs=inputs).results()


def _number(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 0, 0)


def _too_large_in(format: str, measured: Sequence[Measured]) -> bool:
    """Whether a limit of the shorter format is broken on inputs that were rounded to it."""
    references = {id(one.where): rounded(one.where, DTYPES[format]) for one in measured}
    again = [measure(references[id(one.where)], one.result, one.values) for one in measured]
    return bool(excesses(again, format))
