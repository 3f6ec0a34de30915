"""The weights that a run starts from: an init scheme drawn from a seed, and an optional nudge.

Every scheme draws embeddings from a normal distribution of standard deviation 0.02, or what the
config says, sets biases to 0 and norm scales to 1; the schemes differ in the matrices. Of a model
that is not ours a scheme draws the matrices of linear layers and the embeddings, and leaves the
rest as its own code draws it. The nudge moves each weight by single units in its last place, the
smallest change that the dtype can hold: on the ladder it is the lowest rung above zero.

What is drawn for a weight depends on the seed, its tensor's name and its place in it
(`index_stream`): on no other tensor, and not on how ranks share them. `orthogonal` then takes the
whole matrix apart by LAPACK, and a user's own scheme draws as it likes.

Sources: GPT-2 scales the projections into the residual stream by 1/sqrt(2 * depth); Glorot and
Bengio 2010 (`xavier`, uniform); He et al., arXiv 1502.01852 (`kaiming`, normal, fan-in);
Saxe et al., arXiv 1312.6120 (`orthogonal`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from stability.config.model import OWN_INIT, ModelConfig
from stability.config.user_functions import import_function
from stability.metrics.mixing import key_of
from stability.model.index_stream import fill_by_place, normal_at, sign_at, uniform_at

__all__ = ["initialise", "nudge_weights"]

Fill = Callable[[Tensor, int], Any]
"""Fills an FP32 matrix `(out_features, in_features)` in place by the numbers of a key."""


def _normal(std: float) -> Fill:
    return lambda value, key: fill_by_place(value, lambda places: normal_at(key, places) * std)


def _xavier(matrix: Tensor, key: int) -> None:
    bound = math.sqrt(6 / sum(matrix.shape))
    fill_by_place(matrix, lambda places: (2 * uniform_at(key, places) - 1) * bound)


def _kaiming(matrix: Tensor, key: int) -> None:
    _normal(math.sqrt(2 / matrix.shape[1]))(matrix, key)


def _orthogonal(matrix: Tensor, key: int) -> None:
    _normal(1.0)(matrix, key)
    is_wide = matrix.shape[0] < matrix.shape[1]
    q, r = torch.linalg.qr(matrix.T if is_wide else matrix)
    q = q * r.diagonal().sign()  # which makes it uniform: LAPACK's signs are not
    matrix.copy_(q.T if is_wide else q)


_FILL: dict[str, Fill] = {"xavier": _xavier, "kaiming": _kaiming, "orthogonal": _orthogonal}
"""How each scheme but `gpt2` fills a matrix."""


def initialise(model: nn.Module, seed: int, config: ModelConfig | None = None) -> None:
    """Set every weight of `model`, in place, by the init scheme of `config`, by default its own.

    Values are drawn on the CPU, rounded to FP32, then cast: the same seed gives the same weights on
    every device, and no global generator moves. ValueError for a function of the user's own that
    can't be imported, or leaves a matrix with values that are not finite.
    """
    if config is None:
        assert isinstance(model.config, ModelConfig)  # of a model of ours
        config = model.config
    if config.init == OWN_INIT:
        return
    layers = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    fill_matrix = _matrix_fill(config)
    is_scaled = config.init == "gpt2" and config.is_ours
    residual_scale = 1 / math.sqrt(2 * config.depth) if is_scaled else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # each once, whatever shares it
            layer = layers.get(id(parameter))
            if layer is None and not config.is_ours:
                continue
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            if layer is None:
                value.fill_(0.0 if name.endswith("bias") else 1.0)
            elif isinstance(layer, nn.Embedding):
                _normal(config.init_std)(value, key_of("init", seed, name))
            else:
                fill_matrix(value, key_of("init", seed, name))
            if name.endswith("_residual.weight"):
                value *= residual_scale
            parameter.copy_(value)


def _matrix_fill(config: ModelConfig) -> Fill:
    """Return how the scheme of `config` fills a matrix."""
    if config.init == "gpt2":
        return _normal(config.init_std)
    return _FILL.get(config.init) or _users(config.init)


def _users(name: str) -> Fill:
    """Return a fill by the user's function of (matrix, generator), which writes into the matrix."""
    own = import_function(name, "model.init")

    def fill(matrix: Tensor, key: int) -> None:
        # torch's CPU generator keeps the low 32 bits of its seed
        seed = key % 2**32
        matrix.fill_(math.nan)
        with torch.random.fork_rng(devices=[]):  # it may draw from the CPU's global generator
            torch.default_generator.manual_seed(seed)
            own(matrix, Generator().manual_seed(seed))
        if not matrix.isfinite().all():
            raise ValueError(
                f"model.init: {name} must fill each matrix in place with finite values, a matrix "
                f"{tuple(matrix.shape)} has others"
            )

    return fill


def nudge_weights(model: nn.Module, ulps: int, seed: int, draw: int = 0) -> None:
    """Move every weight of `model`, in place, by `ulps` units in the last place of its dtype.

    Each weight goes up or down by a coin of `seed`, the number of the `draw`, its tensor's name and
    its place in it. A zero becomes the `ulps`-th subnormal. `ulps=0` changes nothing.
    """
    if not ulps:
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = key_of("nudge", seed, draw, name)
            coin = torch.empty(parameter.shape, dtype=torch.int8, device=parameter.device)
            fill_by_place(coin, partial(sign_at, key))
            target = (coin * torch.inf).to(parameter)
            for _ in range(ulps):
                parameter.copy_(torch.nextafter(parameter, target))
