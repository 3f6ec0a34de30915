"""One call of an attention under test, forward and backward, and what its contract says of it.

An attention is called as `function(q, k, v, *, causal, scale=None)`, with `return_lse=True` where
it has that argument, and must leave alone what it was given, return tensors shaped and typed as q,
k and v with no NaN in them, and give the same bits when it is called again. What it refuses in so
many words it does not support: NotImplementedError, or a ValueError that says that an option of
this very call is not taken ("head_dim must be at most 64, got 96"). Any other error is a mistake,
and so is an attempt to end the process.

An attention that gives the LSE is called without it too: that is the call that training makes.

Both calls find NaN where they might read memory that nobody has written: in tensors that Python
makes empty, and in memory that has just been freed.
"""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_kernels.checks import PeerRefusalError
from attention_kernels.testing.budget import nan_filled
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.formula import RESULTS

__all__ = ["WITHOUT_LSE", "Breach", "Called", "Signature", "UnsupportedError", "call"]

WITHOUT_LSE = "where the LSE is not asked for"
"""The words for a finding that the call with `return_lse=True` does not have."""


class _Option(NamedTuple):
    """The words for an option of a call, and the values that a cell has for it; none if unused."""

    words: str
    values: Callable[[Reference], tuple[object, ...]]


def _lengths(where: Reference) -> tuple[object, ...]:
    return where.cell.shape.query_len, where.cell.shape.key_len


def _groups(where: Reference) -> tuple[object, ...]:
    shape = where.cell.shape
    return () if shape.heads == shape.kv_heads else (shape.heads, shape.kv_heads)


_OPTIONS = (
    _Option(r"causal", lambda where: (where.cell.causal,)),
    _Option(
        r"dtype|float\d*|bfloat16|half|bf16|fp16|fp32",
        lambda where: (where.dtype, str(where.dtype).removeprefix("torch.")),
    ),
    _Option(r"head[_ ]?dim|head[_ ]size", lambda where: (where.cell.shape.head_dim,)),
    _Option(r"gqa|mqa|grouped|(kv|num)[_ ]heads|heads", _groups),
    _Option(r"(query|key|kv|seq|sequence)[_ ]?len\w*|lengths?|seqlens?", _lengths),
    _Option(r"scale", lambda where: () if where.cell.scale is None else (where.cell.scale,)),
    _Option(r"contiguous|strides?", lambda where: (True,) if where.cell.strided else ()),
)
_REFUSES = re.compile(
    r"support|not implemented|unavailable|\bonly\b|\bmust\b|requires?\b|multiple of|divisible",
    re.IGNORECASE,
)
_GOT = re.compile(r"\bgot:? +([\w.]+)", re.IGNORECASE)


class UnsupportedError(Exception):
    """The attention says that it does not do what it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A broken promise that needs no statistics, e.g. NaN in dq, as a sentence."""

    kind: str
    result: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Called:
    """The results of a call by name, as a `Reference` has them, and what it broke."""

    results: dict[str, Tensor]
    breaches: tuple[Breach, ...]
    without_lse: dict[str, Tensor] | None = None
    """The results where the LSE is not asked for, if any bit of them differs from `results`."""


class Signature:
    """Which of `causal`, `scale` and `return_lse` an attention takes by name."""

    def __init__(self, attention: Callable[..., Any], gives_lse: bool | None) -> None:
        try:
            parameters = inspect.signature(attention).parameters
        except (TypeError, ValueError):  # a builtin does not tell
            names, anything = {"causal", "scale"}, False
        else:
            kinds = {parameter.kind for parameter in parameters.values()}
            names, anything = set(parameters), inspect.Parameter.VAR_KEYWORD in kinds
        self.causal = anything or "causal" in names
        self.scale = anything or "scale" in names
        self.lse = "return_lse" in names if gives_lse is None else gives_lse

    def without_lse(self) -> "Signature":
        """Return the same signature, by which the LSE is not asked for."""
        other = copy.copy(self)
        other.lse = False
        return other

    def options(self, causal: bool, scale: float | None) -> dict[str, Any]:
        """Return the keywords of a call; `UnsupportedError` if one that is needed is not taken."""
        if causal and not self.causal:
            raise UnsupportedError("it takes no argument causal")
        if scale is not None and not self.scale:
            raise UnsupportedError("it takes no argument scale")
        options: dict[str, Any] = {"causal": causal} if self.causal else {}
        options |= {} if scale is None else {"scale": scale}
        return options | ({"return_lse": True} if self.lse else {})


def call(attention: Callable[..., Any], signature: Signature, where: Reference) -> Called:
    """Call the attention twice on a cell's inputs, forward and backward, and without the LSE.

    `UnsupportedError` if it refuses; any other exception of its own is a breach.
    """
    called = _called(attention, signature, where)
    if not signature.lse or called.breaches:
        return called
    plain = _called(attention, signature.without_lse(), where)
    if plain.breaches:
        said = [replace(x, sentence=f"{x.sentence}, {WITHOUT_LSE}") for x in plain.breaches]
        return replace(called, breaches=tuple(said))
    same = all(torch.equal(x, called.results[name]) for name, x in plain.results.items())
    return called if same else replace(called, without_lse=plain.results)


