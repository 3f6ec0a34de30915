"""The attentions as custom operators of torch, which makes them differentiable and compilable.

`flash_forward` and `flash_backward` run an engine, the twin or Triton. torch knows their shapes
(fake implementations) and their gradients without looking inside, so a compiled model contains them
as they are, with no graph break. The forward saves q, k and v as they came, out, and lse in the
work format. Where out is rounded to a format that q's dtype does not hold, it saves that wider out
instead, because the backward's delta = rowsum(dO * O) reads it. `reference_forward` and
`reference_backward` do the same for golden and baseline inside of `torch.compile`; outside of it
autograd differentiates those two as they stand.

A custom operator takes tensors, numbers and strings only. So the frozen numerics, which decide the
bits, travel as text (`plan_to_text`) and are read again inside, once for each text. A mask_mod
travels as a handle, and whoever calls holds the function: the caller, then autograd's context. The
arithmetic is in `twin`, `triton`, `golden` and `baseline`, the checks of arguments in `checks`.
"""

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from attention_kernels import baseline, golden
from attention_kernels.checks import check_droppable, check_mask_values
from attention_kernels.formats import FORMATS, format_named, input_format
from attention_kernels.fp_environment import ieee_arithmetic, settle_vector_math
from attention_kernels.mask_mod import MaskMod, held
from attention_kernels.masks import Mask
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.rounding import round_into
from attention_kernels.rounding_key import Draws, draws_of
from attention_kernels.twin import backward as twin_backward
from attention_kernels.twin import forward as twin_forward

__all__ = [
    "TENSORS",
    "Call",
    "Plan",
    "attend_by_definition",
    "constant_to_the_compiler",
    "flash",
    "plan_from_text",
    "plan_to_text",
    "reference_forward",
]

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """What an operator takes after q, k and v, in its order; the tensors, as in `Mask`, first."""

    key_padding: Tensor | None
    visible: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    mask_mod: MaskMod | int | None
    """Inside of an operator its handle."""
    causal: bool
    left: int | None
    right: int | None
    softcap: float
    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    rounding: Sequence[int]
    """A `RoundingKey` and a `RoundingPlace`, one after the other; empty without a key."""
    scale: float
    plan: str

    def mask(self) -> Mask:
        """Return the mask of the call."""
        fields = self._asdict()
        del fields["rounding"], fields["scale"], fields["plan"]
        if isinstance(self.mask_mod, int):
            fields["mask_mod"] = held(self.mask_mod)
        return Mask(window=(fields.pop("left"), fields.pop("right")), **fields)

    def for_operator(self) -> "Call":
        """Return what an operator takes; this call must be kept while it runs."""
        mod = self.mask_mod
        return self._replace(mask_mod=mod.handle) if isinstance(mod, MaskMod) else self


TENSORS = 7
"""How many fields of a call are tensors; the backward gets them saved, the rest as constants."""
_QKV = "Tensor q, Tensor k, Tensor v, "
_CALL = (
    "Tensor? key_padding, Tensor? visible, Tensor? bias, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? mask_mod, bool causal, "
    "SymInt? left, SymInt? right, float softcap, float dropout_p, SymInt dropout_seed, "
    "SymInt dropout_offset, SymInt[] rounding, float scale, str plan"
)
"""The fields of `Call`, as a schema of torch."""
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)"


def constant_to_the_compiler(function: F) -> F:
    """Mark a function of constants, whose result torch.compile takes without tracing it."""
    # torch.compiler.assume_constant_result does just this, but it imports Dynamo, and Triton with
    # it, which would add 1.5 s to the import of this package.
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


class Plan(NamedTuple):
    """Who computes, and at what resolved numerics."""

    engine: str
    """The name of one: "twin", "triton", "baseline" or "golden"."""
    numerics: FlashNumerics | BaselineNumerics | None
    """None for the golden."""


# torch.compile takes the result as a constant; else it would trace the reading and writing of JSON.
# That is safe because the arguments are constants, too, and torch.compile guards those.
@constant_to_the_compiler
def plan_to_text(engine: str, numerics: str | None, dtype: torch.dtype) -> str:
    """Return the plan for inputs of `dtype` as text, given the text of unresolved numerics.

    ValueError for numerics that contradict themselves in that dtype.
    """
    return _resolved(engine, numerics, dtype)


@functools.lru_cache(maxsize=256)
def _resolved(engine: str, numerics: str | None, dtype: torch.dtype) -> str:
    if numerics is None:
        return json.dumps({"engine": engine, "numerics": None})
    read = _numerics(engine, json.loads(numerics)).resolve(dtype)
    return json.dumps({"engine": engine, "numerics": read.to_dict()})


@functools.lru_cache(maxsize=256)
def plan_from_text(text: str) -> Plan:
    """Return the plan that `plan_to_text` wrote."""
    fields = json.loads(text)
    engine, values = fields["engine"], fields["numerics"]
    return Plan(engine, None if values is None else _numerics(engine, values))


