"""What a config says of a model: which builder makes it, its shape, and how its weights begin.

A builder is `gpt2` or `llama`, both ours, `huggingface`, an entry point's name or the user's
own `module:function`. Whoever builds it, a model has so many layers of so many heads, a context and
a vocabulary: probe, estimate and evidence read these. What else a builder takes are its `options`.
Leaves out the builders themselves (`model.decoder`), and how a folder of Hugging Face's becomes
such values (`huggingface_folder`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stability.config.convert import nearest
from stability.config.requirement import require

__all__ = [
    "BUILDERS",
    "HUGGINGFACE",
    "INIT_SCHEMES",
    "OWN_INIT",
    "ModelConfig",
    "layer_names",
    "shape_of",
]

HUGGINGFACE = "huggingface"
"""The builder of every causal language model that Hugging Face transformers has."""

BUILDERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"mlp_width": 0, "rope_theta": 10000.0, "tied": False},
}
"""The builders whose models are ours, with the options that each takes and their defaults."""

INIT_SCHEMES = ("gpt2", "xavier", "kaiming", "orthogonal")
"""The init schemes that have a name (`model.initial_weights`)."""

OWN_INIT = "own"
"""The weights that a model's own code begins with: drawn from the seed, or those it is given."""

MOST_LAYERS = 4096
"""Layers are named one by one; the deepest published transformers have some thousand."""

_NAMES: dict[str, tuple[str, ...]] = {
    "depth": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "vocab_size": ("vocab_size",),
}
"""What the values of a shape are called in the configs of transformers."""


