"""Catches every attention call of a Hugging Face transformers model.

In every forward, a model asks `AttentionInterface.get_interface` for the function that its config
names; calls are caught in that one method. Configs and masks stay as they are, so the model's own
eager or sdpa function gets exactly what it would get otherwise. Leaves out attention that a model
computes without the interface (`sdpa` catches it where it ends in `scaled_dot_product_attention`),
what a call means (`transformers_call`), and replacing a model's attention for good
(`transformers_candidate`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.intercept.transformers_call import (
    CANDIDATE_ARGUMENTS,
    MaskReader,
    TransformersCall,
    argument_names,
    unsupported,
)
from stability.intercept.transformers_candidate import is_registered, register_transformers
from stability.probe.captured_call import AttentionCall, CallHandler, autocast_dtype

__all__ = [
    "catch_transformers",
    "check_transformers",
    "is_transformers_model",
    "register_transformers",
]

Function = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of transformers; it returns (batch, query_len, heads, head_dim)."""


@dataclass(kw_only=True, slots=True)
class _Catching:
    layers: dict[nn.Module, str]
    handler: CallHandler
    reader: MaskReader = field(default_factory=MaskReader)
    calls: dict[nn.Module, int] = field(default_factory=dict)
    depth: int = 0
    """How many modules of the model are running, nested in one another."""

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self.depth:
            self.calls.clear()
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth = max(0, self.depth - 1)

    def layer(self, module: nn.Module) -> str:
        """Return the module's path, numbered from its second call in a forward pass on."""
        count = self.calls[module] = self.calls.get(module, -1) + 1
        return f"{self.layers[module]}#{count}" if count else self.layers[module]


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedFunction:
    """The attention function that a model asked for."""

    name: str
    eager: bool
    known: bool
    argument_names: frozenset[str]


_CATCHING: list[_Catching] = []
"""The contexts that are open, of all models; the interface is patched while there is any."""


def is_transformers_model(model: nn.Module) -> bool:
    """Say whether `model` is a `PreTrainedModel` or has one inside; imports nothing."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for module in model.modules()
        for kind in type(module).__mro__
    )


def check_transformers(model: nn.Module) -> None:
    """Raise ValueError for what cannot be caught or repeated, as far as it shows before a run.

    That is an attention implementation that is neither eager nor sdpa nor of
    `register_transformers`, attention with learned sinks, which no candidate knows, and attention
    dropout > 0 in a part that is in training mode.
    """
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        is_attention = any(part in type(module).__name__.lower() for part in ("attention", "attn"))
        if is_attention and getattr(module, "sinks", None) is not None:
            raise ValueError(
                f"check_transformers: attention of {name} must have no sinks, got "
                f"{type(module).__name__} with learned ones; no shadow and no golden has them"
            )
        if config is None or not is_attention:
            continue
        implementation = getattr(config, "_attn_implementation", None)
        if implementation not in (None, "eager", "sdpa") and not is_registered(implementation):
            raise ValueError(
                f"check_transformers: _attn_implementation of {name} must be 'eager' or 'sdpa', "
                f"got {implementation!r}; call model.set_attn_implementation('sdpa')"
            )
        if module.training:
            _refuse_dropout(name, config)


def _refuse_dropout(layer: str, config: Any) -> None:
    for field_name, value in vars(config).items():
        is_dropout = "att" in field_name and "drop" in field_name
        if is_dropout and isinstance(value, int | float) and value > 0:
            raise ValueError(
                f"check_transformers: config.{field_name} of {layer} must be 0 in training, got "
                f"{value}; build the model with {field_name}=0, or call model.eval()"
            )


@contextmanager
def catch_transformers(model: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Catch each attention call of `model`, all or part of which is a `PreTrainedModel`.

    `handler(call, primary)` decides what the layer returns; where that is the primary's out, the
    model computes the same bits as outside. The layer is the dotted path of the attention module;
    its second call in a forward pass gets `#1` behind it, and so on. Contexts may be nested and may
    end in any order. ValueError as `check_transformers`.
    """
    from transformers import AttentionInterface  # optional dependency

    check_transformers(model)
    layers = {module: name for name, module in model.named_modules()}
    catching = _Catching(layers=layers, handler=handler)
    handles = []
    for module in layers:
        handles.append(module.register_forward_pre_hook(catching.enter))
        handles.append(module.register_forward_hook(catching.leave, always_call=True))
    if not _CATCHING:
        AttentionInterface.get_interface = _catching_interface(AttentionInterface.get_interface)
    _CATCHING.append(catching)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _CATCHING[:] = [other for other in _CATCHING if other is not catching]
        if not _CATCHING:
            AttentionInterface.get_interface = AttentionInterface.get_interface.__wrapped__


def _catching_interface(get_interface: Callable[..., Function]) -> Callable[..., Function]:
    @wraps(get_interface)
    def catching(self: Any, attn_implementation: str, default: Function) -> Function:
        function = get_interface(self, attn_implementation, default)
        registered = is_registered(attn_implementation)
        asked = _AskedFunction(
            name=attn_implementation,
            eager=function is default,
            known=function is default or registered or attn_implementation == "sdpa",
            argument_names=CANDIDATE_ARGUMENTS if registered else argument_names(function),
        )
        for context in _CATCHING:
            function = partial(_attend, context, asked, function)
        return function

    return catching


def _attend(
    catching: _Catching,
    asked: _AskedFunction,
    function: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for the attention function that `module` calls."""
    if module not in catching.layers:
        return function(module, query, key, value, attention_mask, **options)
    layer = catching.layer(module)
    received = TransformersCall(
        module=module,
        attention_mask=attention_mask,
        options=options,
        argument_names=asked.argument_names,
        eager=asked.eager,
        self_attention=not _is_cross(layer, module),
    )
    reason = unsupported(received, query, key, value)
    if not asked.known:
        reason = f"attention implementation {asked.name!r}"
    mask, valid = MaskArguments(), None
    if not reason:
        mask, valid = catching.reader.read(received, query, key)
    call = AttentionCall(
        layer=layer,
        q=query,
        k=key,
        v=value,
        mask=mask,
        valid=valid,
        dtype=autocast_dtype(query, key, value),
        unsupported=reason,
    )
    primary = _ModelAttention(function, received)
    return primary.returned(catching.handler(call, primary))


def _is_cross(layer: str, module: nn.Module) -> bool:
    """Tell cross-attention by its names: nothing else shows it when the lengths agree."""
    names = f"{layer} {type(module).__name__}".lower()
    return any(part in names for part in ("cross", "encoder_attn", "encdec"))


class _ModelAttention:
    """The model's own attention function as a `BoundAttention`; it lives as long as one call."""

    def __init__(self, function: Function, received: TransformersCall) -> None:
        self._function = function
        self._received = received
        self._results: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        module, mask, options = self._received[:3]
        out, weights = self._function(module, q, k, v, mask, **options)
        turned = out.transpose(1, 2)
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
