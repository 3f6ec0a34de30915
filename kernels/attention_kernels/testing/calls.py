"""One call of an attention under test, forward and backward, and what its contract says of it.

An attention is called as `function(q, k, v, *, causal, scale=None)`, with `return_lse=True` where
it has that argument, and must leave alone what it was given and the settings of the process, return
tensors shaped and typed as q, k and v with no NaN in them, and give the same bits when it is called
again. What it refuses in so many words it does not support (`refusals`). Any other error is a
mistake, and so is an attempt to end the process.

It is called in other manners too, and where a bit differs, that result is looked at as well:
without the LSE, which is how training calls, under `torch.no_grad()`, and, in plain cells, with a
gradient wanted for one of q, k and v alone, as where weights are frozen, and with another call
between forward and backward, as in a model of several layers.

All calls find NaN where they might read memory that nobody has written: in tensors that Python
makes empty, and in memory that has just been freed.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attention_kernels.checks import PeerRefusalError
from attention_kernels.testing.budget import nan_filled
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.devices import CPU, inputs_on, wait_for
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.refusals import UnsupportedError, is_refusal
from attention_kernels.testing.side_effects import side_effects

__all__ = ["Breach", "Called", "Signature", "call", "call_once"]

_CAUSAL = ("causal", "is_causal")
_SCALE = ("scale", "softmax_scale", "sm_scale")
"""The names that an argument may have, the contract's own first."""


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A broken promise that needs no statistics, e.g. NaN in dq, as a sentence."""

    kind: str
    result: str
    sentence: str
    may_refuse: bool = False
    """Whether an attention that does not support such a call may say so in place of it."""


@dataclass(frozen=True, kw_only=True)
class Called:
    """The results of a call by name, as a `Reference` has them, and what it broke."""

    results: dict[str, Tensor]
    breaches: tuple[Breach, ...]
    others: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By the words for another manner of calling, the results whose bits differ from `results`."""
    refused: tuple[str, ...] = ()
    """Manners of calling that it refuses, with its words."""


@dataclass(frozen=True, kw_only=True)
class _Manner:
    """How a cell is called: whether for the LSE, and which inputs need a gradient."""

    words: str = ""
    lse: bool = False
    leaves: tuple[str, ...] = ("q", "k", "v")
    times: int = 1
    interrupted: bool = False
    """Whether another call comes between forward and backward."""


class Signature:
    """The names by which an attention takes `causal` and `scale`, and whether it gives the LSE."""

    def __init__(self, attention: Callable[..., Any], gives_lse: bool | None) -> None:
        called = attention.forward if isinstance(attention, torch.nn.Module) else attention
        try:
            parameters = inspect.signature(called).parameters
        except (TypeError, ValueError):  # a builtin, such as PyTorch's own, does not tell
            names, anything = {"is_causal", "scale"}, False
        else:
            kinds = {parameter.kind for parameter in parameters.values()}
            names, anything = set(parameters), inspect.Parameter.VAR_KEYWORD in kinds

        def name_of(argument: tuple[str, ...]) -> str:
            taken = (name for name in argument if name in names)
            return next(taken, argument[0] if anything else "")

        self.causal, self.scale = name_of(_CAUSAL), name_of(_SCALE)
        self.lse = "return_lse" in names if gives_lse is None else gives_lse

    def options(self, causal: bool, scale: float | None, lse: bool) -> dict[str, Any]:
        """Return the keywords of a call; `UnsupportedError` if one that is needed is not taken."""
        if causal and not self.causal:
            raise UnsupportedError("it takes no argument causal")
        if scale is not None and not self.scale:
            raise UnsupportedError("it takes no argument scale")
        options: dict[str, Any] = {self.causal: causal} if self.causal else {}
        options |= {} if scale is None else {self.scale: scale}
        return options | ({"return_lse": True} if lse else {})