def shape_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return those values of a model's shape that a config of transformers tells."""
    found = {
        name: next((config[key] for key in keys if type(config.get(key)) is int), None)
        for name, keys in _NAMES.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def layer_names(depth: int) -> list[str]:
    """Return what the layers of a model are called, whoever built it."""
    return [f"layer_{index}" for index in range(depth)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A causal decoder. `kv_heads=0` means as many as heads."""

    builder: str = "gpt2"
    """`gpt2`, `llama`, `huggingface`, an entry point's name, or `module:function` (`Builder`)."""
    depth: int
    """How many layers, from 1 to 4096."""
    width: int
    """How wide the residual stream is; a multiple of `heads`, but for `huggingface`."""
    heads: int
    """How many query heads each layer has."""
    kv_heads: int = 0
    """How many heads of keys and values, a divisor of `heads`; 0: as many as `heads`."""
    context: int
    """How many tokens a sequence has."""
    vocab_size: int = 256
    """How many tokens are embedded; at least the tokenizer's, which are 256 for `bytes`."""
    qk_norm: bool = False
    """Whether queries and keys are normalised in each head; of `gpt2` and `llama` alone."""
    dropout: float = 0.0
    """Of the embeddings and of what each attention and MLP adds, not of attention weights."""
    init: str = ""
    """`gpt2`, `xavier`, `kaiming`, `orthogonal`, or `module:function` of (matrix, generator).

    Empty: `gpt2` for our models, `own` for others, which is what their code draws from the seed."""
    init_std: float = 0.02
    """The standard deviation of embeddings and, in `gpt2`, of matrices."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the builder takes: of `llama` `mlp_width` (0: 8/3 of the width), `rope_theta` and
    `tied`; of a function of one's own whatever it reads."""

    def __post_init__(self) -> None:
        if not self.init:
            object.__setattr__(self, "init", "gpt2" if self.is_ours else OWN_INIT)
        self._check_numbers()
        self._check_init()
        if self.is_ours:
            self._check_options(BUILDERS[self.builder])
        elif self.builder == HUGGINGFACE:
            self._check_huggingface()
        if self.builder != HUGGINGFACE:
            rule = f"width must be a multiple of heads ({self.heads})"
            require(self.width % self.heads == 0, "model", rule, self.width)
        if self.builder == "llama":
            rule = "width / heads must be even, RoPE turns pairs"
            require(self.head_dim % 2 == 0, "model", rule, self.head_dim)

    @property
    def is_ours(self) -> bool:
        """Whether one of our own files builds it."""
        return self.builder in BUILDERS

    @property
    def layer_names(self) -> list[str]:
        """What its layers are called, whoever built them."""
        return layer_names(self.depth)

    @property
    def head_dim(self) -> int:
        """How wide a head is."""
        given = self.options.get("config", {}) if self.builder == HUGGINGFACE else {}
        return given.get("head_dim") or self.width // self.heads

    @property
    def attention_width(self) -> int:
        """How wide the queries of a token are, all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """How wide the keys of a token are, and its values."""
        return (self.kv_heads or self.heads) * self.head_dim

    def drawn(self) -> "ModelConfig":
        """Return the model with weights that its code draws, where it has those of a folder."""
        given = self.builder == HUGGINGFACE and self.options.get("weights") == "given"
        return replace(self, options={**self.options, "weights": "random"}) if given else self

    def option(self, name: str) -> Any:
        """Return an option of one of our builders, its default if it isn't given."""
        return self.options.get(name, BUILDERS[self.builder][name])

    def _check_numbers(self) -> None:
        require(0 <= self.dropout < 1, "model", "dropout must be in [0, 1)", self.dropout)
        rule = f"depth must be at most {MOST_LAYERS}"
        require(self.depth <= MOST_LAYERS, "model", rule, self.depth)
        for name in ("depth", "width", "heads", "context", "vocab_size"):
            require(getattr(self, name) >= 1, "model", f"{name} must be >= 1", getattr(self, name))
        require(
            self.kv_heads >= 0 and self.heads % (self.kv_heads or self.heads) == 0,
            "model",
            f"kv_heads must divide heads ({self.heads})",
            self.kv_heads,
        )
        for name in ("dropout", "qk_norm"):
            rule = f"{name} must be left out where {self.builder} builds the model, by its own code"
            require(self.is_ours or not getattr(self, name), "model", rule, getattr(self, name))

    def _check_init(self) -> None:
        std = self.init_std
        require(0 < std < math.inf, "model", "init_std must be > 0 and finite", std)
        # GPT-2's scheme scales the projections into the residual stream, which it has to know
        known = INIT_SCHEMES if self.is_ours else (OWN_INIT, *INIT_SCHEMES[1:])
        rule = f"init must be {', '.join(known)} or MODULE:FUNCTION"
        require(self.init in known or ":" in self.init, "model", rule, self.init)

    def _check_options(self, known: Mapping[str, Any]) -> None:
        for name, value in self.options.items():
            rule = f"options must be of {', '.join(known) or 'none'} for {self.builder}"
            require(name in known, "model", rule, name)
            is_bool = isinstance(known[name], bool)
            fits = isinstance(value, bool) == is_bool and isinstance(value, int | float)
            kind = "true or false" if is_bool else "a number >= 0 and finite"
            fits = fits and (is_bool or 0 <= value < math.inf)
            require(fits, "model", f"options: {name} must be {kind}", value)
        rule = "options: mlp_width must be a whole number"
        width = self.options.get("mlp_width", 0)
        require(width == int(width), "model", rule, width)
        rule = "options: rope_theta must be > 0"
        require(self.options.get("rope_theta", 1) > 0, "model", rule, 0)

    def _check_huggingface(self) -> None:
        config = self.options.get("config")
        rule = "options must hold the `config` of a model: write `model: {hf: FOLDER}`"
        require(isinstance(config, dict) and "model_type" in config, "model", rule, self.options)
        assert isinstance(config, dict)
        for name in self.options:
            known = ("config", "folder", "weights")
            rule = f"options must be of {', '.join(known)}; nearest: {nearest(name, known)}"
            require(name in known, "model", rule, name)
        weights = self.options.get("weights", "random")
        rule = "options: weights must be random or given"
        require(weights in ("random", "given"), "model", rule, weights)
        told = shape_of(config)
        for name, value in told.items():
            given = getattr(self, name)
            if name == "context":
                rule = f"context must be at most the {value} positions of its config"
                require(given <= value, "model", rule, given)
                continue
            rule = f"{name} must be {value}, as in its config"
            require((given or self.heads) == value, "model", rule, given)
