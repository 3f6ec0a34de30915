"""Tiny, randomly initialised models of many families of transformers, each with a batch and a loss.

Leaves out every weight that is trained: nothing is downloaded. Dropout is 0 throughout, and weights
are large enough for attention that is far from uniform.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 12, 40
WIDTH, HEADS, LAYERS = 32, 2, 2

_WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_SPREAD = {"initializer_range": 0.3}
_DECODER = {**_WORDS, **_SIZES, **_SPREAD}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_DECODER, **_NO_DROPOUT, "max_position_embeddings": 2 * LENGTH}
_PICTURES = {**_SIZES, **_SPREAD, **_NO_DROPOUT, "image_size": 12, "patch_size": 4}
_BOTH_SIDES = {
    **_WORDS,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "decoder_start_token_id": 1,
    "init_std": 0.3,
    "dropout": 0.0,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family, and what of it is to be tried."""

    name: str
    model: str
    """The name of its class in transformers."""
    config: str
    values: Mapping[str, Any]
    inputs: Callable[[int], dict[str, Tensor]]
    """The batch of a step, with labels where the model computes a loss from them."""
    what: str = ""
    """What it has that others lack."""
    attentions: int = LAYERS
    """How many modules of it attend by a softmax."""
    heads: int = HEADS
    change: Callable[[nn.Module], None] = field(default=lambda model: None)
    """What is done to a model after it was built."""

    def build(self, implementation: str) -> nn.Module:
        """Return the model in training mode; ValueError if it lacks the implementation."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.values)
        model = getattr(transformers, self.model)(config)
        self.change(model)
        model.set_attn_implementation(implementation)
        return model.train()

    @property
    def implementations(self) -> tuple[str, ...]:
        """Those that transformers says the family has."""
        kind = getattr(transformers, self.model)
        has = {
            "eager": True,
            "sdpa": kind._supports_sdpa,
            "flex_attention": kind._supports_flex_attn,
        }
        return tuple(name for name, supported in has.items() if supported)


def _ids(step: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _text(step: int) -> dict[str, Tensor]:
    ids = _ids(step)
    return {"input_ids": ids, "labels": ids}


def _sides(step: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step), "labels": _ids(step + 1000, LENGTH - 3)}


def _normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _picture(step: int, size: int = 12) -> dict[str, Tensor]:
    return {"pixel_values": _normal(step, BATCH, 3, size, size), "labels": torch.tensor([0, 1])}


def _large_picture(step: int) -> dict[str, Tensor]:
    return _picture(step, 32)


def _speech(step: int) -> dict[str, Tensor]:
    return {"input_features": _normal(step, BATCH, 8, 2 * LENGTH), "labels": _ids(step)}


def _sound(step: int) -> dict[str, Tensor]:
    return {"input_values": _normal(step, BATCH, 400), "labels": _ids(step, 3)}


def _captioned(step: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step), "pixel_values": _normal(step, BATCH, 3, 12, 12)}


def _draw_sinks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)


def _family(name: str, model: str, what: str = "", inputs: Any = _text, **values: Any) -> Family:
    config = values.pop("config", None) or f"{_stem(model)}Config"
    change = values.pop("change", lambda model: None)
    return Family(
        attentions=values.pop("attentions", LAYERS),
        name=name,
        model=model,
        config=config,
        values=values,
        inputs=inputs,
        what=what,
        change=change,
    )


def _stem(model: str) -> str:
    for end in ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"):
        model = model.removesuffix(end)
    for end in ("ForImageClassification", "ForCTC", "Model"):
        model = model.removesuffix(end)
    return model


_PARTS = {
    "text_config": {**_SIZES, **_WORDS, "max_position_embeddings": LENGTH, "projection_dim": 16},
    "vision_config": {**_SIZES, "image_size": 12, "patch_size": 4, "projection_dim": 16},
}
_SMALL_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

FAMILIES = {
    one.name: one
    for one in (
        _family(
            "gpt2", "GPT2LMHeadModel", **_DECODER, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        ),
        _family("llama", "LlamaForCausalLM", "grouped keys", **_GROUPED),
        _family("mistral", "MistralForCausalLM", "sliding window", **_GROUPED, sliding_window=5),
        _family("mixtral", "MixtralForCausalLM", "experts", **_GROUPED, **_EXPERTS),
        _family("qwen2", "Qwen2ForCausalLM", "biased projections", **_GROUPED),
        _family("qwen3", "Qwen3ForCausalLM", "normed q and k", **_GROUPED, head_dim=16),
        _family(
            "qwen3_moe", "Qwen3MoeForCausalLM", "experts", **_GROUPED, head_dim=16, **_SMALL_EXPERTS
        ),
        _family(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            "hybrid: linear attention, gate",
            attentions=1,
            **_GROUPED,
            **_SMALL_EXPERTS,
            head_dim=16,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        _family(
            "gemma2",
            "Gemma2ForCausalLM",
            "softcap",
            **_GROUPED,
            head_dim=16,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=16,
        ),
        _family(
            "gemma3",
            "Gemma3ForCausalLM",
            "window in one of two layers",
            config="Gemma3TextConfig",
            **_GROUPED,
            head_dim=16,
            sliding_window=5,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        _family("phi", "PhiForCausalLM", "partial rotary", **_DECODER),
        _family("phi3", "Phi3ForCausalLM", "fused projection", **_GROUPED),
        _family("falcon", "FalconForCausalLM", "own SDPA", **_DECODER),
        _family("gptj", "GPTJForCausalLM", "attention by hand", **_DECODER, rotary_dim=8),
        _family("gpt_neox", "GPTNeoXForCausalLM", "", **_DECODER),
        _family("bloom", "BloomForCausalLM", "ALiBi by hand", **_DECODER),
        _family(
            "opt",
            "OPTForCausalLM",
            "",
            **_DECODER,
            ffn_dim=WIDTH,
            dropout=0.0,
            word_embed_proj_dim=WIDTH,
        ),
        _family("cohere2", "Cohere2ForCausalLM", "", **_GROUPED, sliding_window=5),
        _family("olmo2", "Olmo2ForCausalLM", "norms behind", **_GROUPED),
        _family(
            "granite", "GraniteForCausalLM", "its own scale", **_GROUPED, attention_multiplier=0.1
        ),
        _family("stablelm", "StableLmForCausalLM", "", **_GROUPED),
        _family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            "MLA, experts",
            **_DECODER,
            num_key_value_heads=2,
            **_LATENT,
        ),
        _family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "MLA, experts",
            **_DECODER,
            num_key_value_heads=2,
            **_LATENT,
        ),
        _family(
            "gpt_oss",
            "GptOssForCausalLM",
            "sinks, window, experts",
            **_GROUPED,
            **_EXPERTS,
            head_dim=16,
            sliding_window=5,
            change=_draw_sinks,
        ),
        _family("bert", "BertForMaskedLM", "encoder", **_ENCODER),
        _family("roberta", "RobertaForMaskedLM", "encoder", **_ENCODER),
        _family(
            "modernbert",
            "ModernBertForMaskedLM",
            "encoder, window",
            **_DECODER,
            local_attention=4,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        _family(
            "albert",
            "AlbertForMaskedLM",
            "one module, two calls",
            attentions=1,
            **_ENCODER,
            embedding_size=WIDTH,
        ),
        _family(
            "distilbert",
            "DistilBertForMaskedLM",
            "encoder",
            **_WORDS,
            dim=WIDTH,
            hidden_dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            dropout=0.0,
            attention_dropout=0.0,
            **_SPREAD,
        ),
        _family("deberta_v2", "DebertaV2ForMaskedLM", "attention by hand", **_ENCODER),
        _family(
            "t5",
            "T5ForConditionalGeneration",
            "trained bias, both sides",
            _sides,
            attentions=6,
            **_WORDS,
            d_model=WIDTH,
            d_kv=16,
            d_ff=WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=1,
        ),
        _family(
            "bart",
            "BartForConditionalGeneration",
            "both sides",
            _sides,
            attentions=6,
            **_BOTH_SIDES,
        ),
        _family(
            "whisper",
            "WhisperForConditionalGeneration",
            "speech, both sides",
            _speech,
            attentions=6,
            **_BOTH_SIDES,
            num_mel_bins=8,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
        ),
        _family(
            "wav2vec2",
            "Wav2Vec2ForCTC",
            "speech",
            _sound,
            **_DECODER,
            hidden_dropout=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            conv_dim=(16, 16),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        _family("vit", "ViTForImageClassification", "vision", _picture, **_PICTURES),
        _family("dinov2", "Dinov2ForImageClassification", "vision", _picture, **_PICTURES),
        _family(
            "swin",
            "SwinForImageClassification",
            "vision, shifted windows, trained bias",
            _large_picture,
            attentions=3,
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=4,
            **_NO_DROPOUT,
            drop_path_rate=0.0,
        ),
        _family(
            "clip",
            "CLIPModel",
            "vision and text",
            _captioned,
            attentions=4,
            **_PARTS,
            projection_dim=16,
        ),
        _family(
            "bamba",
            "BambaForCausalLM",
            "hybrid",
            attentions=1,
            **_GROUPED,
            **_MAMBA,
            attn_layer_indices=[1],
        ),
        _family(
            "falcon_h1",
            "FalconH1ForCausalLM",
            "hybrid: both in each layer",
            **_GROUPED,
            head_dim=16,
            mamba_d_ssm=32,
            mamba_n_heads=2,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_chunk_size=8,
        ),
    )
}


def loss_of(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """Return the model's loss; of one that computes none the mean square of what it returns."""
    out = model(**given)
    if getattr(out, "loss", None) is not None:
        return out.loss
    return sum(x.square().mean() for x in (out.text_embeds, out.image_embeds))
