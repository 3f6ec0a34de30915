"""Attention implementations by name, bound to their numerics and engine.

An `AttentionConfig` becomes a `ResolvedAttention`: a plain callable that says what it is. "auto" is
resolved here, once, so that the manifest can hold what ran. Leaves out the arithmetic.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    AttentionFn,
    baseline_attention,
    flash_attention,
    resolve_engine,
)
from stability.config.schema import AttentionConfig

__all__ = ["IMPLEMENTATIONS", "ResolvedAttention", "resolve_attention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAttention:
    """An attention function with its name (`flash:fa2`) and what a manifest says of it."""

    name: str
    function: AttentionFn
    description: dict[str, Any]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """Attend as `AttentionFn` says."""
        return self.function(q, k, v, causal=causal, scale=scale)


def _profile(config: AttentionConfig, profiles: dict[str, Any], default: str) -> tuple[str, Any]:
    name = config.profile or default
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, n=3, cutoff=0.4) or list(profiles)
        raise ValueError(
            f"resolve_attention: profile of {config.implementation} must be one of its profiles, "
            f"got {name!r}; nearest: {', '.join(near)}"
        )
    return name, profiles[name].with_(**config.numerics)


def _resolve_flash(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    profile, numerics = _profile(config, PROFILES, "fa2")
    engine = resolve_engine(config.engine, device)
    return ResolvedAttention(
        name=f"flash:{profile}",
        function=partial(flash_attention, numerics=numerics, engine=engine),
        description={
            "implementation": "flash",
            "profile": profile,
            "engine": engine,
            "numerics": numerics.to_dict(),
        },
    )


def _resolve_baseline(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    _refuse_engine(config)
    profile, numerics = _profile(config, BASELINE_PROFILES, "plain")
    return ResolvedAttention(
        name=f"baseline:{profile}",
        function=partial(baseline_attention, numerics=numerics),
        description={
            "implementation": "baseline",
            "profile": profile,
            "engine": "torch",
            "numerics": numerics.to_dict(),
        },
    )


def _resolve_sdpa(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    _refuse_engine(config)
    if config.profile or config.numerics:
        raise ValueError(
            "resolve_attention: sdpa takes no profile and no numerics, got "
            f"{config.profile or config.numerics!r}; PyTorch chooses its own kernel"
        )
    return ResolvedAttention(
        name="sdpa",
        function=_sdpa,
        description={"implementation": "sdpa", "engine": f"torch {torch.__version__}"},
    )


def _refuse_engine(config: AttentionConfig) -> None:
    if config.engine != "auto":
        raise ValueError(
            f"resolve_attention: engine of {config.implementation} must be 'auto', got "
            f"{config.engine!r}; only flash has engines"
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )


IMPLEMENTATIONS: dict[str, Callable[[AttentionConfig, torch.device], ResolvedAttention]] = {
    "baseline": _resolve_baseline,
    "flash": _resolve_flash,
    "sdpa": _resolve_sdpa,
}


def resolve_attention(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Return the attention that `config` names, for tensors on `device`.

    ValueError names an unknown implementation, profile or numerics field and the nearest ones, or
    an engine that this device cannot run.
    """
    if config.implementation not in IMPLEMENTATIONS:
        near = difflib.get_close_matches(config.implementation, IMPLEMENTATIONS, n=3, cutoff=0.4)
        raise ValueError(
            "resolve_attention: implementation must be registered, got "
            f"{config.implementation!r}; nearest: {', '.join(near or IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[config.implementation](config, device)
