"""Is dropout right, whatever stream it draws from: a few calls beside the cells of a check.

An attention that names `dropout_p` and `dropout_seed` among its arguments is called with values
that are unit vectors: out is then the weights, and those that are zero were dropped. Are they p of
all, the same at the same seed, others at another seed and in another head? Then it is called on
drawn values with that seed, forward and backward, and each result is compared with what FP64 gives
with those weights dropped, the others divided by 1 - p and the denominators left alone. The rule is
flash-attn's: a head of a result may err, relative to its norm, `LIMIT` times what plain attention
errs without dropout. Of what goes beyond the closest known mistake is named. Leaves out streams
that depend on the values' own numbers, and any other mask.

Shape suffixes: B batch, H query heads, Q query_len, K key_len.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attention_kernels.api import baseline_attention, golden_attention
from attention_kernels.testing.inputs import Shape
from attention_kernels.testing.laws import Inputs, draw
from attention_kernels.testing.trained_masks import LIMIT, TrainedFinding

__all__ = ["dropout_findings"]

P = 0.25
_SEED = 11
_SHAPE = Shape(2, 4, 2, 65, 64, 64)
"""As many keys as dimensions: a unit vector of each is a key's value."""
_SIGMAS = 5.0
_RESULTS = ("out", "dq", "dk", "dv")


def dropout_findings(
    attention: Callable[..., Any], causal: str, dtype: torch.dtype
) -> Iterator[TrainedFinding | str]:
    """Yield what is wrong with an attention's dropout, or why it refuses the call.

    `causal` is the name by which it takes that. Only one that names both arguments is called.
    """
    called = attention.forward if isinstance(attention, torch.nn.Module) else attention
    try:
        named = set(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # a builtin does not tell
        return
    if not {"dropout_p", "dropout_seed"} <= named:
        return

    def attend(q: Tensor, k: Tensor, v: Tensor, seed: int = _SEED, p: float = P) -> Tensor:
        options = {causal: False} if causal else {}
        out = attention(q, k, v, dropout_p=p, dropout_seed=seed, **options)
        return out[0] if isinstance(out, tuple | list) else out

    inputs = draw("normal", _SHAPE, dtype, seed=7)
    try:
        if not bool(_kept(attend, inputs, _SEED, 0.0).all()):  # rounded to 0, e.g. in FP8
            yield "dropout: some weights are 0 where none is dropped, so it can't be seen which are"
            return
        kept_BHQK = _kept(attend, inputs, _SEED)
        streams = {seed: _kept(attend, inputs, seed) for seed in (_SEED, _SEED + 1)}
        ours = _results(attend, inputs)
    except Exception as error:  # whatever it may raise, it does not do this
        text = (str(error).strip().splitlines() or [""])[0]
        yield f"dropout: {type(error).__name__}: {text}"
        return
    wrong = _wrong_stream(kept_BHQK, streams)
    if wrong:
        yield TrainedFinding(result="out", sentence=wrong, value=math.inf)
        return
    yield from _judged(ours, inputs, kept_BHQK)


def _kept(attend: Callable[..., Tensor], inputs: Inputs, seed: int, p: float = P) -> Tensor:
    """Return which weights `(B, H, Q, K)` are kept."""
    values = torch.eye(_SHAPE.key_len, dtype=inputs.v.dtype).expand_as(inputs.v).contiguous()
    return attend(inputs.q, inputs.k, values, seed, p).detach() != 0


def _wrong_stream(kept_BHQK: Tensor, streams: dict[int, Tensor]) -> str:
    """Return what is wrong with the choice of weights, as a sentence, or ""."""
    count = kept_BHQK.numel()
    dropped = 1 - kept_BHQK.double().mean().item()
    if abs(dropped - P) > _SIGMAS * math.sqrt(P * (1 - P) / count):
        return f"dropout drops {dropped:.3g} of the weights where dropout_p is {P}"
    same, other = streams.values()
    if not torch.equal(same, kept_BHQK):
        return "dropout drops other weights when it is called again with the same dropout_seed"
    heads_BHX = kept_BHQK.flatten(2)
    pairs = {
        "another dropout_seed": (kept_BHQK, other),
        "another head": (heads_BHX, heads_BHX.roll(1, 1)),
        "another batch entry": (heads_BHX, heads_BHX.roll(1, 0)),
        "the row above": (kept_BHQK[:, :, 1:], kept_BHQK[:, :, :-1]),
        "the key before": (kept_BHQK[..., 1:], kept_BHQK[..., :-1]),
    }
    agree = {words: (x == y).double().mean().item() for words, (x, y) in pairs.items()}
    chance = P * P + (1 - P) * (1 - P)
    words = max(agree, key=lambda pair: abs(agree[pair] - chance))
    # twice, as pairs share members, so that their agreements are not quite independent
    if abs(agree[words] - chance) <= 2 * _SIGMAS * math.sqrt(chance * (1 - chance) / count):
        return ""
    return (
        f"dropout keeps or drops alike {agree[words]:.3g} of the weights of {words}; "
        f"chance is {chance:.3g}"
    )


def _results(attend: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
    return dict(zip(_RESULTS, (out.detach(), *gradients), strict=True))


def _judged(ours: dict[str, Tensor], inputs: Inputs, kept: Tensor) -> Iterator[TrainedFinding]:
    wide = Inputs(*(x.double() for x in inputs))
    right = _results(_with_weights(lambda p: p * kept / (1 - P)), wide)
    whole, plain = _results(golden_attention, wide), _results(baseline_attention, inputs)
    for name, x in ours.items():
        usual = (_by_head(plain[name] - whole[name]) / _by_head(whole[name])).clamp(
            min=torch.finfo(x.dtype).eps / math.sqrt(12)
        )
        ratio = _by_head(x - right[name]) / _by_head(right[name]) / usual
        if bool((ratio <= LIMIT).all()):
            continue
        worst = float(ratio.nan_to_num(math.inf).max())
        text = f"{name} errs {worst:.3g} times what plain attention does without dropout"
        mistake = _closest(name, x.double(), wide, kept, right[name])
        yield TrainedFinding(result=name, sentence=f"{text}{mistake}", value=worst)


def _by_head(x: Tensor) -> Tensor:
    return x.double().transpose(0, 1).flatten(1).norm(dim=1)


def _with_weights(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return an attention whose weights are changed after the softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return change((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)) @ v

    return attend


def _closest(name: str, x: Tensor, wide: Inputs, kept: Tensor, right: Tensor) -> str:
    """Return the mistake that takes most of the error away, as the end of a sentence."""
    distances = {
        words: float((x - _results(_with_weights(change), wide)[name]).norm())
        for words, change in _mistakes(kept).items()
    }
    words = min(distances, key=distances.__getitem__)
    return f": {words}" if distances[words] < 0.2 * float((x - right).norm()) else ""


def _mistakes(kept: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "the weights that are kept are not divided by 1 - p": lambda p: p * kept,
        "the weights that are kept are divided by their own sum": lambda p: (
            p * kept / (p * kept).sum(-1, keepdim=True).clamp(min=1e-300)
        ),
        "nothing is dropped": lambda p: p,
        "nothing is dropped, and all is divided by 1 - p": lambda p: p / (1 - P),
        "the transpose of what should be is dropped": lambda p: _transposed(p, kept) / (1 - P),
    }


def _transposed(p_BHQK: Tensor, kept_BHQK: Tensor) -> Tensor:
    size = min(kept_BHQK.shape[2:])
    turned = kept_BHQK.clone()
    turned[:, :, :size, :size] = kept_BHQK[:, :, :size, :size].mT
    return p_BHQK * turned