def _called(attention: Callable[..., Any], signature: Signature, where: Reference) -> Called:
    """Call the attention twice on a cell's inputs by this signature."""
    inputs, options = where.inputs, signature.options(where.cell.causal, where.cell.scale)
    before = [x.clone() for x in inputs]
    versions = [x._version for x in inputs]
    try:
        first = _run(attention, where, options)
        again = _run(attention, where, options)
    except (NotImplementedError, PeerRefusalError) as error:
        raise UnsupportedError(_first_line(error)) from error
    except ValueError as error:
        if _is_refusal(_text(error), where):
            raise UnsupportedError(_first_line(error)) from error
        return Called(results={}, breaches=(_raised(error),))
    except (Exception, SystemExit) as error:  # whatever a kernel may raise is its own finding
        return Called(results={}, breaches=(_raised(error),))
    unasked, _ = first.pop("unasked", ""), again.pop("unasked", "")
    breaches = [*_changed_inputs(where, before, versions), *_wrong_form(first, where)]
    if unasked:
        text = f"returns {unasked} and must return out alone: no LSE was asked for"
        breaches.append(Breach(kind="form", result="out", sentence=text))
    if not breaches:
        breaches += [*_not_finite(first, where), *_not_repeated(first, again)]
    return Called(results=first if _usable(first, where) else {}, breaches=tuple(breaches))


def _run(
    attention: Callable[..., Any], where: Reference, options: dict[str, Any]
) -> dict[str, Any]:
    q, k, v, dout = where.inputs
    # detached: the views of a strided cell stay views
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    _leave_nan_behind(q, k)
    with nan_filled():
        returned = attention(*leaves, **options)
        out, lse = _taken_apart(returned, "return_lse" in options)
        results: dict[str, Any] = {"out": out}
        if "return_lse" in options:
            results["lse"] = lse.detach() if isinstance(lse, Tensor) else lse
        gradients: tuple[Any, ...] = (None,) * 3
        if isinstance(out, Tensor) and out.requires_grad and out.shape == dout.shape:
            gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
    results["out"] = out.detach() if isinstance(out, Tensor) else out
    if isinstance(returned, tuple | list) and "return_lse" not in options:
        results["unasked"] = f"a {type(returned).__name__} of {len(returned)}"
    return results | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


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


def _is_refusal(message: str, where: Reference) -> bool:
    """Whether a ValueError refuses an option that the cell has, rather than being a mistake.

    It must say in a word of refusal that an option is not taken, and one that the cell uses. Where
    it ends "got <value>", that value must be the cell's own.
    """
    if not _REFUSES.search(message):
        return False
    got = _GOT.search(message)
    for option in _OPTIONS:
        values = [str(value).lower() for value in option.values(where)]
        named = values and re.search(rf"\b({option.words})\b", message, re.IGNORECASE)
        if named and (got is None or got[1].lower().rstrip(".") in values):
            return True
    return False


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
    return Breach(kind="raises", result="out", sentence=text)


def _changed_inputs(where: Reference, before: list[Tensor], versions: list[int]) -> list[Breach]:
    breaches = []
    for name, x, old, version in zip(
        ("q", "k", "v", "dout"), where.inputs, before, versions, strict=True
    ):
        bits_differ = not torch.equal(x, old)
        if bits_differ:
            x.copy_(old)  # the reference is shared with other checks
        if bits_differ or x._version != version:
            text = f"{name}, an input, is changed in place"
            breaches.append(Breach(kind="input changed", result=name, sentence=text))
    return breaches


def _wrong_form(results: dict[str, Any], where: Reference) -> list[Breach]:
    """Return what is missing, or of another shape, dtype or device than it must be."""
    breaches = []
    like = dict(zip(("out", "dq", "dk", "dv"), (*where.inputs[:1], *where.inputs[:3]), strict=True))
    for name in RESULTS:
        if name == "lse" and name not in results:
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
        results["lse"] = results["lse"].unsqueeze(-1)
    return all(x.shape == where.golden[name].shape for name, x in results.items())


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
    at = "in every row" if len(rows) == x.shape[2] else f"in rows {_some(rows)}"
    if name in ("out", "lse", "dq") and empty.any() and empty[rows].all():
        at = f"in the rows that attend no key, {_some(rows)}"
    heads = by_row.any(-1).any(0).nonzero().flatten().tolist()
    if len(heads) < x.shape[1]:
        at += f" of head {_some(heads)}"
    return Breach(kind=kind, result=name, sentence=f"{kind} in {name} {at}")


def _not_repeated(first: dict[str, Tensor], again: dict[str, Any]) -> list[Breach]:
    breaches = []
    for name, x in first.items():
        y = again[name]
        if torch.equal(x.nan_to_num(), y.nan_to_num()):
            continue
        differ = (x != y).double().mean().item()
        text = (
            f"{name} is not repeatable: {differ:.2%} of its values differ when it is called again "
            "on the same inputs, a race or memory that was not set"
        )
        breaches.append(Breach(kind="not repeatable", result=name, sentence=text))
    return breaches


def _some(numbers: list[int]) -> str:
    text = ", ".join(str(number) for number in numbers[:4])
    return text if len(numbers) <= 4 else f"{text}, ... ({len(numbers)} in all)"
