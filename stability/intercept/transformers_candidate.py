"""Registers a candidate with transformers, as a name for `set_attn_implementation`.

The attention function and a mask function are registered together: without the second, transformers
would silently replace the padding mask by None. Leaves out catching calls (`transformers`) and what
a call means (`transformers_call`).
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import AttentionFn
from stability.intercept.transformers_call import (
    CANDIDATE_ARGUMENTS,
    REGISTERED,
    MaskReader,
    TransformersCall,
    unsupported,
)
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.autocast import autocast_dtype

__all__ = ["register_transformers"]

# transformers takes a name that contains one of these words for its own implementation of the kind
_RESERVED = {"flash": "tiled", "flex": "block", "sdpa": "torch", "paged": "pages"}


def register_transformers(candidate: str | AttentionFn = "flash:fa2") -> str:
    """Register `candidate` with transformers; return the name for `set_attn_implementation`.

    `candidate` is text as in `attention_from_text` or a function like `AttentionFn` that takes the
    masks it is to be used with. The same candidate has the same name. ValueError for text that
    names nothing, and at the first forward for a call that no `AttentionFn` can do, such as one
    with dropout.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # optional dependency
    from transformers.masking_utils import sdpa_mask  # optional dependency

    resolved = resolve_attention(candidate, torch.device("cpu"))
    name = _name(resolved.name, candidate)
    REGISTERED[name] = candidate
    AttentionInterface.register(name, _Registered(candidate))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _name(text: str, candidate: str | AttentionFn) -> str:
    name = "stability_" + re.sub(r"\W+", "_", text.lower())
    for word, other in _RESERVED.items():
        name = name.replace(word, other)
    number = 1
    while REGISTERED.get(unique := name if number == 1 else f"{name}_{number}", candidate) != (
        candidate
    ):
        number += 1
    return unique


class _Registered:
    """An attention function of transformers that calls the candidate, resolved for the device."""

    def __init__(self, candidate: str | AttentionFn) -> None:
        self._candidate = candidate
        self._resolved: dict[torch.device, ResolvedAttention] = {}
        self._reader = MaskReader()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return (batch, query_len, heads, head_dim), and no weights."""
        received = TransformersCall(
            module=module,
            attention_mask=attention_mask,
            options=options,
            argument_names=CANDIDATE_ARGUMENTS,
            eager=False,
            self_attention=False,
        )
        reason = unsupported(received, query, key, value)
        if reason:
            raise ValueError(
                f"register_transformers: attention of {type(module).__name__} must be one that "
                f"{self._candidate} can do, got {reason}; build the model without it, or call "
                "model.set_attn_implementation('sdpa')"
            )
        dtype = autocast_dtype(query, key, value)
        if dtype is not None:
            query, key, value = (x.to(dtype) for x in (query, key, value))
        mask, _ = self._reader.read(received, query, key)
        out = self._attention(query.device)(query, key, value, **mask)
        return out.transpose(1, 2).contiguous(), None

    def _attention(self, device: torch.device) -> ResolvedAttention:
        if device not in self._resolved:
            self._resolved[device] = resolve_attention(self._candidate, device)
        return self._resolved[device]
