"""Catches every attention call of a Hugging Face transformers model.

In each forward pass every attention layer asks `AttentionInterface.get_interface` for the function
that the config names. While a context is open that one method is patched and returns a wrapper.
Configs and masks stay as they are, so the model's own eager or sdpa function still gets exactly the
arguments that it would get without us. Leaves out attention that a model
computes without the interface (`sdpa` catches it where it ends in `scaled_dot_product_attention`),
what a call means (`transformers_call`), and replacing a model's attention for good
(`transformers_candidate`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.intercept.block_masks import read_block_mask
from stability.intercept.catcher import Catcher, newest_catcher
from stability.intercept.library_call import standing_in
from stability.intercept.transformers_call import (
    CANDIDATE_ARGUMENTS,
    REGISTERED,
    SINKS,
    MaskReader,
    TransformersCall,
    argument_names,
    unsupported,
)
from stability.probe.autocast import autocast_dtype, lowered_dtype
from stability.probe.captured_call import AttentionCall, add_bias, in_dtype_of_q, is_repeating

__all__ = [
    "catch_transformers",
    "check_transformers",
    "is_transformers_model",
]

Function = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of transformers; it returns (batch, query_len, heads, head_dim)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedFunction:
    """What is known of the attention function that a model asked the interface for."""

    name: str
    eager: bool
    """Whether it is the eager function of the model's own file."""
    known: bool
    """Whether it is eager, sdpa, flex or a registered candidate: its calls can be translated."""
    argument_names: frozenset[str]
    """The arguments that it takes by name."""


_KNOWN = ("sdpa", "flex_attention")
"""The library's own functions whose calls can be translated."""

_LOCK = Lock()
_OPEN: list[Catcher] = []
"""The interface is patched while there is one of any model here."""

_READER = MaskReader()


def is_transformers_model(model: nn.Module) -> bool:
    """Say whether `model` is or contains a `PreTrainedModel`, without importing transformers."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for module in model.modules()
        for kind in type(module).__mro__
    )


def check_transformers(model: nn.Module) -> None:
    """Raise ValueError if attention of the model in training mode drops probabilities.

    Calls can still turn out unsupported during the run.
    """
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        is_attention = any(part in type(module).__name__.lower() for part in ("attention", "attn"))
        if config is not None and is_attention and module.training:
            _refuse_dropout(name, config)


def _refuse_dropout(layer: str, config: Any) -> None:
    for field_name, value in vars(config).items():
        is_dropout = "att" in field_name and "drop" in field_name
        if is_dropout and isinstance(value, int | float) and value > 0:
            raise ValueError(
                f"model: config.{field_name} of {layer} must be 0 in training, got "
                f"{value}; build the model with {field_name}=0, or call model.eval()"
            )


@contextmanager
def catch_transformers(catcher: Catcher) -> Iterator[None]:
    """Inside, each call by the interface that a module of the model makes goes to `catcher`.

    Where its handler returns the primary's own out, the model computes the same bits as outside the
    context. Contexts may be nested and may end in any order.
    """
    catcher.everywhere.append(partial(_patch_interface, catcher))
    yield


def _patch_interface(catcher: Catcher) -> Callable[[], None]:
    from transformers import AttentionInterface  # optional dependency

    with _LOCK:
        if not _OPEN:
            AttentionInterface.get_interface = _catching_interface(AttentionInterface.get_interface)
        _OPEN.append(catcher)

    def restore() -> None:
        with _LOCK:
            _OPEN.remove(catcher)
            if not _OPEN:
                AttentionInterface.get_interface = AttentionInterface.get_interface.__wrapped__

    return restore


def _catching_interface(get_interface: Callable[..., Function]) -> Callable[..., Function]:
    """Return a `get_interface` whose functions hand their calls to whoever watches the model."""

    @wraps(get_interface)
    def catching(self: Any, attn_implementation: str, default: Function) -> Function:
        function = get_interface(self, attn_implementation, default)
        if torch.compiler.is_dynamo_compiling():  # a graph is to be what it is without this
            return function
        registered = attn_implementation in REGISTERED
        asked = _AskedFunction(
            name=attn_implementation,
            eager=function is default,
            known=function is default or registered or attn_implementation in _KNOWN,
            argument_names=CANDIDATE_ARGUMENTS if registered else argument_names(function),
        )
        return partial(_attend, asked, function)

    return catching


def _attend(
    asked: _AskedFunction,
    function: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Hand the call of `module` to whoever watches it in place of `function`."""
    # the interface is shared by all models: a call of another one passes through, and so does one
    # whose meaning is not known here, as flash-attn's: it may go through another door further down
    catcher = newest_catcher(module) if asked.known else None
    if catcher is None:
        return function(module, query, key, value, attention_mask, **options)
    layer = catcher.next_layer(module)
    block_mask = None
    if type(attention_mask).__name__ == "BlockMask":
        block_mask = read_block_mask(attention_mask, query, key)
    received = TransformersCall(
        module=module,
        attention_mask=block_mask.mask.get("attn_mask") if block_mask else attention_mask,
        options=options,
        argument_names=asked.argument_names,
        # nor does flex know is_causal: its mask says it all
        eager=asked.eager or asked.name == "flex_attention",
        self_attention=not _is_cross(layer, module),
    )
    reason = unsupported(received, query, key, value)
    if block_mask is not None:
        reason = reason or block_mask.unsupported
    mask, valid, trained, hides = MaskArguments(), None, {}, None
    if not reason:
        bias = received.option("position_bias")
        alone = received._replace(options={**options, "position_bias": None})
        mask, valid = _READER.read(alone, query, key)
        if block_mask is not None and "mask_mod" in block_mask.mask:
            mask["mask_mod"] = block_mask.mask["mask_mod"]
            valid = block_mask.rows_that_count(received.self_attention)
        if bias is not None:
            hides = mask.get("attn_mask")
            mask["attn_mask"] = add_bias(hides, bias)
        elif received.attention_mask is not None and received.attention_mask.requires_grad:
            bias = mask.get("attn_mask")
        given = {"bias": bias, "sinks": mask.get("sinks")}
        trained = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    call = AttentionCall(
        layer=layer,
        q=query,
        k=key,
        v=value,
        mask=mask,
        valid=valid,
        dtype=autocast_dtype(query, key, value),
        # the eager functions add a bias to scores, which autocast leaves as it is
        lowered_to=lowered_dtype(query) if asked.name == "sdpa" and not asked.eager else None,
        unsupported=reason,
        trained=trained,
        hides=hides,
    )
    # by this function: an outer catch is still to see the call
    attend = partial(_attend, asked, function)
    primary = _ModelAttention(attend, query, received, attention_mask)
    return primary.returned(catcher.hand_over(call, primary))