def call(
    attention: Callable[..., Any],
    signature: Signature,
    where: Reference,
    device: torch.device = CPU,
) -> Called:
    """Call the attention twice on a cell's inputs, forward and backward, then in other manners.

    It is called on `device`, and what it gives comes back to the CPU. `UnsupportedError` if it
    refuses; any other exception of its own is a breach.
    """
    manner = _Manner(lse=signature.lse, times=2)
    called = _called(attention, signature, where, manner, device)
    if called.breaches:
        return called
    others, refused = {}, []
    for manner in _other_manners(signature, where):
        try:
            other = _called(attention, signature, where, manner, device)
        except UnsupportedError as refusal:
            refused.append(f"{refusal}, {manner.words}")
            continue
        if other.breaches:
            said = [replace(x, sentence=f"{x.sentence}, {manner.words}") for x in other.breaches]
            return replace(called, breaches=tuple(said))
        if not all(torch.equal(x, called.results[name]) for name, x in other.results.items()):
            others[manner.words] = other.results
    return replace(called, others=others, refused=tuple(refused))


def call_once(
    attention: Callable[..., Any],
    signature: Signature,
    where: Reference,
    device: torch.device = CPU,
) -> Called:
    """Call the attention on a cell's inputs, forward and backward, in the usual manner alone.

    `UnsupportedError` if it refuses; any other exception of its own is a breach.
    """
    return _called(attention, signature, where, _Manner(lse=signature.lse), device)


def _other_manners(signature: Signature, where: Reference) -> list[_Manner]:
    manners = [_Manner(words="where the LSE is not asked for")] if signature.lse else []
    manners.append(_Manner(words="under torch.no_grad()", leaves=()))
    if where.cell.is_plain():
        words = "where another call comes between forward and backward"
        manners.append(_Manner(words=words, interrupted=True))
        for name in ("q", "k", "v"):
            words = f"where {name} alone needs a gradient"
            manners.append(_Manner(words=words, leaves=(name,)))
    return manners


