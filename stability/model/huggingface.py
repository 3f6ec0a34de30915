"""Builds any causal language model of Hugging Face transformers as a decoder of a study.

The model is transformers' own, with logits alone for its result. Its attention goes through the
library's interface, under a name that looks up which function the study has given the layer. A mask
is not made: blocks are full, and the attention is causal. So what a mask or an option would say
beyond that (a window shorter than the context, sinks, a soft cap, dropout) is refused at the first
call, which is before training. transformers is an optional dependency. Leaves out how a folder is
read (`config.huggingface_folder`), and models that a user has built already (`intercept`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import AttentionFn
from stability.config.model import ModelConfig

__all__ = ["build_huggingface"]

_NAME = "stability_study"
"""Of our function in transformers' registry. It has no mask function, so that none is made."""

_HARMLESS = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Options that change nothing of what attention computes on full blocks."""

_GIVEN = "study_attention"
"""The attribute of an attention module: what its layer attends by, and how long the context is."""


class _Logits:
    """Makes a class of transformers a decoder: tokens in, logits out."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, tokens, vocab_size)` for int64 `tokens` `(batch, tokens)`."""
        return super().forward(input_ids=tokens, use_cache=False).logits  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the module, but never cast what is no weight below FP32.

        The rates of rotary positions are such buffers: in BF16 an angle errs by whole turns.
        """
        assert isinstance(self, nn.Module)
        kept = {
            (module, name): buffer
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set and buffer.dtype == torch.float32
        }
        found = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for (module, name), buffer in kept.items():
            now = module._buffers[name]
            if now is not None and now.dtype in (torch.bfloat16, torch.float16):
                module._buffers[name] = buffer.to(now.device)
        return found


def build_huggingface(config: ModelConfig, attention: Sequence[AttentionFn]) -> nn.Module:
    """Return the model that `config.options["config"]` describes, attending by `attention`.

    Its weights are drawn by its own code from torch's generator, or with `weights: given` read
    from its folder. ValueError, one line, if transformers is missing or has no such model, for
    weights that are not there, or for a model that has not as many layers of attention.
    """
    try:
        import transformers  # optional dependency
    except ImportError as error:
        raise ValueError(
            "model: transformers must be installed to build a model of Hugging Face's; "
            "pip install 'training-stability[transformers]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(_NAME, _attend)
    try:
        model = _model(transformers, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        said = " ".join(str(error).split())[:200]
        kind = config.options["config"]["model_type"]
        raise ValueError(
            f"model: {kind!r} must be a causal language model of transformers "
            f"{transformers.__version__}, built from its config: {type(error).__name__}: {said}"
        ) from error
    layers = [module for module in model.modules() if _layer_of(module) is not None]
    for module in layers:
        index = _layer_of(module)
        if index is not None and index < len(attention):
            setattr(module, _GIVEN, (attention[index], config.context))
    kind = type(model)
    model.__class__ = type(kind.__name__, (_Logits, kind), {"__module__": kind.__module__})
    return model.train()


def _model(transformers: Any, config: ModelConfig) -> nn.Module:
    options = dict(config.options["config"])
    own = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    own.use_cache = False
    auto, asked = transformers.AutoModelForCausalLM, {"attn_implementation": _NAME}
    if config.options.get("weights") != "given":
        return auto.from_config(own, dtype=torch.float32, **asked)
    folder = config.options.get("folder", "")
    model, told = auto.from_pretrained(
        folder,
        config=own,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        **asked,
    )
    if told["missing_keys"] or told.get("mismatched_keys"):
        lacking = sorted(map(str, told["missing_keys"] or told["mismatched_keys"]))
        raise ValueError(f"{folder} lacks the weights {', '.join(lacking[:3])}")
    return model


def _layer_of(module: nn.Module) -> int | None:
    """Return which layer's attention `module` is; None if it is none."""
    name = type(module).__name__.lower()
    index = getattr(module, "layer_idx", None)
    is_attention = "attention" in name or "attn" in name
    return index if is_attention and isinstance(index, int) else None


@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by the function of the layer; (batch, tokens, heads, head_dim), and no weights."""
    known = getattr(module, _GIVEN, None)
    if known is None:
        raise ValueError(
            f"model: {type(module).__name__} must be the attention of one of the config's layers; "
            "this model has others, too"
        )
    attention, context = known
    said = _unsupported(module, attention_mask, options, context)
    if said:
        raise ValueError(
            f"model: {type(module).__name__} must be plain causal attention, got {said}"
        )
    scale = options.get("scaling")
    if scale == query.shape[-1] ** -0.5:
        scale = None  # the default, which an attention that takes no scale has as well
    given = {} if scale is None else {"scale": float(scale)}
    return attention(query, key, value, causal=True, **given).transpose(1, 2).contiguous(), None


def _unsupported(
    module: nn.Module, mask: Tensor | None, options: dict[str, Any], context: int
) -> str:
    """Name what plain causal attention would not compute of a call; empty if it does."""
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "one that looks at later tokens"
    window = options.get("sliding_window")
    if window is not None and window < context:
        return f"a window of {window} tokens, where model.context is {context}"
    if getattr(module, "sinks", None) is not None:
        return "sinks"
    if mask is not None:
        return "an attention_mask"
    if options.get("dropout"):
        return f"a dropout of {options['dropout']}"
    if isinstance(options.get("scaling"), Tensor):
        return "scaling that is a tensor"
    known = _HARMLESS | {"dropout", "is_causal", "scaling", "sliding_window"}
    others = sorted(key for key, value in options.items() if key not in known and value is not None)
    return f"the option {others[0]}" if others else ""
