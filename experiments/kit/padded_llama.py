"""A small random Llama of transformers on padded batches: what each of its implementations returns.

Leaves out which of them agree. transformers is an optional dependency.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "VOCABULARY",
    "Side",
    "States",
    "hidden_states",
    "padding_mask",
    "random_llama",
    "register_opened",
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
