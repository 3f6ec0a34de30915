"""Translates an attention call of transformers into the arguments of `flash_attention`.

transformers gives its attention functions a rank-4 mask (bool for sdpa, additive for eager, or None
where `is_causal` is enough) and options; which options count differs between sdpa and eager.
Windows and padding are already in the mask. A candidate that is registered as such a function is
called by the same arguments. Leaves out how a call is caught (`transformers`) and how a candidate
is registered (`transformers_candidate`).
Source: transformers 5.23, `integrations/sdpa_attention.py`, `masking_utils.py`, and the
`eager_attention_forward` of its models.

Shape suffixes: B batch, H heads (or 1), Q query_len, K key_len.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from attention_kernels import AttentionFn, MaskArguments
from attention_kernels.checks import MAX_HEAD_DIM, MIN_HEAD_DIM
from stability.probe.captured_call import add_bias, valid_rows, version_of

__all__ = [
    "CANDIDATE_ARGUMENTS",
    "REGISTERED",
    "SINKS",
    "MaskReader",
    "TransformersCall",
    "argument_names",
    "unsupported",
]

CANDIDATE_ARGUMENTS = frozenset(("softcap", "position_bias"))
"""Options that a registered candidate takes beyond those that every attention function takes."""

REGISTERED: dict[str, str | AttentionFn] = {}
"""The candidates that `register_transformers` has given a name to, by that name."""

SINKS = ("s_aux", "sinks")
"""The options by which a model may hand over its sinks."""

_TENSORS = {"query", "key", "value", "query_states", "key_states", "value_states"}
_UNDERSTOOD = _TENSORS | {
    "module",
    "attention_mask",
    "dropout",
    "scaling",
    "softcap",
    "position_bias",
    "sliding_window",
    "output_attentions",
    "kwargs",
}
"""The arguments of an eager attention function that we accept: each is translated, or does not
change what the function returns."""


class TransformersCall(NamedTuple):
    """The arguments of one call of a transformers attention function, besides q, k and v."""

    module: nn.Module
    attention_mask: Tensor | None
    options: Mapping[str, Any]
    argument_names: frozenset[str]
    """The arguments that the function takes by name; it ignores others that models pass."""
    eager: bool
    """Whether it is the model's own `eager_attention_forward`, which knows no `is_causal`."""
    self_attention: bool
    """Whether query i and key i are the same token where there are as many of both."""

    def option(self, name: str) -> Any:
        """Return an option; None if it was not given or the function ignores it."""
        return self.options.get(name) if name in self.argument_names else None


@lru_cache(maxsize=256)
def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments of an attention function of transformers that it takes by name."""
    return frozenset(inspect.signature(function).parameters)


def unsupported(received: TransformersCall, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Name what an `AttentionFn` cannot compute of this call; "" if it can compute all of it."""
    return _unsupported_option(received) or _unsupported_shape(received, q, k, v)


def _unsupported_option(received: TransformersCall) -> str:
    module, options = received.module, received.options
    dropout = options.get("dropout") or 0.0
    if dropout > 0 and (module.training or not received.eager):
        return f"dropout_p {dropout}"
    sinks = _sinks(received)
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.dim() == 1):
        return f"sinks that are {type(sinks).__name__} and not one number a head"
    if received.option("cache") is not None:
        return "a paged cache"
    if isinstance(options.get("scaling"), Tensor):
        return "scaling that is a tensor"
    if received.eager:
        for name in sorted(received.argument_names - _UNDERSTOOD):
            if options.get(name) is not None:
                return f"the option {name} of its eager attention"
    return ""


def _unsupported_shape(received: TransformersCall, q: Tensor, k: Tensor, v: Tensor) -> str:
    for x in (q, v):
        if not MIN_HEAD_DIM <= x.shape[-1] <= MAX_HEAD_DIM:
            return f"head_dim {x.shape[-1]}"
    if k.shape[0] != q.shape[0]:
        return f"batch {k.shape[0]} of k beside q's {q.shape[0]}"
    mask = received.attention_mask
    if mask is not None and mask.dim() != 4:
        return f"an attention_mask of shape {tuple(mask.shape)}"
    if mask is not None and mask.requires_grad and received.option("position_bias") is not None:
        return "attention_mask that is trained beside a position_bias"
    return ""


