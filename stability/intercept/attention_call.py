"""`attention_call`: makes an attention that is written by hand one whose calls `shadow` sees.

Called outside of a watched model, or in one while nothing is looked at, the function is called as
it is. Leaves out what is done with a call (`probe`, `replacement`).
"""

from collections.abc import Callable, Mapping
from functools import update_wrapper
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from stability.intercept.catcher import newest_catcher
from stability.probe.autocast import autocast_dtype
from stability.probe.captured_call import AttentionCall, repeating, valid_rows
from stability.probe.isolation import isolated

__all__ = ["attention_call"]

Layout = Literal["bhtd", "bthd"]
"""batch, heads, tokens, head_dim; or heads behind tokens, as flash-attn has them."""


def attention_call(
    function: Callable[..., Tensor],
    *,
    masks: Callable[..., Mapping[str, Any]] | None = None,
    layout: Layout = "bhtd",
) -> Callable[..., Tensor]:
    """Return `function` as one whose calls `shadow` sees; also a decorator.

    `function(q, k, v, ...)` returns out alone, shaped as q; all are in `layout`. What else it is
    given is taken for the arguments of `attention_kernels.MaskArguments` by their names; a function
    that names them otherwise says so by `masks`, which is called with what follows q, k and v and
    returns them: `attention_call(attend, masks=lambda mask: {"attn_mask": mask})`. A call with an
    argument that is neither is made all the same, and is a finding; so is one with dropout, unless
    its dropout_seed says what `attention_kernels` would drop. ValueError for another layout; a
    watched call raises it where the function returns more than out.
    """
    if layout not in ("bhtd", "bthd"):
        raise ValueError(f"attention_call: layout must be 'bhtd' or 'bthd', got {layout!r}")
    return update_wrapper(_WatchedAttention(function, masks, layout), function)


class _WatchedAttention:
    """An attention that hands its calls to whoever watches the model that makes them."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        masks: Callable[..., Mapping[str, Any]] | None,
        layout: Layout,
    ) -> None:
        self._function = function
        self._masks = masks
        self._layout = layout
        self._returns_out = False
        """Whether it is known to return out alone."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # first: a graph is to be what it is without this, and guards on what it has asked for
        catcher = None if torch.compiler.is_dynamo_compiling() else newest_catcher()
        if catcher is None:
            return self._function(q, k, v, *args, **kwargs)

        mask, unsupported = self._read(args, kwargs)
        q, k, v = map(self._turned, (q, k, v))
        attn_mask = mask.get("attn_mask")
        trained = _trained(mask, (*args, *kwargs.values()))

        def primary(q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> tuple[Tensor, None]:
            def given(x: Any) -> Any:
                return next((others[n] for n in others if x is trained[n]), x)

            values = {name: given(x) for name, x in kwargs.items()}
            # by this object: an outer catch is still to see the call
            out = self(*map(self._turned, (q, k, v)), *map(given, args), **values)
            self._check(out)
            return self._turned(out), None

        call = AttentionCall(
            layer=catcher.next_layer(),
            q=q,
            k=k,
            v=v,
            mask=mask,
            valid=None if attn_mask is None else valid_rows(attn_mask.detach(), q, k),
            dtype=autocast_dtype(q, k, v),
            unsupported=unsupported,
            trained=trained,
        )
        out = catcher.hand_over(call, primary)
        if not self._returns_out:  # another took its place, and would be taken for all it returns
            with repeating(), isolated(q.device), torch.no_grad():
                primary(q, k, v)
        return self._turned(out)

    def _check(self, out: Any) -> None:
        """ValueError if a call has returned more than out."""
        if not isinstance(out, Tensor):
            raise ValueError(
                f"attention_call: {self._name} must return out alone, a tensor, got a "
                f"{type(out).__name__}; wrap a function that does, and is called in its place"
            )
        self._returns_out = True

    def __reduce__(self) -> Any:
        """Pickle and copy as what made it."""
        return _WatchedAttention, (self._function, self._masks, self._layout)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def _turned(self, x: Tensor) -> Tensor:
        return x if self._layout == "bhtd" else x.transpose(1, 2)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[MaskArguments, str]:
        """Return the call's arguments as ours, or none of them and what can't be read."""
        known = MaskArguments.__optional_keys__
        given = dict(self._masks(*args, **kwargs)) if self._masks else self._by_name(args, kwargs)
        unknown = [name for name, value in given.items() if name not in known and value is not None]
        if unknown:
            reason = (
                f"{self._name} takes {', '.join(unknown)}, whose meaning is not known; say what it "
                f"means by attention_call({self._name}, masks=...), of {', '.join(sorted(known))}"
            )
            return MaskArguments(), reason
        dropout = given.get("dropout_p") or 0.0
        if dropout and given.get("dropout_seed") is None:
            return MaskArguments(), f"dropout_p {dropout:g}; a shadow would drop other values"
        # a seed that nothing is drawn from would be refused by attentions that take none
        read = {n for n in known if n in given and (dropout or not n.startswith("dropout_"))}
        return MaskArguments(**{name: x for name, x in given.items() if name in read}), ""

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what follows q, k and v, by name; what is not given by its default."""
        try:
            bound = signature(self._function).bind(None, None, None, *args, **kwargs)
        except (TypeError, ValueError):  # no signature; or the call itself will say what is wrong
            return {**kwargs, **{f"argument {i + 4}": x for i, x in enumerate(args)}}
        bound.apply_defaults()
        named = dict(list(bound.arguments.items())[3:])
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        return {name: value for name, value in named.items() if value != ()}


def _trained(mask: MaskArguments, given: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return what of the mask is trained and was given as it is, so that another can stand in."""
    tensors = {"bias": mask.get("attn_mask"), "sinks": mask.get("sinks")}
    return {
        name: x
        for name, x in tensors.items()
        if isinstance(x, Tensor) and x.requires_grad and any(x is one for one in given)
    }
