"""Attentions that are wrong on purpose: what a test of attentions must be able to find.

`FAULTS` is the table of faults that an assay plants on a candidate, and `plant` puts one on any
attention: a test that misses them proves nothing by passing. A change of the scale goes through the
candidate's own argument. No argument can express the others, so their effect is computed in FP64
(`golden_faults`): each result, forward and backward, becomes candidate + golden with the fault -
golden, rounded once. Both goldens are rounded to the result's dtype before they are subtracted. A
candidate that is golden correctly rounded then becomes golden with the fault correctly rounded, and
a fault smaller than a spacing moves as many values by a whole one as gives its mean. Subtracted
first, a bias of 0.1 ULP would vanish in the rounding, and a gain of 0.5 % would become one of
0.54 % in BF16.

Beside them stand two mistakes of a kernel, `skip_last_key` and `scale_off`, and one error of a
known size, `injected_bias`, which change what a right attention is given or gives.

The injected bias moves out, computed in FP32, by a share of the spacing that q's dtype has there,
and then rounds it once, to nearest. Its mean signed error is that share. Its mean absolute error
grows from 1/4 to only 1/4 + share^2 of a spacing, which is the least that such a bias can cost: no
measure of absolute error notices a share of 0.2. The backward is FP32 and reads the biased out in
delta = rowsum(dO * O), through which the bias of arXiv 2510.04212 reaches the weights. With a share
of 0 the result is the same attention without bias.

Shape suffixes: B batch, H heads, Q query_len, K key_len, D head_dim.
"""

import difflib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels.api import AttentionOutput
from attention_kernels.formats import FORMATS, input_format
from attention_kernels.masks import MaskArguments
from attention_kernels.rounding import INPUT_DTYPES, round_into, round_to
from attention_kernels.testing import golden_faults
from attention_kernels.testing.compiled_faults import compilable
from attention_kernels.testing.fault_names import FAULT_LEVELS, Level
from attention_kernels.testing.golden_faults import GoldenFault, spacing

__all__ = [
    "FAULTS",
    "Fault",
    "Level",
    "Move",
    "Result",
    "injected_bias",
    "plant",
    "scale_off",
    "skip_last_key",
]

Result = Literal["out", "lse", "dq", "dk", "dv"]

Move = Literal["up", "coin"]
"""Where `injected_bias` moves out: always up, or up or down by the last bit of its FP32 value. The
coin errs as far and has no bias, so it is the control of a measure of bias."""

Attention = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planted fault: what it is, which results it changes, and where it must be found."""

    name: str
    what: str
    """In the words of a kernel's author."""
    results: tuple[Result, ...]
    """What it changes; every other result keeps its bits."""
    levels: tuple[Level, ...]
    """The levels of evidence on which it must be found. The level of training takes runs, so it is
    asked of `out_gain_1pct` alone, which studies train with as their arm `broken`."""
    plant: Callable[[Attention], Attention]
    """Takes an attention and returns it with the fault."""
    causal_only: bool = False
    """Whether a call without a causal mask stays right."""


def plant(attention: Attention, name: str) -> Attention:
    """Return `attention` with the planted fault called `name`, one of `FAULTS`.

    `attention` is a function of (q, k, v, *, causal, scale=None) and may take more of
    `MaskArguments`, and `return_lse=True` to return (out, lse); so does the result, in the same
    dtypes. ValueError for an unknown name. A fault in delta refuses a softcap, and
    `bias_tenth_ulp` an out in FP64, and each but `scale_gain` dropout, by a ValueError of the call.
    """
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=3, cutoff=0.4) or FAULTS
        raise ValueError(
            f"plant: name must be a planted fault, got {name!r}; nearest: {', '.join(near)}"
        )
    return FAULTS[name].plant(attention)