@dataclass(frozen=True, slots=True)
class MaskReader:
    """Translates masks. The layers of a model share theirs, so each mask is read only once."""

    _read: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def read(
        self, received: TransformersCall, q: Tensor, k: Tensor
    ) -> tuple[MaskArguments, Tensor | None]:
        """Return what `flash_attention` takes beside q, k and v, and which query rows count.

        Those are bool `(batch, query_len)`, None if all do. A row counts if it attends some key
        and, in self-attention, if some query attends it: else it is padding. Of `received`,
        nothing may be `unsupported`.
        """
        arguments = MaskArguments(causal=False)
        scaling, softcap = received.options.get("scaling"), received.option("softcap")
        if scaling is not None:
            arguments["scale"] = float(scaling)
        if softcap:
            arguments["softcap"] = float(softcap)
        sinks = _sinks(received)
        if sinks is not None:
            arguments["sinks"] = sinks
        query_len, key_len = q.shape[2], k.shape[2]
        mask, valid = received.attention_mask, None
        if mask is None and _is_causal(received, query_len):
            if query_len == key_len:
                arguments["causal"] = True
            else:  # sdpa aligns top-left, MaskArguments bottom-right
                mask = torch.ones(query_len, key_len, dtype=torch.bool, device=q.device).tril()
                mask = mask[None, None]
        if received.attention_mask is not None:
            mask, valid = self._cached(received.attention_mask, received.self_attention, q, k)
            if received.attention_mask.requires_grad:  # Swin's holds its bias of positions
                mask = received.attention_mask
        bias = received.option("position_bias")
        mask = mask if bias is None else add_bias(mask, bias)
        if mask is not None:
            arguments["attn_mask"] = mask
        return arguments, None if valid is None else valid.expand(q.shape[0], -1)

    def _cached(
        self, mask: Tensor, self_attention: bool, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        # a static cache's mask is rewritten in place, which an inference tensor does not tell
        if mask.is_inference():
            return _translate(mask, self_attention, q, k)
        asked = (version_of(mask), self_attention, q.shape[0], k.shape[2])
        found = self._read.get(mask)
        if found is None or found[0] != asked:
            with torch.no_grad():
                found = (asked, *_translate(mask.detach(), self_attention, q, k))
            self._read[mask] = found
        return found[1], found[2]


def _sinks(received: TransformersCall) -> Any:
    """Return the logits that join the denominators, as GPT-OSS has them; None if there are none."""
    given = [received.options.get(name) for name in SINKS]
    own = getattr(received.module, "sinks", None)
    return next((sinks for sinks in (*given, own) if sinks is not None), None)


def _is_causal(received: TransformersCall, query_len: int) -> bool:
    if received.eager or query_len == 1:
        return False
    given = received.options.get("is_causal")
    return bool(getattr(received.module, "is_causal", True) if given is None else given)


def _translate(
    mask_BHQK: Tensor, self_attention: bool, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the mask with -inf where a key is hidden, and which query rows count."""
    # Some eager functions before transformers 5.23 cut a mask that is longer than the keys.
    mask_BHQK = visible_BHQK = mask_BHQK[..., : k.shape[2]]
    if mask_BHQK.dtype != torch.bool:
        # transformers hides a key by the lowest finite number, or by twice that where two masks
        # meet. In a row that attends nothing it then averages v: such rows do not count.
        visible_BHQK = mask_BHQK > torch.finfo(mask_BHQK.dtype).min / 2
        mask_BHQK = mask_BHQK.masked_fill(~visible_BHQK, -torch.inf)
    valid_BQ = visible_BHQK.any(dim=-1).any(dim=1)
    attended_BQ = valid_rows(mask_BHQK, q, k) if self_attention else None
    if attended_BQ is not None:
        valid_BQ = valid_BQ & attended_BQ
    # Only where looking costs no synchronisation; all true says the same.
    if valid_BQ.device.type == "cpu" and bool(valid_BQ.all()):
        return mask_BHQK, None
    return mask_BHQK, valid_BQ
