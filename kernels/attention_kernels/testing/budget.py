"""The error budget that a candidate attention must keep, and two tools for testing one.

The budget is the rule of flash-attn's own tests: against FP64, a candidate may err a small multiple
of what plain attention in the same dtype errs on the same inputs. It scales with dtype, length and
distribution, so there is no tolerance to choose, and none that a test suite could loosen.

Source: github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py (output at most 2 times, and
gradients at most 2 to 5 times, the error of plain attention).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, input_format

__all__ = ["assert_within_budget", "error_budget", "nan_filled", "with_gradients"]


def with_gradients(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Run `attention(q, k, v, **options)` and its backward; return out, dq, dk and dv by name.

    `dout` is cast to the dtype of out. For gradients in FP64 hand the golden FP64 copies.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_within_budget(
    candidate: Tensor, baseline: Tensor, golden: Tensor, factor: float = 2.0, what: str = "out"
) -> None:
    """Assert max|candidate - golden| <= `error_budget` in the candidate's dtype.

    AssertionError says `what` failed and by how much; a NaN or infinity in the candidate always
    fails.
    """
    error = _max_error(candidate, golden)
    budget = error_budget(baseline, golden, candidate.dtype, factor)
    if not error <= budget:
        allowed = _max_error(baseline, golden)
        raise AssertionError(
            f"{what}: max error {error:.3e} is over the budget {budget:.3e} = {factor:g} * "
            f"{allowed:.3e} of the baseline + {budget - factor * allowed:.3e} of rounding"
        )


def error_budget(
    baseline: Tensor, golden: Tensor, dtype: torch.dtype, factor: float = 2.0
) -> float:
    """Return factor * max|baseline - golden| + half a spacing: what a candidate may err.

    The spacing is that of `dtype` at golden's largest magnitude: a correctly rounded candidate can
    err by half of it even where the baseline happens to be exact.
    """
    spacing = _spacing(golden.double().abs().max().item(), dtype)
    return factor * _max_error(baseline, golden) + spacing / 2


def _max_error(x: Tensor, golden: Tensor) -> float:
    return (x.double() - golden.double()).abs().max().item()


def _spacing(magnitude: float, dtype: torch.dtype) -> float:
    format = FORMATS[input_format(dtype)]
    if magnitude == 0:  # frexp gives zero the exponent of 0.5
        return 2.0 ** (format.min_exponent - format.mantissa_bits)
    exponent = torch.frexp(torch.tensor(magnitude, dtype=torch.float64)).exponent.item() - 1
    return 2.0 ** (max(exponent, format.min_exponent) - format.mantissa_bits)


@contextmanager
def nan_filled() -> Iterator[None]:
    """Inside the context the `torch.empty` family gives NaN, so that an unwritten value shows.

    Covers floating-point tensors made from Python. The deterministic mode of torch, which fills
    them too, can't serve: it makes cuBLAS raise unless an environment variable is set.
    """

    def filling(make: Any) -> Any:
        def make_filled(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(torch.nan)  # detached: a leaf may require grad
            return x

        return make_filled

    with torch.device("cpu"):  # torch remembers at the first such call which functions make tensors
        torch.empty(0)
    with (
        mock.patch.object(torch, "empty", filling(torch.empty)),
        mock.patch.object(torch, "empty_like", filling(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", filling(torch.empty_strided)),
        mock.patch.object(Tensor, "new_empty", filling(Tensor.new_empty)),
    ):
        yield
