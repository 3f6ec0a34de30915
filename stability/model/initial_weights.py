"""The weights that a run starts from: an init scheme drawn from a seed, and an optional nudge.

Every scheme draws embeddings from N(0, 0.02^2), sets biases to 0 and norm scales to 1; the schemes
differ in the matrices. The nudge moves each weight by single units in its last place, the smallest
change that the dtype can hold: on the ladder it is the lowest rung above zero.

Sources: GPT-2 scales the projections into the residual stream by 1/sqrt(2 * depth); Glorot and
Bengio 2010 (`xavier`, uniform); He et al., arXiv 1502.01852 (`kaiming`, normal, fan-in);
Saxe et al., arXiv 1312.6120 (`orthogonal`).
"""

import difflib
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from stability.model.gpt import GPT

__all__ = ["INIT_SCHEMES", "initialise", "nudge_weights"]

_STD = 0.02


def _gpt2(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.normal_(weight, std=_STD, generator=generator)


def _xavier(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.xavier_uniform_(weight, generator=generator)


def _kaiming(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)


def _orthogonal(weight: Tensor, generator: Generator) -> Tensor:
    return nn.init.orthogonal_(weight, generator=generator)


INIT_SCHEMES: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "gpt2": _gpt2,
    "xavier": _xavier,
    "kaiming": _kaiming,
    "orthogonal": _orthogonal,
}
"""How each scheme fills a matrix `(out_features, in_features)` in place."""


def initialise(model: GPT, scheme: str, seed: int) -> None:
    """Set every weight of `model`, in place, by the scheme called `scheme`.

    Values are drawn in FP32 on the CPU from a generator of their own, then cast: the same seed
    gives the same weights on every device, and no global generator moves. ValueError names the
    nearest schemes.
    """
    if scheme not in INIT_SCHEMES:
        near = difflib.get_close_matches(scheme, INIT_SCHEMES, n=3, cutoff=0.4)
        raise ValueError(
            f"initialise: scheme must be known, got {scheme!r}; "
            f"nearest: {', '.join(near or INIT_SCHEMES)}"
        )
    generator = Generator().manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * model.config.depth) if scheme == "gpt2" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            _fill(name, value, INIT_SCHEMES[scheme], generator)
            if name.endswith("_residual.weight"):
                value *= residual_scale
            parameter.copy_(value)


def _fill(
    name: str, value: Tensor, scheme: Callable[[Tensor, Generator], Tensor], generator: Generator
) -> None:
    if name.endswith("bias"):
        value.zero_()
    elif value.dim() == 1:
        value.fill_(1.0)
    elif "embedding" in name:
        value.normal_(std=_STD, generator=generator)
    else:
        scheme(value, generator)


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