@dataclass(slots=True)
class _Call:
    """One call of an attention with a fault that golden computes; the backward needs it again."""

    fault: GoldenFault | float
    """A number is a factor on the results."""
    results: tuple[Result, ...]
    qkv: tuple[Tensor, Tensor, Tensor]
    mask: MaskArguments
    dtype: torch.dtype = torch.float64
    """Of the candidate's out."""
    dout: Tensor | None = None

    def forward(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the candidate's out and LSE with the fault."""
        self.dtype = out.dtype
        moves_lse = lse is not None and "lse" in self.results
        if "out" not in self.results and not moves_lse:
            return out, lse
        q, k, v = (x.double() for x in self.qkv)
        good = golden_faults.right(q, k, v, self.mask, self.dtype)
        if callable(self.fault):
            bad = self.fault(q, k, v, self.mask, self.dtype)
        else:
            bad = AttentionOutput(self.fault * good.out, good.lse)
        if "out" in self.results:
            out = _moved(out, good.out, bad.out)
        return out, lse if lse is None or not moves_lse else _moved(lse, good.lse, bad.lse)

    def backward(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the candidate's gradients by name with the fault."""
        touched = [name for name in gradients if name in self.results]
        if not touched or self.dout is None:
            return gradients
        good = self._golden_gradients(golden_faults.right, touched)
        if callable(self.fault):
            bad = self._golden_gradients(self.fault, touched)
        else:
            bad = tuple(self.fault * x for x in good)
        goldens = zip(touched, good, bad, strict=True)
        return {**gradients, **{name: _moved(gradients[name], x, y) for name, x, y in goldens}}

    def _golden_gradients(self, attend: GoldenFault, names: list[str]) -> tuple[Tensor, ...]:
        assert self.dout is not None
        with torch.enable_grad():
            q, k, v = (x.double().detach().requires_grad_() for x in self.qkv)
            wanted = [{"dq": q, "dk": k, "dv": v}[name] for name in names]
            out = attend(q, k, v, self.mask, self.dtype).out
            return torch.autograd.grad(out, wanted, self.dout.double())


def _moved(x: Tensor, good: Tensor, bad: Tensor) -> Tensor:
    """Return x + bad - good rounded once to x's dtype; bad and good are rounded to it before."""
    format = INPUT_DTYPES[x.dtype]
    moved = x.double() + (round_to(bad, format) - round_to(good, format))
    # the LSE of a row that attends nothing is -inf, and what an infinity moves to is no sum
    moved = torch.where(bad.isfinite() & good.isfinite(), moved, bad)
    moved = torch.where(bad == good, x.double(), moved)
    return torch.empty_like(x).copy_(round_into(moved, format, x.dtype))


class _Given(torch.autograd.Function):
    """Hand q, k and v to the candidate; backward, its gradients come by and take the fault."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *qkv: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(x.view_as(x) for x in qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = zip(("dq", "dk", "dv"), grads, ctx.needs_input_grad[1:], strict=True)
        moved = ctx.call.backward({name: x for name, x, is_needed in needed if is_needed})
        return None, *(moved.get(name) for name in ("dq", "dk", "dv"))


class _Gave(torch.autograd.Function):
    """Take out and LSE from the candidate and move them; backward, keep the gradient of out."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.call = call
        moved, moved_lse = call.forward(out, lse)
        if moved_lse is not None:
            moved_lse = moved_lse.view_as(moved_lse) if moved_lse is lse else moved_lse
            ctx.mark_non_differentiable(moved_lse)
        return moved.view_as(moved) if moved is out else moved, moved_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call.dout = grads[0]
        return None, grads[0], None


def _by_golden(
    fault: GoldenFault | float, results: tuple[Result, ...]
) -> Callable[[Attention], Attention]:
    def planted(attention: Attention) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            _refuse_dropout("plant", options)
            known = {key: options[key] for key in MaskArguments.__annotations__ if key in options}
            qkv = q.detach(), k.detach(), v.detach()
            call = _Call(fault, results, qkv, MaskArguments(**known))
            result = attention(*_Given.apply(call, q, k, v), **options)
            if not isinstance(result, tuple):
                return _Gave.apply(call, result, None)[0]
            return AttentionOutput(*_Gave.apply(call, *result))

        return compilable(attend, attention)

    return planted


def _refuse_dropout(function: str, options: dict[str, Any]) -> None:
    if options.get("dropout_p"):
        p = options["dropout_p"]
        raise ValueError(f"{function}: dropout_p must be 0, got {p}; the fault is made without it")


def skip_last_key(attention: Attention) -> Attention:
    """Return `attention` as if its loop over keys ended one key early in each sequence.

    `attention` must take `key_padding`. The result takes packed sequences (`cu_seqlens_q` and
    `cu_seqlens_k`), which it attends one by one, or q, k and v of one length.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        if q.dim() == 4:
            seen = torch.arange(k.shape[2], device=q.device) < k.shape[2] - 1
            return attention(q, k, v, key_padding=seen.expand(len(k), -1), **mask)
        _refuse_dropout("skip_last_key", mask)  # each would drop as the first of a batch
        outs = []
        starts = (mask.pop(name).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        for rows, keys in zip(*map(itertools.pairwise, starts), strict=True):
            parts = ((q, rows), (k, keys), (v, keys))
            one = [x[start:end].transpose(0, 1)[None] for x, (start, end) in parts]
            outs.append(attend(*one, **mask)[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


def scale_off(attention: Attention, factor: float = 1.01) -> Attention:
    """Return `attention` with its softmax scale multiplied by `factor`."""

    @functools.wraps(attention)
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **mask: Any) -> Tensor:
        right = q.shape[-1] ** -0.5 if scale is None else scale
        return attention(q, k, v, scale=factor * right, **mask)

    return attend


def injected_bias(
    attention: Callable[..., tuple[Tensor, Tensor]], share: float, move: Move = "up"
) -> Attention:
    """Return `attention` with its out moved by `share` of a spacing before it is rounded.

    `attention` is called in FP32 and must take `causal`, `scale` and `return_lse=True`. The result
    takes q, k and v in BF16 or FP16 with as many heads each; ValueError for another dtype.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"injected_bias: q must be in BF16 or FP16, got {q.dtype}; use autocast, "
                "there must be a rounding to bias"
            )
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return _InjectedBias.apply(q, k, v, causal, scale, attention, share, move)

    return attend


class _InjectedBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        attention: Callable[..., tuple[Tensor, Tensor]],
        share: float,
        move: Move,
    ) -> Tensor:
        wide = (x.float() for x in (q, k, v))
        exact, lse = attention(*wide, causal=causal, scale=scale, return_lse=True)
        format = input_format(q.dtype)
        shift = share * spacing(exact, FORMATS[format])
        if move == "coin":
            shift *= 1 - 2 * (exact.view(torch.int32) & 1)
        out = round_to(exact.double() + shift, format).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, lse_BHQ = ctx.saved_tensors
        q_BHQD, k_BHKD, v_BHKD, out_BHQD, dout_BHQD = (x.float() for x in (*tensors, grads[0]))
        with torch.autocast(dout_BHQD.device.type, enabled=False):
            scores_BHQK = ctx.scale * (q_BHQD @ k_BHKD.mT)
            if ctx.causal:
                hidden_QK = torch.ones_like(scores_BHQK[0, 0], dtype=torch.bool).triu(1)
                scores_BHQK = scores_BHQK.masked_fill(hidden_QK, -torch.inf)
            p_BHQK = torch.exp(scores_BHQK - lse_BHQ.unsqueeze(-1))
            delta_BHQ1 = (dout_BHQD * out_BHQD).sum(-1, keepdim=True)
            ds_BHQK = p_BHQK * (dout_BHQD @ v_BHKD.mT - delta_BHQ1) * ctx.scale
            gradients = ds_BHQK @ k_BHKD, ds_BHQK.mT @ q_BHQD, p_BHQK.mT @ dout_BHQD
        dtype = tensors[0].dtype
        return (*(gradient.to(dtype) for gradient in gradients), *(None,) * 5)


