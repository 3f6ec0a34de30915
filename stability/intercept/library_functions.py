"""Catches the attention functions of libraries: flash-attn's, and torch's flex_attention.

Each is a plain Python function that models import by name, so it is replaced wherever a module of
the process holds it, or a class or an attribute of the watched model, also compiled; everywhere at
once, for as long as a session is open. The one in its place calls it as it is unless somebody
watches the model that runs. Leaves out what is done with a call (`probe`), and functions that are
held elsewhere, as in a closure: `coverage` says what was not seen.
Source: flash-attn 2.8, `flash_attn_interface.py`; torch 2.13, `nn/attention/flex_attention.py`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from inspect import BoundArguments, signature
from threading import Lock
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.intercept.catcher import newest_catcher
from stability.probe.captured_call import AttentionCall, autocast_dtype, valid_rows

__all__ = ["block_mask_as_tensor", "watching_library_functions"]


class _Read(NamedTuple):
    """A library's call, translated."""

    qkv: tuple[Tensor, Tensor, Tensor]
    """(batch, heads, length, head_dim), with a batch of 1 where sequences are packed."""
    mask: MaskArguments
    unsupported: str
    call: Callable[[Tensor, Tensor, Tensor], Any]
    """Makes the library's call on such q, k and v."""
    out_as_ours: Callable[[Any], Tensor]
    with_out: Callable[[Any, Tensor], Any]
    """Puts our out into what the library returned."""


Reader = Callable[[Callable[..., Any], BoundArguments], _Read]


@contextmanager
def watching_library_functions(model: nn.Module) -> Iterator[None]:
    """Inside, calls of the libraries' functions that are imported by now are seen."""
    with _LOCK:
        places = [place for place in _places(model) if _reader_of(place.value)]
        watched = {id(place.value): _WatchedFunction(place.value) for place in places}
        for place in places:
            place.put(watched[id(place.value)])
    try:
        yield
    finally:
        with _LOCK:
            # also what was imported meanwhile, which got the ones that stood there
            for place in _places(model):
                if any(place.value is one for one in watched.values()):
                    place.put(place.value.__wrapped__)


_LOCK = Lock()


class _Place(NamedTuple):
    """A name that holds a function."""

    owner: Any
    name: str
    value: Any
    is_static: bool

    def put(self, value: Any) -> None:
        setattr(self.owner, self.name, staticmethod(value) if self.is_static else value)


def _places(model: nn.Module) -> Iterator[_Place]:
    if not any(library in sys.modules for library in _LIBRARIES):
        return
    owners: list[Any] = [m for m in tuple(sys.modules.values()) if isinstance(m, ModuleType)]
    for module in model.modules():
        owners += [module, *type(module).__mro__]
    for owner in dict.fromkeys(owners):
        for name, value in tuple(getattr(owner, "__dict__", {}).items()):
            is_static = type(value) is staticmethod
            function = value.__func__ if is_static else value
            # by type alone: a proxy that is asked for anything may warn, or import its library
            if type(function) in (FunctionType, _WatchedFunction):
                yield _Place(owner, name, function, is_static)


def _reader_of(function: Any) -> Reader | None:
    """Return how the calls of a function are read, None if it is none of the libraries'."""
    plain = getattr(function, "_torchdynamo_orig_callable", function)
    if isinstance(plain, FunctionType):
        for library, readers in _LIBRARIES.items():
            if f"{plain.__module__}.".startswith(f"{library}."):
                return readers.get(plain.__name__)
    return None


