"""Reads the calls of Transformer Engine's `DotProductAttention`, by its public interface.

Its `forward` takes q, k and v as sbhd, bshd or packed (thd), masks by name and by lengths of the
sequences, and returns the heads of a token side by side. What decides a call stands partly in the
arguments and partly in the module. Rows of padding, and rows that see no key, do not count: its
backends fill them each in its own way. Leaves out how the calls are caught (`library_functions`).
Source: Transformer Engine 2.0 to 2.9, `pytorch/attention/dot_product_attention/`.

Shape suffixes: B batch, H heads, Q query_len, K key_len.
"""

import math
import sys
from collections.abc import Callable, Mapping
from inspect import BoundArguments
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.intercept.library_call import LibraryCall, left_as_it_is, standing_in
from stability.intercept.token_places import TokenPlaces
from stability.probe.captured_call import add_bias

__all__ = ["read_transformer_engine"]

_TO_OURS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_TO_THEIRS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}

_MASK_TYPES = {
    *("no_mask", "causal", "causal_bottom_right", "arbitrary"),
    *("padding", "padding_causal", "padding_causal_bottom_right"),
}

_READ = {
    *("self", "query_layer", "key_layer", "value_layer", "qkv_layer", "kv_layer"),
    *("attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "attn_mask_type", "window_size"),
    *("bottom_right_diagonal", "core_attention_bias_type", "core_attention_bias", "alibi_slopes"),
    "qkv_interleave_dim",
}
_CHANGES_NOTHING = {
    *("max_seqlen_q", "max_seqlen_kv", "checkpoint_core_attention", "fast_zero_fill"),
    *("pad_between_seqs", "num_splits"),
}
"""Arguments that say how to compute, and not what."""


class _Options(NamedTuple):
    """What a call computes: the module's settings, and the arguments that override them."""

    layout: str
    mask_type: str
    window: tuple[int | None, int | None]
    """As in `MaskArguments`; a causal mask is (.., 0)."""
    bottom_right: bool

    @classmethod
    def of(cls, of: Mapping[str, Any]) -> "_Options":
        def either(name: str) -> Any:
            value = of.get(name)
            return getattr(of["self"], name, None) if value is None else value

        mask_type = str(either("attn_mask_type")).replace(",", "_")
        mask_type = "padding_causal" if mask_type == "causal_padding" else mask_type
        left, right = either("window_size") or (-1, -1)
        if "causal" in mask_type:
            right = 0
        elif (left, right) == (-1, 0):  # a module's setting for a causal mask, overridden
            right = -1
        bottom_right = either("bottom_right_diagonal")
        bottom_right = True if bottom_right is None else bool(bottom_right)
        if "causal" in mask_type:
            bottom_right = mask_type.endswith("bottom_right")
        window = (None if left < 0 else left, None if right < 0 else right)
        return cls(either("qkv_format"), mask_type, window, bottom_right)


def read_transformer_engine(function: Callable[..., Any], given: BoundArguments) -> LibraryCall:
    """Read a call of `DotProductAttention.forward`, given with its defaults."""
    of = given.arguments
    module, options = of["self"], _Options.of(of)
    packing = _packing(of)
    tensors = _tensors(of)
    reason = _unsupported(of, options, tensors)
    if reason:
        some = next(x for x in (*of.values(),) if isinstance(x, Tensor))
        return left_as_it_is(function, given, some, reason)
    q, k, v = (_ours(x, options.layout) for x in tensors)
    heads = q.shape[1]
    mask, valid, hides = _mask(of, options, q, k)
    trained = _trained(of, mask)

    def call(q: Tensor, k: Tensor, v: Tensor, **trained: Tensor) -> Any:
        values = dict(of)
        parts = [_theirs(x, options.layout) for x in (q, k, v)]
        for name, count in packing.items():
            taken, parts = parts[:count], parts[count:]
            values[name] = taken[0] if count == 1 else torch.stack(taken, of["qkv_interleave_dim"])
        if "bias" in trained:
            values["core_attention_bias"] = trained["bias"]
        with standing_in(module, "softmax_offset", trained.get("sinks")):
            return function(values.pop("self"), **values)

    def out_as_ours(returned: Any) -> Tensor:
        out = returned[0] if isinstance(returned, tuple) else returned
        return _ours(out.unflatten(-1, (heads, -1)), options.layout)

    def with_out(returned: Any, out: Tensor) -> Any:
        flat = _theirs(out, options.layout).flatten(-2)
        return (flat, *returned[1:]) if isinstance(returned, tuple) else flat

    return LibraryCall(
        qkv=(q, k, v),
        call=call,
        out_as_ours=out_as_ours,
        with_out=with_out,
        mask=mask,
        valid=valid,
        trained=trained,
        hides=hides,
    )


def _packing(of: Mapping[str, Any]) -> dict[str, int]:
    """Return the arguments that hold q, k and v, and how many of these each holds."""
    if of.get("qkv_layer") is not None:
        return {"qkv_layer": 3}
    if of.get("kv_layer") is not None:
        return {"query_layer": 1, "kv_layer": 2}
    return dict.fromkeys(("query_layer", "key_layer", "value_layer"), 1)


def _tensors(of: Mapping[str, Any]) -> list[Tensor]:
    """Return q, k and v as they were given; fewer where some are not tensors."""
    found: list[Tensor] = []
    for name, count in _packing(of).items():
        if isinstance(of[name], Tensor):
            found += [of[name]] if count == 1 else of[name].unbind(of["qkv_interleave_dim"])
    return found


def _ours(x: Tensor, layout: str) -> Tensor:
    return x.unsqueeze(0).transpose(1, 2) if layout == "thd" else x.permute(_TO_OURS[layout])


def _theirs(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2).squeeze(0) if layout == "thd" else x.permute(_TO_THEIRS[layout])


def _unsupported(of: Mapping[str, Any], options: _Options, tensors: list[Tensor]) -> str:
    """Name what can't be repeated of a call; "" if all can."""
    return (
        _unsupported_tensors(of, options, tensors)
        or _unsupported_module(of["self"])
        or _unsupported_mask(of, options)
    )


def _unsupported_tensors(of: Mapping[str, Any], options: _Options, tensors: list[Tensor]) -> str:
    rest = of.keys() - _READ - _CHANGES_NOTHING
    unread = sorted(name for name in rest if of[name] is not None and of[name] is not False)
    if unread:
        return f"the argument {unread[0]} of DotProductAttention"
    for x in tensors:
        if type(x).__module__.startswith("transformer_engine"):
            return f"q, k and v of type {type(x).__name__}"
    dims = 3 if options.layout == "thd" else 4
    known = options.layout in ("thd", *_TO_OURS) and options.mask_type in _MASK_TYPES
    if not known or [x.dim() for x in tensors] != [dims] * 3:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        return f"{options.layout}, {options.mask_type} with q, k and v shaped {shapes}"
    return ""


def _unsupported_module(module: nn.Module) -> str:
    dropout = getattr(module, "attention_dropout", 0.0)
    if dropout and module.training:
        return f"dropout_p {dropout:g}; a shadow would drop other values"
    if getattr(module, "cp_group", None) is not None:
        return "context parallelism (cp_group): a rank has only a part of each sequence"
    if _is_fp8():
        return "FP8 attention (a recipe with fp8_dpa or fp8_mha)"
    if _scale(module) is None:
        return "a softmax_scale that stands nowhere in this version of Transformer Engine"
    kind = getattr(module, "softmax_type", "vanilla")
    offset = getattr(module, "softmax_offset", None)
    if kind != "vanilla" and not (isinstance(offset, Tensor) and offset.dim() == 1):
        return f"softmax_type {kind!r} without one number a head"
    return ""


def _unsupported_mask(of: Mapping[str, Any], options: _Options) -> str:
    bias = of["core_attention_bias_type"]
    if bias not in ("no_bias", "post_scale_bias", "alibi"):
        return f"core_attention_bias_type {bias!r}"
    given = of["attention_mask"]
    masks = given if isinstance(given, tuple) else (given,)
    if "padding" in options.mask_type:
        has_lengths = of["cu_seqlens_q"] is not None and of["cu_seqlens_kv"] is not None
        if not has_lengths and (options.layout == "thd" or given is None):
            return "padding without cu_seqlens_q and cu_seqlens_kv"
    if options.mask_type == "arbitrary" and (given is None or isinstance(given, tuple)):
        return "an arbitrary mask that is no tensor"
    if any(x is not None and x.dtype != torch.bool for x in masks):
        return "an attention_mask that is not bool"
    if bias == "no_bias" or "padding" not in options.mask_type:
        return ""
    if options.layout == "thd" and (bias != "alibi" or _has_slopes_of_sequences(of)):
        return f"core_attention_bias_type {bias!r} of packed sequences"
    if bias == "alibi" and not _are_as_long(of):
        return "ALiBi of more keys than queries in padded sequences: its backends differ there"
    return ""


def _has_slopes_of_sequences(of: Mapping[str, Any]) -> bool:
    return of["alibi_slopes"] is not None and of["alibi_slopes"].dim() > 1


def _are_as_long(of: Mapping[str, Any]) -> bool:
    queries, keys = of["cu_seqlens_q"], of["cu_seqlens_kv"]
    if queries is None or keys is None:
        return not isinstance(of["attention_mask"], tuple)
    return queries is keys or torch.equal(queries, keys)


def _is_fp8() -> bool:
    for name in ("quantization", "fp8"):
        library = sys.modules.get(f"transformer_engine.pytorch.{name}")
        manager = vars(library).get("FP8GlobalStateManager") if library else None
        if manager is not None:
            recipe = manager.get_fp8_recipe() if manager.is_fp8_enabled() else None
            return any(getattr(recipe, flag, False) for flag in ("fp8_dpa", "fp8_mha"))
    return False


def _scale(module: nn.Module) -> float | None:
    """Return the softmax_scale, which the module keeps in its backends."""
    parts = ("unfused_attention", "fused_attention", "flash_attention")
    for part in (module, *(getattr(module, name, None) for name in parts)):
        scale = getattr(part, "softmax_scale", None)
        if isinstance(scale, float | int):
            return float(scale)
    return None


def _mask(
    of: Mapping[str, Any], options: _Options, q: Tensor, k: Tensor
) -> tuple[MaskArguments, Tensor | None, Tensor | None]:
    """Return the mask, which query rows count, and what of the mask hides keys beside a bias."""
    mask = MaskArguments(causal=False, scale=_scale(of["self"]))
    offset = getattr(of["self"], "softmax_offset", None)
    if offset is not None:
        mask["sinks"] = offset
    query_len, key_len = q.shape[2], k.shape[2]
    # where lengths are equal both corners are one; with more queries than keys some see nothing
    as_ours = query_len == key_len or (options.bottom_right and query_len < key_len)
    valid = visible = None
    if options.mask_type == "arbitrary":
        visible = ~of["attention_mask"]
    if as_ours and "padding" not in options.mask_type:
        mask["causal"] = "causal" in options.mask_type
        mask["window"] = options.window
    else:
        queries, keys = _places(of, options, q, k)
        inside = queries.visible(keys, options.window, bottom_right=options.bottom_right)
        visible = inside if visible is None else visible & inside
    if visible is not None:
        shape = (q.shape[0], -1, query_len, key_len)
        valid = visible.expand(shape).any(-1).any(1)
        mask["attn_mask"] = visible
    _add_bias(mask, of, options, q, k, as_ours and "padding" not in options.mask_type)
    return mask, valid, visible


def _places(
    of: Mapping[str, Any], options: _Options, q: Tensor, k: Tensor
) -> tuple[TokenPlaces, TokenPlaces]:
    given = of["attention_mask"]
    masks = given if isinstance(given, tuple) else (given, given)
    found = []
    for name, x, mask in zip(("q", "kv"), (q, k), masks, strict=True):
        starts, padded = of[f"cu_seqlens_{name}"], of.get(f"cu_seqlens_{name}_padded")
        batch, tokens = x.shape[0], x.shape[2]
        if options.layout == "thd":
            begins = starts if padded is None else padded
            found.append(TokenPlaces.packed(begins[:-1], starts.diff(), tokens))
        elif "padding" in options.mask_type and starts is not None:
            found.append(TokenPlaces.first(starts.diff(), tokens))
        elif "padding" in options.mask_type:
            found.append(TokenPlaces.padded(~mask.reshape(batch, tokens)))
        else:
            everything = torch.ones(batch, tokens, dtype=torch.bool, device=x.device)
            found.append(TokenPlaces.padded(everything))
    return found[0], found[1]


def _add_bias(
    mask: MaskArguments,
    of: Mapping[str, Any],
    options: _Options,
    q: Tensor,
    k: Tensor,
    is_as_ours: bool,
) -> None:
    """Add to the mask what is added to the scores."""
    kind, hides = of["core_attention_bias_type"], mask.get("attn_mask")
    if kind == "post_scale_bias":
        mask["attn_mask"] = add_bias(hides, of["core_attention_bias"])
    elif kind == "alibi":
        slopes = of["alibi_slopes"]
        slopes = _usual_slopes(q.shape[1], q.device) if slopes is None else slopes.detach()
        if is_as_ours:
            mask["alibi_slopes"] = slopes
            return
        queries, keys = _places(of, options, q, k)
        distance = queries.distance(keys, bottom_right=options.bottom_right).abs()
        # in FP64, where the product of an FP32 slope is whole
        slopes = slopes.double().reshape(-1, q.shape[1], 1, 1)
        mask["attn_mask"] = add_bias(hides, -slopes * distance[:, None])


def _usual_slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's own slopes (arXiv 2108.12409): a geometric series, with every second one of
    the next longer series where heads are no power of 2.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _trained(of: Mapping[str, Any], mask: MaskArguments) -> dict[str, Tensor]:
    given = {"bias": of["core_attention_bias"], "sinks": mask.get("sinks")}
    return {name: x for name, x in given.items() if x is not None and x.requires_grad}
