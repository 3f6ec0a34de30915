"""The weights that a run starts from: an init scheme drawn from a seed, and an optional nudge.

Every scheme draws embeddings from a normal distribution of standard deviation 0.02, or what the
config says, sets biases to 0 and norm scales to 1; the schemes differ in the matrices. Of a model
that is not ours a scheme draws the matrices of linear layers and the embeddings, and leaves the
rest as its own code draws it. The nudge moves each weight by single units in its last place, the
smallest change that the dtype can hold: on the ladder it is the lowest rung above zero.

Sources: GPT-2 scales the projections into the residual stream by 1/sqrt(2 * depth); Glorot and
Bengio 2010 (`xavier`, uniform); He et al., arXiv 1502.01852 (`kaiming`, normal, fan-in);
Saxe et al., arXiv 1312.6120 (`orthogonal`).
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from stability.config.model import OWN_INIT, ModelConfig
from stability.config.user_functions import import_function

__all__ = ["initialise", "nudge_weights"]


def _xavier(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.xavier_uniform_(weight, generator=generator)


def _kaiming(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)


def _orthogonal(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.orthogonal_(weight, generator=generator)


_FILL: dict[str, Callable[[Tensor, Generator], Any]] = {
    "xavier": _xavier,
    "kaiming": _kaiming,
    "orthogonal": _orthogonal,
}
"""How each scheme but `gpt2` fills a matrix `(out_features, in_features)` in place."""


def initialise(model: nn.Module, seed: int, config: ModelConfig | None = None) -> None:
    """Set every weight of `model`, in place, by the init scheme of `config`, by default its own.

    Values are drawn in FP32 on the CPU from a generator of their own, then cast: the same seed
    gives the same weights on every device, and no global generator moves. ValueError for a function
    of the user's own that can't be imported, or leaves a matrix with values that are not finite.
    """
    if config is None:
        assert isinstance(model.config, ModelConfig)  # of a model of ours
        config = model.config
    if config.init == OWN_INIT:
        return
    generator = Generator().manual_seed(seed)
    fill = _fill_of(config)
    if not config.is_ours:
        _redraw(model, config, fill, generator)
        return
    residual_scale = 1 / math.sqrt(2 * config.depth) if config.init == "gpt2" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            if name.endswith("bias"):
                value.zero_()
            elif value.dim() == 1:
                value.fill_(1.0)
            elif "embedding" in name:
                value.normal_(std=config.init_std, generator=generator)
            else:
                fill(value, generator)
            if name.endswith("_residual.weight"):
                value *= residual_scale
            parameter.copy_(value)


def _redraw(
    model: nn.Module,
    config: ModelConfig,
    fill: Callable[[Tensor, Generator], Any],
    generator: Generator,
) -> None:
    """Draw the matrices of linear layers and the embeddings of a model that is not ours."""
    kinds = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():  # each once, whatever shares it
            kind = kinds.get(id(parameter))
            if kind is None:
                continue
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            if isinstance(kind, nn.Embedding):
                value.normal_(std=config.init_std, generator=generator)
            else:
                fill(value, generator)
            parameter.copy_(value)


def _fill_of(config: ModelConfig) -> Callable[[Tensor, Generator], Any]:
    """Return how the scheme of `config` fills a matrix in place."""
    if config.init == "gpt2":
        return lambda weight, generator: weight.normal_(std=config.init_std, generator=generator)
    return _FILL.get(config.init) or _users(config.init)


def _users(name: str) -> Callable[[Tensor, Generator], Any]:
    """Return a fill by the user's function of (matrix, generator), which writes into the matrix."""
    own = import_function(name, "model.init")

    def fill(value: Tensor, generator: Generator) -> None:
        value.fill_(math.nan)
        with torch.random.fork_rng(devices=[]):  # it may draw from the global generator
            torch.manual_seed(generator.initial_seed())
            own(value, generator)
        if not value.isfinite().all():
            raise ValueError(
                f"model.init: {name} must fill each matrix in place with finite values, a matrix "
                f"{tuple(value.shape)} has others"
            )

    return fill


def nudge_weights(model: nn.Module, ulps: int, seed: int, draw: int = 0) -> None:
    """Move every weight of `model`, in place, by `ulps` units in the last place of its dtype.

    Each weight goes up or down by a coin of a local generator, seeded with `seed` and, from the
    second on, with the number of the `draw`. A zero becomes the `ulps`-th subnormal. `ulps=0`
    changes nothing.
    """
    generator = torch.Generator().manual_seed(_coin_seed(seed, draw))
    with torch.no_grad():
        for parameter in model.parameters():
            coin = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            target = (coin * torch.inf).to(parameter)
            for _ in range(ulps):
                parameter.copy_(torch.nextafter(parameter, target))


def _coin_seed(seed: int, draw: int) -> int:
    """Return the generator's seed for one draw: `seed` itself for the first."""
    if draw == 0:
        return seed
    # a hash, so that no draw of one seed is a draw of another: seed + draw would be. Four bytes,
    # because torch's CPU generator keeps the low 32 bits of its seed
    return int.from_bytes(hashlib.sha256(f"nudge {seed} {draw}".encode()).digest()[:4])