def _is_cross(layer: str, module: nn.Module) -> bool:
    """Tell cross-attention by the names of its path and class.

    Nothing else shows it where queries and keys have one length.
    """
    names = f"{layer} {type(module).__name__}".lower()
    return any(part in names for part in ("cross", "encoder_attn", "encdec"))


class _ModelAttention:
    """The model's own attention function, bound to one call's arguments, as a `BoundAttention`.

    It remembers its results, so that the layer can be given the attention weights as well.
    """

    def __init__(
        self, function: Function, query: Tensor, received: TransformersCall, attention_mask: Any
    ) -> None:
        self._function = function
        self._query = query
        self._received = received
        self._attention_mask = attention_mask
        self._results: list[tuple[Tensor, Tensor | None]] = []
        self._has_graph = torch.is_grad_enabled()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        module, options = self._received.module, dict(self._received.options)
        mask = self._attention_mask
        if isinstance(mask, Tensor):
            mask = in_dtype_of_q(mask, self._query, q)
        if isinstance(options.get("position_bias"), Tensor):
            options["position_bias"] = in_dtype_of_q(options["position_bias"], self._query, q)
        if bias is not None and options.get("position_bias") is None:
            mask = bias
        elif bias is not None:
            options["position_bias"] = bias
        if sinks is not None:
            options |= {name: sinks for name in SINKS if options.get(name) is not None}
        # which eager attention of GPT-OSS reads by itself
        with standing_in(module, "sinks", sinks):
            out, weights = self._function(module, q, k, v, mask, **options)
        turned = out.transpose(1, 2)
        # weights made on the side, or without their gradients, are not what the model gets
        if torch.is_grad_enabled() == self._has_graph and not is_repeating():
            self._results.append((turned, weights))
        return turned, None

    def returned(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `out` as the layer expects it, and the function's own attention weights.

        If `out` is the function's own result, it is returned as a view, transposed twice. That
        keeps its memory layout, and the gradient still passes through the tensor that the handler
        has seen, on which a probe has put its hook.
        """
        for turned, weights in self._results:
            if turned is out:
                return turned.transpose(1, 2), weights
        weights = self._results[0][1] if self._results else None
        return out.transpose(1, 2).contiguous(), weights
