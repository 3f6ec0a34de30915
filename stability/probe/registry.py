"""A user's own attention: found by an entry point or as module:function, and called as it allows.

It is a function of (q, k, v, *, causal, scale=None) and may take more of `MaskArguments` by name;
it is given those that the call really has, and a call with one that it does not take is refused, so
that nothing is ever left out in silence. Leaves out checking what it returns (`comparison`).

Attention implementations by name, bound to their numerics and engine.

An `AttentionConfig` becomes a `ResolvedAttention`: a plain callable that says what it is. "auto" is
resolved here, once, so that the manifest can hold what ran. Leaves out the arithmetic, and finding
a function of the user's own (`own_attention`).

An attention's config in a run whose precision is emulated: "input" becomes that format.

There q, k and v are FP32 tensors with values on the format's grid, so their dtype no longer says
what the rounding points that follow the input should round to. Leaves out every other matrix
product (`model.emulated_linear`).
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    AttentionOutput,
    Format,
    MaskArguments,
    attention,
    baseline_attention,
    flash_attention,
    golden_attention,
    resolve_engine,
)
from attention_kernels.numerics import BackwardNumerics
from attention_kernels.peers.registry import PEERS
from stability.config.convert import nearest
from stability.config.plugins import ATTENTIONS, plugins
from stability.config.schema import AttentionConfig

__all__ = [
    "IMPLEMENTATIONS",
    "MaskedAttention",
    "OwnAttention",
    "ResolvedAttention",
    "attention_from_text",
    "find_own",
    "in_format",
    "is_own",
    "loaded",
    "resolve_attention",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAttention:
    """A function to be called like `flash_attention`, and where it comes from."""

    name: str
    function: Callable[..., Tensor]
    description: dict[str, Any]


def is_own(name: str) -> bool:
    """Say whether `name` is an entry point or reads as module:function; imports nothing."""
    module, colon, function = name.partition(":")
    readable = all(part.isidentifier() for part in (*module.split("."), function))
    return name in plugins(ATTENTIONS) or bool(colon and readable)


def find_own(name: str) -> OwnAttention:
    """Import what `name` stands for; ValueError if that fails or it is no attention."""
    entry = plugins(ATTENTIONS).get(name)
    where = entry.value if entry else name
    module_name, _, attribute = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"find_own: attention must be MODULE:FUNCTION of a module that imports, got {where!r}; "
            f"{error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"find_own: attention must be a function that {module_name} has, got {attribute!r}; "
            f"nearest: {nearest(attribute, [key for key in dir(module) if key[0] != '_'])}"
        )
    return loaded(name, function)


def loaded(name: str, function: Callable[..., Any]) -> OwnAttention:
    """Return `function` as an attention called `name`.

    Its description has the module and the SHA-256 of its file, so that two runs with different
    sources are told apart. ValueError if it can't be called as (q, k, v, causal=, scale=).
    """
    takes = _takes(name, function)
    source = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else ""
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    return OwnAttention(
        name=name,
        function=partial(_call, function, name, takes),
        description={
            "implementation": name,
            "engine": getattr(function, "__module__", ""),
            "source": digest,
        },
    )


def _takes(name: str, function: Callable[..., Any]) -> frozenset[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin does not tell
        return frozenset(("causal", "scale"))
    try:
        signature.bind(None, None, None, causal=True, scale=1.0)
    except TypeError as error:
        raise ValueError(
            f"find_own: attention must be a function of (q, k, v, *, causal, scale), got {name!r} "
            f"of {signature}; {error}"
        ) from error
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return frozenset(MaskArguments.__annotations__)
    return frozenset(signature.parameters)


def _call(
    function: Callable[..., Tensor],
    name: str,
    takes: frozenset[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **mask: Unpack[MaskArguments],
) -> Tensor:
    asked = {key: value for key, value in mask.items() if _says_something(key, value)}
    refused = [key for key in asked if key not in takes]
    if refused:
        raise ValueError(
            f"{name}: the mask must be one that it takes, got {refused[0]}; "
            f"it takes {', '.join(sorted(takes & set(MaskArguments.__annotations__)))}"
        )
    return function(q, k, v, **{"causal": False, **asked})


def _says_something(key: str, value: Any) -> bool:
    if value is None or (isinstance(value, tuple) and value == (None, None)):
        return False
    return key == "scale" or isinstance(value, Tensor) or bool(value)


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


def in_format(config: AttentionConfig, format: Format | None) -> AttentionConfig:
    """Return `config` with each rounding point that follows the input at `format`; None: as it is.

    ValueError for an implementation whose inside can't be told a format.
    """
    if format is None:
        return config
    profiles = {"flash": (PROFILES, "fa2"), "baseline": (BASELINE_PROFILES, "plain")}
    if config.implementation not in profiles:
        raise ValueError(
            "attention.implementation must be flash or baseline where the precision is emulated, "
            f"got {config.implementation!r}; it can't be told to round to {format.name}"
        )
    known, default = profiles[config.implementation]
    numerics = known[config.profile or default].with_(**config.numerics)
    following = [name for name, value in numerics.to_dict().items() if value == "input"]
    backward = {field.name for field in fields(BackwardNumerics)}
    # a gradient beyond the format must show, or the loss scaler would never back off
    overflowing = format.name.removesuffix("-saturate")
    points = {name: overflowing if name in backward else format.name for name in following}
    return replace(config, numerics={**config.numerics, **points})
