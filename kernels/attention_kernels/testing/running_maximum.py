"""Whether a backward goes through the maximum that a softmax subtracts from its scores.

What is subtracted changes no result, so the gradient to it is 0. Autograd adds it up from terms
that cancel, and what is left of them by rounding goes to the scores that hold the maximum. The
error of dk then stands in the keys with a row's largest score so far, along q of those rows, which
is a few directions of many.

An error of delta stands there too, as far as the weights do. So a cell tells only where most of
the weights' squares stand elsewhere.

Shape suffixes: B batch, H query heads, G kv heads, Q query_len, K key_len, D head_dim, N rows.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from attention_kernels.testing.cells import Reference
from attention_kernels.testing.limits import Excess
from attention_kernels.testing.measured import Measured

__all__ = ["through_the_maximum"]

_EXPLAINED = 0.9
"""The share of the error that must stand along these rows; by chance it is 0."""
_ELSEWHERE = 0.5
"""The share of the weights' squares that must stand in other places, or delta would do as well."""
_FREE = 0.25
"""Rows over head_dim up to which a key tells."""
_TOLD = 0.75
"""The share of the error that must stand in keys that tell."""


def through_the_maximum(
    found: Sequence[Excess], measured: Sequence[Measured], wheres: Iterable[Reference]
) -> str:
    """Return that dk errs as by a gradient through the maximum, or "", in one of these cells.

    Nothing is said where other results than dk and dq are off.
    """
    failing = {excess.result for excess in found}
    if "dk" not in failing or not failing <= {"dq", "dk"}:
        return ""
    for where in wheres:
        ours = [one for one in measured if one.where is where and one.result == "dk"]
        if not ours:  # it holds NaN, and is not measured
            continue
        if any(_stands_at(_largest_so_far(where, back), ours[0]) for back in (False, True)):
            return (
                "dk errs only in keys that hold a row's largest score so far, along q of those "
                "rows: the backward goes through the maximum that the scores are shifted by, whose "
                "gradient is 0 but for rounding; detach the maximum "
                f"(seen in {', '.join(name for name in ('dq', 'dk') if name in failing)})"
            )
    return ""


def _largest_so_far(where: Reference, back: bool) -> Tensor:
    """Return which scores are as large as any key's before them, bool `(B, H, Q, K)`.

    Those that hold the maximum at the end of any tile are among them. `back` goes from the last
    key to the first.
    """
    scores_BHQK = where.formula().scores()
    ordered = scores_BHQK.flip(-1) if back else scores_BHQK
    held = (ordered == ordered.cummax(-1).values) & (ordered > -torch.inf)
    return held.flip(-1) if back else held


def _stands_at(held_BHQK: Tensor, dk: Measured) -> bool:
    """Whether nearly all of the error of dk stands along the rows that hold a maximum there."""
    squares = dk.where.formula().weights().square()
    if (squares * held_BHQK).sum() > (1 - _ELSEWHERE) * squares.sum():
        return False
    before = left = rounding = total = 0.0
    for error, noise, rows_ND in _keys(held_BHQK, dk):
        at_all = error.square().sum().item() / noise
        total += at_all
        if len(rows_ND) > _FREE * len(error):
            continue
        before += at_all
        rounding += min(at_all, 1.0)
        left += _beside(error, rows_ND).square().sum().item() / noise
    explained = (before - left) / max(before - 0.5 * rounding, 1e-9)
    return before > _TOLD * total and explained > _EXPLAINED


def _keys(held_BHQK: Tensor, dk: Measured) -> Iterator[tuple[Tensor, float, Tensor]]:
    """Yield each key's error `(D,)`, its squared noise, and q of the rows that it is held in."""
    where = dk.where
    q_BHQD, noise_BGK = where.inputs.q.double(), dk.row_noise()
    error_BGKD = (dk.values.double() - where.golden["dk"]).nan_to_num(0, 0, 0)
    group = where.cell.shape.heads // where.cell.shape.kv_heads
    for b, g, key in torch.cartesian_prod(*(torch.arange(n) for n in noise_BGK.shape)).tolist():
        heads = slice(g * group, (g + 1) * group)
        rows_ND = q_BHQD[b, heads][held_BHQK[b, heads, :, key]]
        yield error_BGKD[b, g, key], noise_BGK[b, g, key].item(), rows_ND


def _beside(error: Tensor, rows_ND: Tensor) -> Tensor:
    """Return what of an error `(D,)` no sum of the rows gives, grown by what they give of chance.

    Of an error without direction N of D components would be taken away.
    """
    if not len(rows_ND):
        return error
    taken = rows_ND.T @ torch.linalg.lstsq(rows_ND.T, error[:, None]).solution
    return (error - taken[:, 0]) * (1 - len(rows_ND) / len(error)) ** -0.5