def _numerics(engine: str, values: dict[str, object]) -> FlashNumerics | BaselineNumerics:
    return (BaselineNumerics() if engine == "baseline" else FlashNumerics()).with_(**values)


def _stored_apart(numerics: FlashNumerics, dtype: torch.dtype) -> bool:
    """Whether the output's rounding format has values that the returned `dtype` cannot hold."""
    return _wider(numerics.forward.output, dtype)


@functools.cache
def _wider(format: str, dtype: torch.dtype) -> bool:
    return not format_named(format).fits(FORMATS[input_format(dtype)])


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return out in q's dtype, lse in the work dtype, and the wider out or an empty tensor."""
    call = Call(*rest)
    engine, numerics = plan_from_text(call.plan)
    assert isinstance(numerics, FlashNumerics)
    mask = call.mask()
    check_mask_values("flash_attention", mask, q.shape[2], k.shape[2])
    run, _ = _engine(engine)
    options = {"scale": call.scale, "numerics": numerics, "draws": _draws(call, numerics)}
    with ieee_arithmetic(q.device):
        out, lse = run(q, k, v, mask=mask, **options)
    returned = round_into(out, input_format(q.dtype), q.dtype)
    # The schema fixes the number of results, and none of them may alias another: an empty tensor
    # stands for a wider out that there is not.
    wider = out if _stored_apart(numerics, q.dtype) else q.new_empty(0)
    return returned, lse, wider


flash_forward = torch.library.custom_op(
    "attention_kernels::flash_forward",
    _attend,
    mutates_args=(),
    schema=f"({_QKV}{_CALL}) -> (Tensor out, Tensor lse, Tensor wider)",
)


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    numerics = plan_from_text(Call(*rest).plan).numerics
    assert isinstance(numerics, FlashNumerics)
    work = numerics.work_dtype()
    # Compiled code trusts these strides: both engines return contiguous tensors, whatever q's are.
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=work)
    apart = _stored_apart(numerics, q.dtype)
    return out, lse, torch.empty_like(out, dtype=work) if apart else q.new_empty(0)


