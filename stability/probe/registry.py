"""Attention implementations by name, bound to their numerics and engine.

An `AttentionConfig` becomes a `ResolvedAttention`: a plain callable that says what it is. "auto" is
resolved here, once, so that the manifest can hold what ran. Leaves out the arithmetic, and finding
a function of the user's own (`own_attention`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    AttentionOutput,
    MaskArguments,
    attention,
    baseline_attention,
    flash_attention,
    golden_attention,
    resolve_engine,
)
from attention_kernels.peers.registry import PEERS
from stability.config.convert import nearest
from stability.config.groups import AttentionConfig
from stability.config.plugins import ATTENTIONS, plugins
from stability.probe.own_attention import find_own, is_own, loaded

__all__ = [
    "IMPLEMENTATIONS",
    "MaskedAttention",
    "ResolvedAttention",
    "attention_from_text",
    "resolve_attention",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAttention:
    """An attention function with its name (`flash:fa2`) and what a manifest says of it."""

    name: str
    function: Callable[..., Any]
    description: dict[str, Any]
    gives_lse: bool = False
    """Whether `function` takes `return_lse=True`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        """Attend as `AttentionFn` says, with the masks of `MaskArguments`."""
        return self.function(q, k, v, **mask)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and return out and, where the implementation gives one, the LSE."""
        if not self.gives_lse:
            return self(q, k, v, **mask), None
        output: AttentionOutput = self.function(q, k, v, return_lse=True, **mask)
        return output.out, output.lse


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """An attention with a call's mask bound: a `Primary` that also gives the LSE where it can."""

    attention: ResolvedAttention
    mask: MaskArguments

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        return self.attention(q, k, v, **self.mask)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend and return out and the LSE or None."""
        return self.attention.with_lse(q, k, v, **self.mask)


def _profile(config: AttentionConfig, profiles: dict[str, Any], default: str) -> tuple[str, Any]:
    name = config.profile or default
    if name not in profiles:
        raise ValueError(
            f"resolve_attention: profile of {config.implementation} must be one of its profiles, "
            f"got {name!r}; nearest: {nearest(name, profiles)}"
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
        gives_lse=True,
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
        gives_lse=True,
    )


def _resolve_golden(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    _refuse_engine(config)
    _refuse_settings(config, "it is FP64 throughout")
    return ResolvedAttention(
        name="golden",
        function=_golden,
        description={"implementation": "golden", "engine": "torch"},
        gives_lse=False,
    )


def _golden(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
    return golden_attention(q, k, v, **mask).to(q.dtype)


def _resolve_sdpa(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Resolve PyTorch's own choice of kernel, or the one backend that the profile names."""
    _refuse_engine(config)
    if config.numerics:
        _refuse_settings(config, "PyTorch chooses its own kernel")
    backends = [name.partition(":")[2] for name in PEERS if name.startswith("sdpa:")]
    if config.profile and config.profile not in backends:
        raise ValueError(
            "resolve_attention: profile of sdpa must be one of PyTorch's backends, got "
            f"{config.profile!r}; nearest: {nearest(config.profile, backends)}"
        )
    name = f"sdpa:{config.profile}" if config.profile else "sdpa"
    return ResolvedAttention(
        name=name,
        function=partial(attention, implementation=name) if config.profile else _sdpa,
        description={"implementation": name, "engine": f"torch {torch.__version__}"},
    )


def _refuse_engine(config: AttentionConfig) -> None:
    if config.engine != "auto":
        raise ValueError(
            f"resolve_attention: engine of {config.implementation} must be 'auto', got "
            f"{config.engine!r}; only flash has engines"
        )


def _refuse_settings(config: AttentionConfig, reason: str) -> None:
    if config.profile or config.numerics:
        raise ValueError(
            f"resolve_attention: {config.implementation} takes no profile and no numerics, got "
            f"{config.profile or config.numerics!r}; {reason}"
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
    """Attend by `scaled_dot_product_attention`; ValueError for what it has no argument for."""
    causal, attn_mask = mask.get("causal", False), mask.get("attn_mask")
    padding = mask.get("key_padding")
    if padding is not None and attn_mask is None:
        attn_mask = padding[:, None, None, :]
    others = [
        name
        for name, value in mask.items()
        if name not in ("causal", "scale", "attn_mask", "key_padding") and value
    ]
    if others or (causal and (attn_mask is not None or q.shape[2] != k.shape[2])):
        what = others[0] if others else "causal with another mask, or with other lengths"
        raise ValueError(f"sdpa: the mask must be one that it takes, got {what}; use 'sdpa:math'")
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask,
        is_causal=causal,
        scale=mask.get("scale"),
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _resolve_own(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    _refuse_engine(config)
    _refuse_settings(config, "a function of your own knows its own numerics")
    own = find_own(config.implementation)
    return ResolvedAttention(
        name=config.implementation, function=own.function, description=own.description
    )


IMPLEMENTATIONS: dict[str, Callable[[AttentionConfig, torch.device], ResolvedAttention]] = {
    "baseline": _resolve_baseline,
    "flash": _resolve_flash,
    "golden": _resolve_golden,
    "sdpa": _resolve_sdpa,
}


def attention_from_text(text: str) -> AttentionConfig:
    """Return the config that `text` means: "flash", "flash:fa2", "sdpa:math", "mypkg:function".

    Before the colon stands a registered implementation and after it its profile; else the text is
    an entry point's name or module:function. What it names is checked by `resolve_attention`.
    """
    family, _, profile = text.partition(":")
    if family in IMPLEMENTATIONS and text not in plugins(ATTENTIONS):
        return AttentionConfig(implementation=family, profile=profile)
    return AttentionConfig(implementation=text)


def resolve_attention(
    config: AttentionConfig | str | Callable[..., Tensor], device: torch.device
) -> ResolvedAttention:
    """Return the attention that `config` names, for tensors on `device`.

    `config` may be text as in `attention_from_text`, or a function like `AttentionFn`. ValueError
    names an unknown implementation, profile or numerics field and the nearest ones, a function
    that can't be imported or called, or an engine that this device cannot run.
    """
    if isinstance(config, ResolvedAttention):
        return config
    if isinstance(config, str):
        config = attention_from_text(config)
    if not isinstance(config, AttentionConfig):
        own = loaded(getattr(config, "__name__", type(config).__name__), config)
        return ResolvedAttention(name=own.name, function=own.function, description=own.description)
    if config.implementation in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[config.implementation](config, device)
    if is_own(config.implementation):
        return _resolve_own(config, device)
    known = [*IMPLEMENTATIONS, *plugins(ATTENTIONS)]
    raise ValueError(
        "resolve_attention: implementation must be registered or MODULE:FUNCTION, got "
        f"{config.implementation!r}; nearest: {nearest(config.implementation, known)}"
    )
