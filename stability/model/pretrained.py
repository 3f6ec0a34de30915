"""Loads language models of Hugging Face transformers by name or path, with random or given weights.

transformers is an optional dependency. Leaves out what is done with a model (`intercept.session`).
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Weights", "language_loss", "load_pretrained"]

Weights = Literal["random", "given"]


def load_pretrained(
    name: str, weights: Weights, *, seed: int = 0, attention: str = "sdpa"
) -> tuple[nn.Module, list[str]]:
    """Return the model called `name`, in training mode, and the dropout fields that were set to 0.

    `name` is a folder with a config.json, or a name on the hub or in its cache. Random weights are
    drawn by the model's own code from torch's generator, which is seeded and put back. Every
    dropout of the config is set to 0: a shadow could not drop what the model drops. ValueError, one
    line, if transformers is missing or the name is neither, or for a model that takes no text.
    """
    try:
        import transformers  # optional dependency
    except ImportError as error:
        raise ValueError(
            "transformers must be installed to load a model by name; "
            "pip install 'training-stability[transformers]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        dropped = _without_dropout(config)
        auto = _auto_class(transformers, config)
        if weights == "random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = auto.from_config(config, attn_implementation=attention)
        else:
            model = auto.from_pretrained(name, config=config, attn_implementation=attention)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_unknown(name, error)) from error
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(
            f"model must take text, got {type(model).__name__}, which takes "
            f"{model.main_input_name}; give it to stability.shadow in a loop of your own"
        )
    return model.train(), dropped


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of `tokens` `(batch, length)`, of each next one if causal.

    A model without logits over its vocabulary gets the mean square of its last hidden state, which
    is no sensible loss but sends a gradient through every layer.
    """
    output = model(input_ids=tokens)
    logits = getattr(output, "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[-1] <= int(tokens.max()):
        hidden = logits if logits is not None else output.last_hidden_state
        return hidden.float().square().mean()
    if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__:
        logits, tokens = logits[:, :-1], tokens[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def _auto_class(transformers: Any, config: Any) -> Any:
    """Return the Auto class of `config`: causal or masked language model, else the bare model."""
    named = (getattr(config, "architectures", None) or [""])[0]
    fits = {
        "AutoModelForCausalLM": "CausalLM" in named or "LMHead" in named,
        "AutoModelForMaskedLM": "MaskedLM" in named,
    }
    for kind, is_named_so in fits.items():
        auto = getattr(transformers, kind)
        if type(config) in auto._model_mapping and (is_named_so or not named):
            return auto
    return transformers.AutoModel


def _without_dropout(config: Any) -> list[str]:
    found = []
    for field, value in vars(config).items():
        names = "drop" in field or field.endswith("pdrop")
        if names and isinstance(value, float) and 0 < value < 1:
            setattr(config, field, 0.0)
            found.append(field)
    return found


def _unknown(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:160]
    what = "is no folder with a config.json" if Path(name).exists() else "is no folder"
    return (
        f"model must be a folder or a name that the hub or its cache has, got "
        f"{name!r}, which {what}: {reason}"
    )
