"""Tiny, randomly initialised transformers, one of each kind of attention call, with an input.

Leaves out every weight that is trained: nothing is downloaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 12, 64
WIDTH, HEADS, LAYERS = 64, 4, 3
LAYER = "layers.{}.self_attn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    layers: list[str]
    """The module paths of its attention, in the order of the calls."""
    implementations: tuple[str, ...] = ("eager", "sdpa")
    kv_heads: int = HEADS
    takes_padding: bool = True


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)}


def padding(side: str) -> Tensor:
    """Return a (batch, length) mask in which the second sequence has 4 tokens of padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return mask


def _pixels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=generator)}


def _speech() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(BATCH, 8, 2 * LENGTH, generator=generator)
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"]}


def _model(kind: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, kind)(getattr(transformers, config)(**values))

    return build


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for attention that is far from uniform.
    "initializer_range": 0.3,
}
_GQA = {**_DECODER, "num_key_value_heads": 2, "head_dim": 16}
_ENCODER = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

TINY = {
    "gpt2": Tiny(
        build=_model(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=LENGTH,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
            **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
        ),
        inputs=tokens,
        layers=[f"transformer.h.{layer}.attn" for layer in range(LAYERS)],
    ),
    "llama": Tiny(
        build=_model("LlamaForCausalLM", "LlamaConfig", **_GQA),
        inputs=tokens,
        layers=[f"model.{LAYER.format(layer)}" for layer in range(LAYERS)],
        kv_heads=2,
    ),
    "qwen3": Tiny(
        build=_model("Qwen3ForCausalLM", "Qwen3Config", **_GQA),
        inputs=tokens,
        layers=[f"model.{LAYER.format(layer)}" for layer in range(LAYERS)],
        kv_heads=2,
    ),
    "gemma2": Tiny(
        build=_model(
            "Gemma2ForCausalLM",
            "Gemma2Config",
            **_GQA,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=16,
        ),
        inputs=tokens,
        layers=[f"model.{LAYER.format(layer)}" for layer in range(LAYERS)],
        implementations=("eager",),
        kv_heads=2,
    ),
    "bert": Tiny(
        build=_model("BertForMaskedLM", "BertConfig", **_ENCODER, max_position_embeddings=LENGTH),
        inputs=tokens,
        layers=[f"bert.encoder.layer.{layer}.attention.self" for layer in range(LAYERS)],
    ),
    "vit": Tiny(
        build=_model(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=12,
            patch_size=4,
            initializer_range=0.3,
        ),
        inputs=_pixels,
        layers=[f"vit.layers.{layer}.attention" for layer in range(LAYERS)],
        takes_padding=False,
    ),
    "whisper": Tiny(
        build=_model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=WIDTH,
            decoder_ffn_dim=WIDTH,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            init_std=0.3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        inputs=_speech,
        layers=[
            *(f"model.encoder.layers.{layer}.self_attn" for layer in range(2)),
            *(
                f"model.decoder.layers.{layer}.{kind}"
                for layer in range(2)
                for kind in ("self_attn", "encoder_attn")
            ),
        ],
        takes_padding=False,
    ),
}
