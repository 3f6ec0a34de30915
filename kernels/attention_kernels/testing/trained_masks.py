"""Is the gradient of a trained bias right, or of sinks: two calls beside the cells of a check.

An attention that names `attn_mask` or `sinks` among its arguments is called with one that requires
grad: a bias that the batch shares, `(1, heads, query_len, key_len)`, and a sink for each head. The
rule is flash-attn's: a head of a result may err `LIMIT` times what plain attention in the same
dtype errs, or what rounding it once costs. What goes beyond is compared with the mistakes that such
gradients are known for, and the closest is named. Leaves out the statistics of the other cells
(`limits`): one call shows no gain of a thousandth.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels.api import baseline_attention, golden_attention
from attention_kernels.formats import FORMATS, input_format
from attention_kernels.testing.golden_faults import spacing
from attention_kernels.testing.inputs import Shape
from attention_kernels.testing.laws import Inputs, draw

__all__ = ["LIMIT", "TrainedFinding", "trained_mask_findings"]

LIMIT = 3.0
"""flash-attn's tests allow gradients 2 to 3 times the error of plain attention."""
_LIMIT_OF_FEW = 10.0
"""For sinks: plain attention's errors of four values may by luck be small; right ones have 2.4."""
_SHAPE = Shape(4, 4, 2, 65, 97, 32)
_RESULTS = {"attn_mask": "dbias", "sinks": "dsinks"}
"""The result that belongs to each argument."""


@dataclass(frozen=True, kw_only=True)
class TrainedFinding:
    """One result that is wrong, as a sentence; of what is missing the value is infinite."""

    result: str
    sentence: str
    value: float


def trained_mask_findings(
    attention: Callable[..., Any], causal: str, dtype: torch.dtype
) -> Iterator[TrainedFinding | str]:
    """Yield what is wrong with an attention where its mask is trained, or why it refuses the call.

    `causal` is the name by which it takes that; only arguments that it names are tried.
    """
    for argument in _RESULTS:
        if argument not in _named(attention):
            continue
        inputs = draw("normal", _SHAPE, dtype, seed=5)
        trained = _trained(argument).to(dtype)
        try:
            ours = _results(attention, inputs, argument, trained, {causal: True})
        except Exception as error:  # whatever it may raise, it does not do this
            text = (str(error).strip().splitlines() or [""])[0]
            yield f"trained {argument}: {type(error).__name__}: {text}"
            continue
        yield from _judged(ours, inputs, argument, trained)


def _named(attention: Callable[..., Any]) -> set[str]:
    called = attention.forward if isinstance(attention, torch.nn.Module) else attention
    try:
        return set(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # a builtin does not tell
        return set()


def _trained(argument: str) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    if argument == "sinks":
        return torch.tensor([-1.0, 0.5, 2.0, 4.0])
    return torch.randn((1, _SHAPE.heads, _SHAPE.query_len, _SHAPE.key_len), generator=generator)


def _results(
    attention: Callable[..., Any],
    inputs: Inputs,
    argument: str,
    trained: Tensor,
    options: dict[str, Any],
) -> dict[str, Tensor | None]:
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], trained)]
    out = attention(*leaves[:3], **{argument: leaves[3]}, **options)
    out = out[0] if isinstance(out, tuple | list) else out
    gradients = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype), allow_unused=True)
    names = ("out", "dq", "dk", "dv", _RESULTS[argument])
    return dict(zip(names, (out.detach(), *gradients), strict=True))


def _judged(
    ours: dict[str, Tensor | None], inputs: Inputs, argument: str, trained: Tensor
) -> Iterator[TrainedFinding]:
    options = {"causal": True}
    baseline = _results(baseline_attention, inputs, argument, trained, options)
    wide = Inputs(*(x.double() for x in inputs))
    golden = _results(golden_attention, wide, argument, trained.double(), options)
    for name, x in ours.items():
        right, plain = golden[name], baseline[name]
        assert right is not None
        assert plain is not None
        if x is None or x.shape != right.shape:
            got = "is missing" if x is None else f"has shape {tuple(x.shape)}"
            text = f"{name} {got} where {argument} is trained, and must be {tuple(right.shape)}"
            yield TrainedFinding(result=name, sentence=text, value=math.inf)
            continue
        ratio = _ratio_of_heads(x, plain, right)
        limit = LIMIT if x.dim() > 1 else _LIMIT_OF_FEW
        if bool((ratio > limit).any()) or not bool(x.isfinite().all()):
            mistake = _closest(name, x.double(), wide, argument, trained.double(), right)
            worst = float(ratio.nan_to_num(math.inf).max())
            heads = [int(h) for h in (~(ratio <= limit)).nonzero().flatten()]
            text = (
                f"{name} errs {worst:.3g} times what plain attention or rounding does where "
                f"{argument} is trained, in head {', '.join(map(str, heads))}{mistake}"
            )
            yield TrainedFinding(result=name, sentence=text, value=worst)


def _by_head(x: Tensor) -> Tensor:
    return x.double()[:, None] if x.dim() == 1 else x.double().transpose(0, 1).flatten(1)


def _ratio_of_heads(x: Tensor, plain: Tensor, right: Tensor) -> Tensor:
    rounding = spacing(right, FORMATS[input_format(x.dtype)]) / math.sqrt(12)
    errors = [_by_head(one).norm(dim=1) for one in (x - right, plain - right, rounding)]
    if x.dim() == 1:  # one value a head: by luck plain attention's may be next to exact
        errors[1] = errors[1].square().mean().sqrt().expand_as(errors[1])
    return errors[0] / torch.maximum(errors[1], errors[2])


def _closest(
    name: str, x: Tensor, wide: Inputs, argument: str, trained: Tensor, right: Tensor
) -> str:
    """Return the mistake that takes most of the error away, as the end of a sentence."""
    distances = {
        words: float((x - wrong).norm())
        for words, wrong in _mistakes(name, wide, argument, trained, right)
        if wrong.shape == x.shape
    }
    words = min(distances, key=distances.__getitem__, default="")
    is_named = bool(words) and distances[words] < 0.2 * float((x - right).norm())
    return f": {words}" if is_named else ""


def _mistakes(
    name: str, wide: Inputs, argument: str, trained: Tensor, right: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in words, with what they give."""

    def golden(inputs: Inputs, mask: Tensor) -> Tensor:
        found = _results(golden_attention, inputs, argument, mask, {"causal": True})[name]
        assert found is not None
        return found

    scale = _SHAPE.head_dim**-0.5
    if name == "dbias":
        first = wide._replace(dout=wide.dout * torch.eye(len(wide.q))[0][:, None, None, None])
        last = wide._replace(dout=wide.dout * torch.eye(len(wide.q))[-1][:, None, None, None])
        yield (
            "it is of the first batch entry alone, not summed over the batch",
            golden(first, trained),
        )
        yield (
            "it is of the last batch entry alone, not summed over the batch",
            golden(last, trained),
        )
        yield "it is the mean over the batch, not the sum", right / len(wide.q)
    if name in _RESULTS.values():
        yield "it is multiplied with the scale of the scores", right * scale
        yield "it has the wrong sign", -right
        yield "it is 0", torch.zeros_like(right)
    if argument == "sinks":
        yield "the sink counts twice", golden(wide, trained + math.log(2))
        yield "the sink does not count", golden(wide, torch.full_like(trained, -1e4))
    else:
        yield "the bias is left out of the scores", golden(wide, torch.zeros_like(trained))
        yield "the bias is multiplied with the scale", golden(wide, trained * scale)