class _WatchedFunction:
    """Stands where a library's function stood."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        reader = _reader_of(function)
        assert reader is not None
        self._reader = reader
        plain = getattr(function, "_torchdynamo_orig_callable", function)
        self._signature = signature(plain)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Be bound as the function would be, where a class holds it."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Copy and pickle as the function itself."""
        return self.__wrapped__.__reduce_ex__(4)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the function itself, as `__reduce__`."""
        return self.__wrapped__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # first: a graph is to be what it is without this, and guards on what it has asked for
        catcher = None if torch.compiler.is_dynamo_compiling() else newest_catcher()
        if catcher is None:
            return self.__wrapped__(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        # by this object: an outer catch is still to see the call
        read = self._reader(self, given)
        returned: list[Any] = []

        def primary(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            returned.append(read.call(q, k, v))
            return read.out_as_ours(returned[-1]), None

        q, k, v = read.qkv
        attn_mask = read.mask.get("attn_mask")
        call = AttentionCall(
            layer=catcher.next_layer(),
            q=q,
            k=k,
            v=v,
            mask=read.mask,
            valid=None if attn_mask is None else valid_rows(attn_mask, q, k),
            dtype=autocast_dtype(q, k, v),
            unsupported=read.unsupported,
        )
        out = catcher.hand_over(call, primary)
        return read.with_out(returned[0] if returned else None, out)


def _read_flash(function: Callable[..., Any], given: BoundArguments) -> _Read:
    """Read a call of flash-attn: heads behind tokens, packed or not, padded or not."""
    of = given.arguments
    names = [name for name in ("qkv", "q", "kv", "k", "v") if name in of]
    parts = {"qkv": 3, "q": 1, "kv": 2, "k": 1, "v": 1}
    tensors: list[Tensor] = []
    for name in names:
        # (..., parts, heads, head_dim)
        tensors += of[name].unbind(-3) if parts[name] > 1 else [of[name]]
    is_packed = tensors[0].dim() == 3

    def ours(x: Tensor) -> Tensor:
        return (x.unsqueeze(0) if is_packed else x).transpose(1, 2)

    def theirs(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return x.squeeze(0) if is_packed else x

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        left = [theirs(x) for x in (q, k, v)]
        values = dict(of)
        for name in names:
            taken, left = left[: parts[name]], left[parts[name] :]
            values[name] = torch.stack(taken, -3) if len(taken) > 1 else taken[0]
        return function(**values)

    def with_out(returned: Any, out: Tensor) -> Any:
        ours_back = theirs(out)
        return (ours_back, *returned[1:]) if isinstance(returned, tuple) else ours_back

    q, k, v = (ours(x) for x in tensors)
    return _Read(
        qkv=(q, k, v),
        mask=_flash_mask(of, q, k),
        unsupported=_flash_unsupported(of),
        call=call,
        out_as_ours=lambda returned: ours(returned[0] if isinstance(returned, tuple) else returned),
        with_out=with_out,
    )


def _flash_mask(of: dict[str, Any], q: Tensor, k: Tensor) -> MaskArguments:
    mask = MaskArguments(causal=bool(of.get("causal")))
    if of.get("softmax_scale") is not None:
        mask["scale"] = float(of["softmax_scale"])
    window = tuple(of.get("window_size") or (-1, -1))
    if window != (-1, -1):
        left, right = (None if side is None or side < 0 else side for side in window)
        mask["window"] = (left, right)
    if of.get("softcap"):
        mask["softcap"] = float(of["softcap"])
    if of.get("alibi_slopes") is not None:
        mask["alibi_slopes"] = of["alibi_slopes"].detach()
    starts = of.get("cu_seqlens", of.get("cu_seqlens_q"))
    if starts is not None:
        of_keys = of.get("cu_seqlens_k", starts)
        return _of_packed(mask, starts, of_keys, q.shape[2], k.shape[2])
    return mask


def _of_packed(
    mask: MaskArguments, of_queries: Tensor, of_keys: Tensor, query_len: int, key_len: int
) -> MaskArguments:
    """Return the mask of packed sequences as one of all tokens: none sees another sequence."""
    rows = torch.arange(query_len, device=of_queries.device)
    columns = torch.arange(key_len, device=of_queries.device)
    row = torch.bucketize(rows, of_queries[1:], right=True)
    column = torch.bucketize(columns, of_keys[1:], right=True)
    # where a query stands among its own keys: the last at the last, as flash-attn has it
    place = rows - of_queries[1:].take(row.clamp_max(len(of_queries) - 2))
    at = columns - of_keys[1:].take(column.clamp_max(len(of_keys) - 2))
    distance = at[None, :] - place[:, None]
    visible = row[:, None] == column[None, :]
    left, right = mask.pop("window", None) or (None, None)
    if mask.pop("causal", False):
        right = 0 if right is None else min(right, 0)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    mask["causal"] = False
    mask["attn_mask"] = visible[None, None]
    return mask


def _flash_unsupported(of: dict[str, Any]) -> str:
    if of.get("dropout_p"):
        return f"dropout_p {of['dropout_p']:g}; a shadow would drop other values"
    if of.get("block_table") is not None:
        return "a paged cache (block_table)"
    if of.get("alibi_slopes") is not None and any("cu_seqlens" in name for name in of):
        return "ALiBi slopes of packed sequences"
    return ""


def _read_flex(function: Callable[..., Any], given: BoundArguments) -> _Read:
    """Read a call of flex_attention, whose mask is evaluated."""
    of = given.arguments
    q, k, v = of["query"], of["key"], of["value"]
    mask = MaskArguments(causal=False)
    if of["scale"] is not None:
        mask["scale"] = float(of["scale"])
    if of["block_mask"] is not None:
        mask["attn_mask"] = block_mask_as_tensor(of["block_mask"], q, k)
    unsupported = ""
    if of["score_mod"] is not None:
        name = getattr(of["score_mod"], "__name__", "score_mod")
        unsupported = f"the score_mod {name} of flex_attention: no candidate computes it"

    def with_out(returned: Any, out: Tensor) -> Any:
        return (out, *returned[1:]) if isinstance(returned, tuple) else out

    return _Read(
        qkv=(q, k, v),
        mask=mask,
        unsupported=unsupported,
        call=lambda q, k, v: function(**{**of, "query": q, "key": k, "value": v}),
        out_as_ours=lambda returned: returned[0] if isinstance(returned, tuple) else returned,
        with_out=with_out,
    )


_MASKS: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
"""The layers of a model share their block mask, so each is evaluated once."""


def block_mask_as_tensor(block_mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return flex_attention's mask as bool `(batch or 1, heads or 1, query_len, key_len)`."""
    from torch.nn.attention.flex_attention import create_mask  # heavy, and imported by now

    shape = (*block_mask.shape[:2], q.shape[2], k.shape[2])
    found = _MASKS.get(block_mask)
    if found is None or tuple(found.shape) != shape:
        with torch.no_grad():
            batch, heads, query_len, key_len = shape
            found = create_mask(
                block_mask.mask_mod, batch, heads, query_len, key_len, device=q.device
            )
        _MASKS[block_mask] = found
    return found


_FLASH: dict[str, Reader] = dict.fromkeys(
    (
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
    ),
    _read_flash,
)
_LIBRARIES: dict[str, dict[str, Reader]] = {
    "flash_attn": _FLASH,
    "flash_attn_interface": _FLASH,
    "torch.nn.attention.flex_attention": {"flex_attention": _read_flex},
}
"""What is watched of which library, and how its calls are read."""