@torch.library.custom_op(
    "attention_kernels::flash_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {_QKV}Tensor out, Tensor lse, bool bias_trained, {_CALL}) -> "
    f"{_GRADIENTS}",
)
def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_trained: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the sinks and the bias, empty ones for what is not there.

    The bias has one only where `bias_trained`: it costs the products of every tile again.
    """
    call = Call(*rest)
    engine, numerics = plan_from_text(call.plan)
    assert isinstance(numerics, FlashNumerics)
    _, run = _engine(engine)
    options = {"scale": call.scale, "numerics": numerics, "draws": _draws(call, numerics)}
    with ieee_arithmetic(q.device):
        *gradients, dsinks, dbias = run(
            *(dout, q, k, v, out, lse),
            mask=call.mask(),
            bias_trained=bias_trained,
            **options,
        )
    dq, dk, dv = (round_into(x, input_format(q.dtype), q.dtype) for x in gradients)
    return dq, dk, dv, _like(call.sinks, dsinks, q), _like(call.bias, dbias, q)


def _draws(call: Call, numerics: FlashNumerics) -> Draws:
    return draws_of(numerics.arithmetic.seed, call.rounding)


def _like(x: Tensor | None, gradient: Tensor | None, q: Tensor) -> Tensor:
    """Return the gradient of x rounded once to its dtype, or an empty tensor if there is none."""
    if x is None or gradient is None:
        return q.new_empty(0)
    return round_into(gradient, input_format(x.dtype), x.dtype)


def _like_inputs(
    q: Tensor, k: Tensor, v: Tensor, call: Call, bias_trained: bool
) -> tuple[Tensor, ...]:
    of_call = (call.sinks, call.bias if bias_trained else None)
    return tuple(
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, *of_call)
    )


def _refuse(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "attention_kernels: gradients must be differentiated at most once, got a "
        "second derivative; only golden_attention, outside of torch.compile, has one"
    )


@flash_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, bias_trained, *of_call = rest
    return _like_inputs(q, k, v, Call(*of_call), bias_trained)


flash_backward.register_autograd(_refuse)


def _save_flash(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, wider = output
    ctx.settings = inputs[3 + TENSORS :]
    # kept for the backward, which is given a handle to it
    ctx.mask_mod = held(inputs[3 + Call._fields.index("mask_mod")])
    # lse and wider carry no gradient; without this autograd would allocate zeros for theirs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: 3 + TENSORS], wider if wider.numel() else out, lse)


def _flash_gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * (3 + len(Call._fields))
    q, k, v, *tensors, out, lse = ctx.saved_tensors
    trained = _bias_trained(ctx)
    gradients = flash_backward(dout, q, k, v, out, lse, trained, *tensors, *ctx.settings)
    return _to_inputs(gradients, Call(*tensors, *ctx.settings), trained)


def _bias_trained(ctx: Any) -> bool:
    return ctx.needs_input_grad[3 + Call._fields.index("bias")]


def _to_inputs(
    gradients: tuple[Tensor, ...], call: Call, bias_trained: bool
) -> tuple[Tensor | None, ...]:
    """Return a gradient, or None, for each input of an operator: q, k, v and what is in a call."""
    *of_qkv, dsinks, dbias = gradients
    of_call: dict[str, Tensor | None] = dict.fromkeys(Call._fields)
    if call.sinks is not None:
        of_call["sinks"] = dsinks
    if bias_trained:
        of_call["bias"] = dbias
    return (*of_qkv, *of_call.values())


flash_forward.register_autograd(_flash_gradients, setup_context=_save_flash)


_PLAIN = (Tensor, torch.nn.Parameter)


class _FlashAttention(torch.autograd.Function):
    """The same, for an eager call: torch's own wrapper reads the schema anew in each.

    That takes longer than all else that a call does before its kernel runs (torch 2.11 to 2.13).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _attend(*inputs)
        _save_flash(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _flash_gradients(ctx, *gradients)


def flash(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `flash_forward` does, differentiable, by the shorter way where there is one."""
    inputs = (q, k, v, *call.for_operator())
    tensors = [x for x in inputs[: 3 + TENSORS] if isinstance(x, Tensor)]
    # compilers, transforms of torch.func, modes and subclasses of tensors know operators alone
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or any(type(x) not in _PLAIN for x in tensors)
    ):
        return flash_forward(*inputs)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _FlashAttention.apply(*inputs) if trained else _attend(*inputs)


def _engine(name: str) -> tuple[Any, Any]:
    if name == "twin":
        return twin_forward.forward, twin_backward.backward
    # Triton is an optional dependency: without it the twin still runs.
    from attention_kernels.triton import launch as triton_launch

    return triton_launch.forward, triton_launch.backward


def attend_by_definition(
    q: Tensor, k: Tensor, v: Tensor, call: Call, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return what golden or baseline gives, differentiable by autograd, and the LSE if asked."""
    settle_vector_math()
    engine, numerics = plan_from_text(call.plan)
    mask = call.mask()
    check_mask_values(f"{engine}_attention", mask, q.shape[2], k.shape[2])
    if engine == "golden":
        return golden.attend(q, k, v, mask=mask, scale=call.scale, with_lse=with_lse)
    assert isinstance(numerics, BaselineNumerics)
    check_droppable("baseline_attention", numerics, mask)
    return baseline.attend(
        q, k, v, mask=mask, scale=call.scale, numerics=numerics, with_lse=with_lse
    )


@torch.library.custom_op(
    "attention_kernels::reference_forward",
    mutates_args=(),
    schema=f"({_QKV}{_CALL}) -> Tensor",
)
def reference_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Return `attend_by_definition`, contiguous."""
    return attend_by_definition(q, k, v, Call(*rest))[0].contiguous()


@reference_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    golden_plan = plan_from_text(Call(*rest).plan).engine == "golden"
    dtype = torch.float64 if golden_plan else q.dtype
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)


@torch.library.custom_op(
    "attention_kernels::reference_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {_QKV}bool bias_trained, {_CALL}) -> {_GRADIENTS}",
)
def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_trained: bool, *rest: Any
) -> tuple[Tensor, ...]:
    """Attend again and differentiate; gradients have the dtype of what they belong to."""
    call = Call(*rest)
    asked = {"sinks": call.sinks, "bias": call.bias if bias_trained else None}
    given = {"q": q, "k": k, "v": v} | {n: x for n, x in asked.items() if x is not None}
    # The current stream belongs to a thread, and the work is handed to another one below.
    stream = torch.cuda.current_stream(q.device) if q.is_cuda else None

    def differentiate() -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            leaves = [x.detach().requires_grad_() for x in given.values()]
            of_call = dict(zip(list(given)[3:], leaves[3:], strict=True))
            out, _ = attend_by_definition(*leaves[:3], call=call._replace(**of_call))
            return torch.autograd.grad(out, leaves, dout)

    # torch switches autograd off in the thread that runs an operator, so another differentiates.
    with ThreadPoolExecutor(max_workers=1) as thread:
        gradients = [x.contiguous() for x in thread.submit(differentiate).result()]
    of_call = dict(zip(list(given)[3:], gradients[3:], strict=True))
    return (*gradients[:3], *(of_call.get(name, q.new_empty(0)) for name in asked))


@reference_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias_trained, *of_call = rest
    return _like_inputs(q, k, v, Call(*of_call), bias_trained)


reference_backward.register_autograd(_refuse)


def _save_reference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[3 + TENSORS :]
    ctx.save_for_backward(*inputs[: 3 + TENSORS])


def _reference_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *tensors = ctx.saved_tensors
    trained = _bias_trained(ctx)
    gradients = reference_backward(dout, q, k, v, trained, *tensors, *ctx.settings)
    return _to_inputs(gradients, Call(*tensors, *ctx.settings), trained)


reference_forward.register_autograd(_reference_gradients, setup_context=_save_reference)
