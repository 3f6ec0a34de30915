"""A small random Llama of transformers on padded batches, and an attention for it that un-pads.

`register_unpadded` makes any candidate an attention implementation of transformers that un-pads, as
its FlashAttention-2 does: the valid tokens are packed, sequence after sequence, attended, and
scattered back into zeros. So no work is spent on padding, and the padded rows of the output are 0.
Two functions are registered together: the attention, and a mask function that hands the padding on
as it is, `(batch, length)`. There is no decoding with a cache, no dropout and no mask but a causal
one here; `stability.intercept.transformers` takes those. transformers is an optional dependency.

Source: transformers 5.23, `modeling_flash_attention_utils._flash_attention_forward`.
Shape suffixes: B batch, H heads, L length, D head_dim, T valid tokens of the batch.
"""

import itertools
import re
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.probe.attention_registry import ResolvedAttention, resolve_attention

__all__ = [
    "VOCABULARY",
    "Side",
    "States",
    "flash_attention_2",
    "hidden_states",
    "padding_mask",
    "random_llama",
    "register_opened",
    "register_unpadded",
]

Side = Literal["none", "left", "right"]
VOCABULARY = 256


class States(NamedTuple):
    """What a forward gives, FP32, `(batch, length, width)`: at its end and in its attention."""

    hidden: Tensor
    attention: list[Tensor]
    """What each layer's attention adds to the residual stream."""


def random_llama(
    *, width: int, heads: int, dtype: torch.dtype, seed: int, device: str = "cpu", layers: int = 4
) -> Any:
    """Return a `LlamaModel` with half as many kv heads and transformers' default weights' law."""
    from transformers import LlamaConfig, LlamaModel  # optional dependency

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2**15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaModel(config)
    return model.to(device, dtype).eval()


def padding_mask(length: int, padding: tuple[int, ...], side: Side) -> Tensor:
    """Return `(batch, length)`, 0 at so many tokens of `padding` in each sequence on one side."""
    places = torch.arange(length)
    if side == "left":
        places = places.flip(0)
    count = torch.tensor(padding if side != "none" else (0,) * len(padding))
    return (places < length - count[:, None]).long()


def hidden_states(
    model: Any, implementation: str, tokens: Tensor, mask: Tensor | None, *, zeroed: bool = False
) -> States:
    """Run `model` with an attention implementation; `zeroed` sets padded rows of attention to 0.

    They are set to 0 behind the output projection, which has no bias: 0 before it is 0 behind it.
    """
    attention: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        out = output[0]
        if zeroed and mask is not None:
            out = out.masked_fill(mask[..., None] == 0, 0.0)
        attention.append(out.float())
        return (out, *output[1:])

    model.set_attn_implementation(implementation)
    hooks = [layer.self_attn.register_forward_hook(keep) for layer in model.layers]
    try:
        with torch.no_grad():
            out = model(input_ids=tokens, attention_mask=mask, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return States(out.last_hidden_state.float(), attention)


def register_opened() -> str:
    """Register SDPA with a mask that is open where a row would see no key; return its name.

    Older versions of transformers did so, for kernels that gave NaN there (`allow_torch_fix`).
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # optional dependency
    from transformers.integrations.sdpa_attention import (  # optional dependency
        sdpa_attention_forward,
    )
    from transformers.masking_utils import sdpa_mask  # optional dependency

    def opened(*args: Any, **options: Any) -> Tensor | None:
        mask = sdpa_mask(*args, **options)
        return None if mask is None else mask | ~mask.any(dim=-1, keepdim=True)

    name = "opened_rows"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, opened)
    return name


class _Unpadded:
    """An attention function for transformers that un-pads."""

    def __init__(self, candidate: str, packed: bool) -> None:
        self._candidate = candidate
        self._packed = packed
        # Resolving a name looks through all installed packages, which takes milliseconds.
        self._resolved: dict[torch.device, ResolvedAttention] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return (batch, length, heads, head_dim), and no weights."""
        if query.shape[2] != key.shape[2] or options.get("dropout"):
            raise ValueError(
                f"register_unpadded: attention of {type(module).__name__} must have as many queries"
                f" as keys and no dropout, got {query.shape[2]} and {key.shape[2]}, dropout "
                f"{options.get('dropout', 0.0)}; use register_transformers"
            )
        scale = options.get("scaling")
        if attention_mask is None:
            out_BHLD = self._attend(query, key, value, scale=scale)
            return out_BHLD.transpose(1, 2).contiguous(), None
        valid_T = attention_mask.flatten().nonzero().squeeze(1)
        starts = F.pad(attention_mask.sum(dim=1).cumsum(dim=0), (1, 0)).int()
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[valid_T] for x in (query, key, value))
        B, H, L, D = query.shape
        out = query.new_zeros(B * L, H, D)
        out[valid_T] = self._ragged(q, k, v, starts, scale)
        return out.unflatten(0, (B, L)), None

    def _ragged(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None
    ) -> Tensor:
        """Attend packed sequences, (T, H, D), in one call or in one each."""
        if self._packed:
            return self._attend(q, k, v, scale=scale, cu_seqlens_q=starts, cu_seqlens_k=starts)
        outs = []
        for first, end in itertools.pairwise(starts.tolist()):
            parts = (x[first:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outs.append(self._attend(*parts, scale=scale).squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.device not in self._resolved:
            self._resolved[q.device] = resolve_attention(self._candidate, q.device)
        return self._resolved[q.device](q, k, v, causal=True, **options)


def register_unpadded(candidate: str = "flash:fa2", *, packed: bool = True) -> str:
    """Register `candidate` to be called un-padded; return the name for `set_attn_implementation`.

    `candidate` is text as in `attention_from_text`. With `packed` it is called once, and must take
    `cu_seqlens`; without, once a sequence. ValueError for text that names nothing, and at the first
    forward for dropout or for queries that are not as many as keys.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # optional dependency
    from transformers.masking_utils import flash_attention_mask  # optional dependency

    resolve_attention(candidate, torch.device("cpu"))
    # a name with "flash" or "sdpa" in it would be taken for one of transformers' own
    known = re.sub(r"\W+", "_", candidate).replace("flash", "tiled").replace("sdpa", "torch")
    name = f"unpadded_{'packed' if packed else 'each'}_{known}"
    AttentionInterface.register(name, _Unpadded(candidate, packed))
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def flash_attention_2(device: str) -> str:
    """Return transformers' name of FlashAttention-2 if it runs on `device`, else ""."""
    from transformers.utils.import_utils import is_flash_attn_2_available  # optional dependency

    on_gpu = torch.device(device).type == "cuda"
    return "flash_attention_2" if on_gpu and is_flash_attn_2_available() else ""