def _called(
    attention: Callable[..., Any],
    signature: Signature,
    where: Reference,
    manner: _Manner,
    device: torch.device,
) -> Called:
    """Call the attention on a cell's inputs in this manner, as often as it says."""
    options = signature.options(where.cell.causal, where.cell.scale, manner.lse)
    there, before = where, [x.clone() for x in where.inputs]
    versions = [x._version for x in where.inputs]
    changed: list[str] = []
    try:
        # a GPU that an earlier call has broken raises at the first copy
        there = replace(where, inputs=inputs_on(device, where.inputs))
        versions = [x._version for x in there.inputs]
        with torch.set_grad_enabled(bool(manner.leaves)), side_effects(device) as changed:
            first, *again = [_run(attention, there, options, manner) for _ in range(manner.times)]
            wait_for(device)
    except (NotImplementedError, PeerRefusalError) as error:
        raise UnsupportedError(_first_line(error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a kernel may raise is its own finding
        refuses = isinstance(error, ValueError | RuntimeError | AssertionError)
        if refuses and is_refusal(_text(error), where):
            raise UnsupportedError(_first_line(error)) from error
        return Called(results={}, breaches=(_raised(error),))
    unasked = first.pop("unasked", "")
    breaches = [*_changed_inputs(there, before, versions), *_wrong_form(first, there)]
    if unasked:
        text = f"returns {unasked} and must return out alone: no LSE was asked for"
        breaches.append(Breach(kind="form", result="out", sentence=text))
    first, *again = [_back(results, there.inputs.q.device) for results in (first, *again)]
    if not breaches:
        breaches += _not_finite(first, where)
        breaches += [x for results in again for x in _not_repeated(first, results)]
    if changed:
        text = f"changes {' and '.join(changed)} for whatever is computed after it"
        breaches.append(Breach(kind="side effect", result="out", sentence=text))
    return Called(results=first if _usable(first, where) else {}, breaches=tuple(breaches))


def _back(results: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the results with what is on `device` on the CPU."""

    def back(x: Any) -> Any:
        return x.to(CPU) if isinstance(x, Tensor) and x.device == device else x

    return {name: back(x) for name, x in results.items()}


def _run(
    attention: Callable[..., Any], where: Reference, options: dict[str, Any], manner: _Manner
) -> dict[str, Any]:
    q, k, v, dout = where.inputs
    # detached: the views of a strided cell stay views
    leaves = {
        name: x.detach().requires_grad_(name in manner.leaves)
        for name, x in zip(("q", "k", "v"), (q, k, v), strict=True)
    }
    _leave_nan_behind(q, k)
    torch.set_grad_enabled(bool(manner.leaves))  # whatever the call before has left
    with nan_filled():
        returned = attention(*leaves.values(), **options)
        out, lse = _taken_apart(returned, manner.lse)
        results: dict[str, Any] = {"out": out}
        if manner.lse:
            results["lse"] = lse.detach() if isinstance(lse, Tensor) else lse
        if manner.interrupted:
            attention(*(x.detach().flip(2).requires_grad_() for x in (q, k, v)), **options)
        wanted = [leaves[name] for name in manner.leaves]
        gradients: tuple[Any, ...] = (None,) * len(wanted)
        if isinstance(out, Tensor) and out.requires_grad and out.shape == dout.shape:
            gradients = torch.autograd.grad(out, wanted, dout.to(out.dtype), allow_unused=True)
    results["out"] = out.detach() if isinstance(out, Tensor) else out
    if isinstance(returned, tuple | list) and not manner.lse:
        results["unasked"] = f"a {type(returned).__name__} of {len(returned)}"
    names = (f"d{name}" for name in manner.leaves)
    return results | dict(zip(names, gradients, strict=True))


def _leave_nan_behind(*like: Tensor) -> None:
    """Fill blocks of the sizes that the call will ask for with NaN, and free them."""
    blocks = [torch.full_like(x, torch.nan) for x in like for _ in range(4)]
    blocks += [torch.full_like(x, torch.nan, dtype=torch.float32) for x in like for _ in range(4)]
    del blocks


def _taken_apart(returned: Any, with_lse: bool) -> tuple[Any, Any]:
    if isinstance(returned, tuple | list):
        lse = returned[1] if with_lse and len(returned) > 1 else None
        return returned[0] if returned else None, lse
    return returned, None


def _text(error: BaseException) -> str:
    """Return an exception's own words; a kernel's exception may fail even at these."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def _first_line(error: BaseException) -> str:
    text = _text(error)
    return text.splitlines()[0] if text else type(error).__name__


def _raised(error: BaseException) -> Breach:
    name = type(error).__name__
    text = f"raises {name}: {_first_line(error)}"
    return Breach(kind="raises", result="out", sentence=text, may_refuse=True)


def _changed_inputs(where: Reference, before: list[Tensor], versions: list[int]) -> list[Breach]:
    breaches = []
    for name, x, old, version in zip(
        ("q", "k", "v", "dout"), where.inputs, before, versions, strict=True
    ):
        bits_differ = not torch.equal(x.to(CPU), old)
        if bits_differ:
            x.copy_(old)  # the reference is shared with other checks
        if bits_differ or x._version != version:
            text = f"{name}, an input, is changed in place"
            breaches.append(Breach(kind="input changed", result=name, sentence=text))
    return breaches


def _wrong_form(results: dict[str, Any], where: Reference) -> list[Breach]:
    """Return what is missing, or of another shape, dtype or device than it must be."""
    breaches = []
    q, k, v, dout = where.inputs
    like = {"out": dout, "dq": q, "dk": k, "dv": v}
    for name in RESULTS:
        if name not in results:
            continue
        x = results[name]
        if not isinstance(x, Tensor):
            text = f"{name} is missing: {_why_missing(name, x)}"
            breaches.append(Breach(kind="missing", result=name, sentence=text))
            continue
        if x.layout != torch.strided or x.device != where.inputs.q.device:
            form = str(x.layout).removeprefix("torch.")
            text = f"{name} is a {form} tensor on {x.device} and must be dense, on q's device"
            breaches.append(Breach(kind="form", result=name, sentence=text))
            continue
        shape = where.golden["lse"].shape[:3] if name == "lse" else like[name].shape
        if x.shape != shape:
            text = f"{name} has shape {tuple(x.shape)} and must have {tuple(shape)}"
            breaches.append(Breach(kind="shape", result=name, sentence=text))
        wrong = (
            x.dtype not in (torch.float32, torch.float64)
            if name == "lse"
            else (x.dtype != like[name].dtype)
        )
        if wrong:
            must = "be FP32 or FP64" if name == "lse" else f"have q's, {like[name].dtype}"
            text = f"{name} has dtype {x.dtype} and must {must}"
            breaches.append(Breach(kind="dtype", result=name, sentence=text))
    return breaches


def _why_missing(name: str, x: Any) -> str:
    if name == "lse":
        return f"return_lse=True must give (out, lse), got {type(x).__name__} for the LSE"
    return "out carries no gradient to it" if name[0] == "d" else f"got {type(x).__name__}"


def _usable(results: dict[str, Any], where: Reference) -> bool:
    """Whether the numbers can be judged; adds the LSE's last axis."""
    if any(not isinstance(x, Tensor) or x.layout != torch.strided for x in results.values()):
        return False
    if any(x.device != where.inputs.q.device for x in results.values()):
        return False
    if "lse" in results and results["lse"].dim() == 3:
        results["lse"] = _as_golden_says_empty(results["lse"].unsqueeze(-1), where.golden["lse"])
    return all(x.shape == where.golden[name].shape for name, x in results.items())


def _as_golden_says_empty(lse: Tensor, golden: Tensor) -> Tensor:
    """Return the LSE with -inf for +inf in rows that attend nothing: exp(scores - lse) is 0 too."""
    if lse.shape != golden.shape:
        return lse
    return lse.masked_fill((golden == -torch.inf) & (lse == torch.inf), -torch.inf)


def _not_finite(results: dict[str, Tensor], where: Reference) -> list[Breach]:
    breaches = []
    for name, x in results.items():
        golden = where.golden[name]
        golden = golden.squeeze(-1) if x.dim() < golden.dim() else golden
        # beyond the largest of the dtype, infinity is right
        infinite = golden.abs() > torch.finfo(x.dtype).max / 1.01
        bad = (~x.isfinite() & ~infinite) | x.isnan()
        if bad.any():
            breaches.append(_bad_values(name, x, bad, where))
    return breaches


def _bad_values(name: str, x: Tensor, bad: Tensor, where: Reference) -> Breach:
    kind = "NaN" if x.isnan().any() else "infinity"
    by_row = bad if bad.dim() == 3 else bad.any(-1)
    rows = by_row.flatten(0, 1).any(0).nonzero().flatten().tolist()
    empty = ~where.cell.visible().any(-1)
    one = "key" if name in ("dk", "dv") else "row"
    at = f"in every {one}" if len(rows) == x.shape[2] else f"in {one}s {_some(rows)}"
    of_empty = name in ("out", "lse", "dq") and bool(empty.any() and empty[rows].all())
    if of_empty:
        right = "-inf" if name == "lse" else "0"
        at = f"in the rows that attend no key, {_some(rows)}, which must be {right}"
    heads = by_row.any(-1).any(0).nonzero().flatten().tolist()
    if len(heads) < x.shape[1]:
        at += f" of head {_some(heads)}"
    sentence = f"{kind} in {name} {at}"
    return Breach(kind=kind, result=name, sentence=sentence, may_refuse=of_empty)


def _not_repeated(first: dict[str, Tensor], again: dict[str, Any]) -> list[Breach]:
    breaches = []
    for name, x in first.items():
        y = again[name]
        alike = isinstance(y, Tensor) and y.shape == x.shape
        if alike and torch.equal(x.nan_to_num(), y.nan_to_num()):
            continue
        differ = (x != y).double().mean().item() if alike else 1.0
        text = (
            f"{name} is not repeatable: {differ:.2%} of its values differ when it is called again "
            "on the same inputs, a race or memory that was not set"
        )
        breaches.append(Breach(kind="not repeatable", result=name, sentence=text))
    return breaches


def _some(numbers: list[int]) -> str:
    text = ", ".join(str(number) for number in numbers[:4])
    return text if len(numbers) <= 4 else f"{text}, ... ({len(numbers)} in all)"
