"""`LibraryCall`: a call of a library's attention, translated, with the way back.

Leaves out how such calls are caught (`library_functions`) and what the arguments of each library
mean (`flash_attn_calls`, `flex_calls`, `transformer_engine_calls`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import BoundArguments
from typing import Any

from torch import Tensor, nn

from attention_kernels import MaskArguments

__all__ = ["LibraryCall", "Reader", "left_as_it_is", "standing_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryCall:
    """What one call computes, in our terms, and how to make it on other tensors."""

    qkv: tuple[Tensor, Tensor, Tensor]
    """(batch, heads, length, head_dim), with a batch of 1 where sequences are packed."""
    call: Callable[..., Any]
    """Makes the library's call on such q, k and v, and on others in the place of `trained`."""
    out_as_ours: Callable[[Any], Tensor]
    with_out: Callable[[Any, Tensor], Any]
    """Puts our out into what the library returned."""
    mask: MaskArguments = field(default_factory=MaskArguments)
    valid: Tensor | None = None
    """Which query rows are no padding, bool (batch, length); None if all."""
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    """As in `AttentionCall`, and so is `hides`."""
    hides: Tensor | None = None
    unsupported: str = ""
    lse_of: Callable[[Any], Tensor | None] = lambda _: None
    """Takes the LSE, of natural logarithms, from what the library returned, if it was asked for."""
    asks_more: str = ""
    """What the model asks for beside out, which nobody but the library's own call can give."""


Reader = Callable[[Callable[..., Any], BoundArguments], LibraryCall]
"""Translates a call of the function, by which it is to be made again."""


def left_as_it_is(
    function: Callable[..., Any], given: BoundArguments, some: Tensor, reason: str
) -> LibraryCall:
    """Return a call of which nothing is read but why, `some` being any tensor of it."""

    def first(returned: Any) -> Tensor:
        return returned[0] if isinstance(returned, tuple) else returned

    return LibraryCall(
        qkv=(some, some, some),
        call=lambda *_, **__: function(*given.args, **given.kwargs),
        out_as_ours=first,
        with_out=lambda returned, _: returned,
        unsupported=reason,
    )


@contextmanager
def standing_in(module: nn.Module, name: str, x: Tensor | None) -> Iterator[None]:
    """Inside, `x` is the parameter of that name, which `module` reads by itself; None: its own."""
    own = module._parameters.get(name)
    if x is None or own is None:
        yield
        return
    try:
        module._parameters[name] = x  # pyright: ignore[reportArgumentType]
        yield
    finally:
        module._parameters[name] = own