_ALL: tuple[Result, ...] = ("out", "lse", "dq", "dk", "dv")


def _gain(name: str, of: Result, factor: float) -> Fault:
    return Fault(
        name=name,
        what=f"a factor {factor:g} on {of} as it is stored",
        results=(of,),
        levels=FAULT_LEVELS[name],
        plant=_by_golden(factor, (of,)),
    )


def _fault(
    name: str,
    what: str,
    results: tuple[Result, ...],
    golden: GoldenFault,
    **fields: Any,
) -> Fault:
    return Fault(
        name=name,
        what=what,
        results=results,
        levels=FAULT_LEVELS[name],
        plant=_by_golden(golden, results),
        **fields,
    )


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="scale_gain",
            what="a factor 1.005 on the softmax scale",
            results=_ALL,
            levels=FAULT_LEVELS["scale_gain"],
            plant=functools.partial(scale_off, factor=1.005),
        ),
        _gain("dq_gain", "dq", 1.005),
        _gain("dk_gain", "dk", 1.005),
        _gain("dv_gain", "dv", 1.005),
        _gain("out_gain", "out", 1.005),
        _gain("out_gain_1pct", "out", 1.01),
        _fault(
            "dropped_key",
            f"one key in {golden_faults.DROPPED} is not attended",
            _ALL,
            golden_faults.dropped_key,
        ),
        _fault(
            "stale_block",
            f"the second block of {golden_faults.STALE} keys still holds k and v of the first",
            _ALL,
            golden_faults.stale_block,
        ),
        _fault(
            "delta_off",
            "a factor 0.95 on delta = rowsum(dO * O) in the backward",
            ("dq", "dk"),
            golden_faults.delta_off(0.95),
        ),
        _fault(
            "bias_tenth_ulp",
            "out 0.1 ULP too large before it is rounded, and read so by delta",
            ("out", "dq", "dk"),
            golden_faults.biased(0.1),
        ),
        _fault(
            "causal_leak",
            "each query attends the key after its own",
            _ALL,
            golden_faults.causal_leak,
            causal_only=True,
        ),
    )
}
"""The faults that an assay plants on every candidate, by name, in the order of `FAULT_NAMES`.

Where each must be found was measured. In the whole gradient of a GPT (3 layers, width 64, 20 looks,
`flash:fa2` in BF16, everything else FP32) the error over plain attention's, and the share of it
that adds up over looks, are 1.0 and 0.01 without a fault; 1.0 to 1.2 with a factor on the scale, dq
or dk, so that only the operator must show those; 3.2 and 0.08 for `dv_gain`, 5.3 and 0.48 for
`out_gain`, 11 and 0.52 for `out_gain_1pct`, 1.1 and 0.06 for `bias_tenth_ulp`, and ratios of 32 to
280 for the rest. With `delta_off` they are 1.9 and 0.07, and 2.4 and 0.16 on the demo's model,
about the limit of 2: there luck finds it, so the operator must, where dq errs 50 times as far.
"""
