"""The attention that a name stands for, as a function to call.

A name in a config is one of `IMPLEMENTATIONS`, the table in `config.attentions` where a new one is
added, an entry point of another package, or the `module:function` of a user's own attention. It
becomes a `ResolvedAttention`, a plain callable that says what it is, a planted fault included:
"auto" is resolved here, once, so that the manifest can hold what ran. A user's attention is a
function of (q, k, v, *, causal, scale=None) and may take more of `MaskArguments` by name; a call
with a mask that it does not take is refused, so that no mask is dropped in silence. Leaves out the
arithmetic and the faults (`attention_kernels`) and checking what a user's function returns
(`attention_probe`).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import (
    AttentionOutput,
    FlashNumerics,
    Format,
    MaskArguments,
    attention,
    baseline_attention,
    flash_attention,
    golden_attention,
    resolve_engine,
)
from attention_kernels.fp_environment import settle_vector_math
from attention_kernels.mask_mod import MaskFunction, MaskMod
from attention_kernels.points import BackwardNumerics
from attention_kernels.testing import plant
from stability.config.attentions import IMPLEMENTATIONS
from stability.config.convert import nearest
from stability.config.plugins import ATTENTIONS, plugins
from stability.config.schema import AttentionConfig
from stability.config.user_functions import did_you_mean, import_function, source_hash

__all__ = [
    "ROUNDING",
    "ResolvedAttention",
    "attention_from_text",
    "attention_function",
    "is_users",
    "resolve_attention",
    "resolve_baseline",
    "resolve_flash",
    "resolve_golden",
    "resolve_sdpa",
    "with_fault",
    "with_input_format",
]


ROUNDING = ("rounding_key", "rounding_place")
"""What an attention that rounds stochastically takes beside a mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAttention:
    """An attention function with its name, e.g. `flash:fa2`, and its description for a manifest."""

    name: str
    function: Callable[..., Any]
    description: dict[str, Any]
    gives_lse: bool = False
    """Whether `function` takes `return_lse=True`."""
    takes_mask_mod: bool = False
    """Whether `function` evaluates a `mask_mod` itself; else it gets a tensor in its place."""
    takes_rounding_key: bool = False
    """Whether `function` rounds by the `rounding_key` and `rounding_place` of a call."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        """Attend as `AttentionFn` says, with the masks of `MaskArguments`."""
        return self.function(q, k, v, **self._mask_it_takes(q, k, mask))

    def drawing_by(self, rounding: Mapping[str, Any]) -> "ResolvedAttention":
        """Return this attention with a call's `rounding_key` and `rounding_place`, if it draws."""
        if not (self.takes_rounding_key and rounding):
            return self
        function = partial(self.function, **rounding)
        return replace(self, function=function, takes_rounding_key=False)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and return out and, where the implementation gives one, the LSE."""
        mask = self._mask_it_takes(q, k, mask)
        if not self.gives_lse:
            return self.function(q, k, v, **mask), None
        output: AttentionOutput = self.function(q, k, v, return_lse=True, **mask)
        return output.out, output.lse

    def _mask_it_takes(self, q: Tensor, k: Tensor, mask: MaskArguments) -> MaskArguments:
        function = mask.get("mask_mod")
        if function is None or self.takes_mask_mod:
            return mask
        mod = MaskMod(function, range(q.shape[0]), range(q.shape[1]), self.name)
        visible = mod.visible(range(q.shape[2]), range(k.shape[2]), q.device)
        given = mask.get("attn_mask")
        if given is not None and given.dtype == torch.bool:
            visible = visible & given
        elif given is not None:
            visible = torch.where(visible, given, -torch.inf)
        whole = mask.copy()
        whole["mask_mod"], whole["attn_mask"] = None, visible
        return whole


def resolve_flash(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Return flash attention with its numerics, on the engine that `device` runs."""
    engine = resolve_engine(config.engine, device)
    return _with_numerics(config, partial(flash_attention, engine=engine), engine)


def resolve_baseline(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Return the attention that holds the whole score matrix, with its numerics."""
    _refuse_engine(config)
    return _with_numerics(config, baseline_attention, "torch")


def _with_numerics(
    config: AttentionConfig, function: Callable[..., Any], engine: str
) -> ResolvedAttention:
    """Bind the numerics that a profile and single fields choose."""
    _, profiles, default = IMPLEMENTATIONS[config.implementation]
    profile = config.profile or default
    if profile not in profiles:
        raise ValueError(
            f"attention.profile of {config.implementation} must be one of its profiles, "
            f"got {profile!r}; nearest: {nearest(profile, profiles)}"
        )
    numerics = profiles[profile].with_(**config.numerics)
    draws = isinstance(numerics, FlashNumerics) and numerics.arithmetic.rounding == "stochastic"
    return ResolvedAttention(
        name=f"{config.implementation}:{profile}",
        function=partial(function, numerics=numerics),
        description={
            "implementation": config.implementation,
            "profile": profile,
            "engine": engine,
            "numerics": numerics.to_dict(),
        },
        gives_lse=True,
        takes_mask_mod=True,
        takes_rounding_key=draws,
    )


def resolve_golden(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Return the FP64 attention, its result in the dtype of q."""
    _refuse_engine(config)
    _refuse_settings(config, "it is FP64 throughout")
    return ResolvedAttention(
        name="golden",
        function=_golden,
        description={"implementation": "golden", "engine": "torch"},
        takes_mask_mod=True,
    )


def _golden(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
    # as from any other attention, the model's next layer gets q's dtype
    return golden_attention(q, k, v, **mask).to(q.dtype)


def resolve_sdpa(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    """Return PyTorch's own choice of kernel, or the one backend that the profile names."""
    _refuse_engine(config)
    if config.numerics:
        _refuse_settings(config, "PyTorch chooses its own kernel")
    backends = IMPLEMENTATIONS["sdpa"].profiles
    if config.profile and config.profile not in backends:
        raise ValueError(
            "attention.profile of sdpa must be one of PyTorch's backends, got "
            f"{config.profile!r}; nearest: {nearest(config.profile, backends)}"
        )
    name = f"sdpa:{config.profile}" if config.profile else "sdpa"
    return ResolvedAttention(
        name=name,
        function=partial(attention, implementation=name) if config.profile else _sdpa,
        description={"implementation": name, "engine": f"torch {torch.__version__}"},
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
    """Attend by `scaled_dot_product_attention`; ValueError for what it has no argument for.

    SDPA aligns a causal mask top-left and `MaskArguments` bottom-right, so causal with other
    lengths is refused; a causal flag beside a mask SDPA itself refuses.
    """
    causal, attn_mask = mask.get("causal", False), _visible(mask)
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


def _visible(mask: MaskArguments) -> Tensor | None:
    """Return what SDPA takes for `attn_mask`: the mask, the padding, or both in one."""
    attn_mask, padding = mask.get("attn_mask"), mask.get("key_padding")
    if padding is None:
        return attn_mask
    seen_B11K = padding[:, None, None, :]
    if attn_mask is None:
        return seen_B11K
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen_B11K
    return torch.where(seen_B11K, attn_mask, -torch.inf)


def _refuse_engine(config: AttentionConfig) -> None:
    if config.engine != "auto":
        raise ValueError(
            f"attention.engine of {config.implementation} must be 'auto', got "
            f"{config.engine!r}; only flash has engines"
        )


def _refuse_settings(config: AttentionConfig, reason: str) -> None:
    if config.profile or config.numerics:
        raise ValueError(
            f"attention: {config.implementation} takes no profile and no numerics, got "
            f"{config.profile or config.numerics!r}; {reason}"
        )


def attention_from_text(text: str) -> AttentionConfig:
    """Return the config that `text` means: "flash", "flash:fa2", "sdpa:math", "mypkg:function".

    Before the colon stands one of `IMPLEMENTATIONS` and after it its profile; any other text is an
    entry point's name or module:function. After a plus, as in "flash:fa2+dq_gain", stands a planted
    fault. What it names is checked by `resolve_attention`.
    """
    if text in plugins(ATTENTIONS):
        return AttentionConfig(implementation=text)
    text, _, fault = text.partition("+")
    family, _, profile = text.partition(":")
    if family in IMPLEMENTATIONS and text not in plugins(ATTENTIONS):
        return AttentionConfig(implementation=family, profile=profile, fault=fault)
    return AttentionConfig(implementation=text, fault=fault)


def resolve_attention(
    config: AttentionConfig | str | Callable[..., Tensor], device: torch.device
) -> ResolvedAttention:
    """Return the attention that `config` names, for tensors on `device`.

    `config` may be text as in `attention_from_text`, or a function like `AttentionFn`. ValueError
    names an unknown implementation, profile, fault or numerics field and the nearest ones, a
    function that can't be imported or called, or an engine that this device cannot run.
    """
    settle_vector_math()  # its first call is as exact as the second, a user's own function's too
    if isinstance(config, ResolvedAttention):
        return config
    if isinstance(config, str):
        config = attention_from_text(config)
    if not isinstance(config, AttentionConfig):
        return _user_attention(getattr(config, "__name__", type(config).__name__), config)
    resolved = _resolve_named(config, device)
    return with_fault(resolved, config.fault) if config.fault else resolved


def with_fault(attention: ResolvedAttention, fault: str) -> ResolvedAttention:
    """Return `attention` with a planted fault, e.g. `flash:fa2+dq_gain`; ValueError if unknown."""
    return replace(
        attention,
        name=f"{attention.name}+{fault}",
        function=plant(attention.function, fault),
        description={**attention.description, "fault": fault},
    )


def _resolve_named(config: AttentionConfig, device: torch.device) -> ResolvedAttention:
    name = config.implementation
    if name in IMPLEMENTATIONS:
        module, _, resolver = IMPLEMENTATIONS[name].resolver.partition(":")
        return getattr(importlib.import_module(module), resolver)(config, device)
    head, _, profile = name.partition(":")
    if head in IMPLEMENTATIONS:
        raise ValueError(
            f"attention.implementation must be a name without its profile, got {name!r}; "
            f"write {{implementation: {head}, profile: {profile}}}"
        )
    if not _may_be_users(name):
        known = [*IMPLEMENTATIONS, *plugins(ATTENTIONS)]
        raise ValueError(
            "attention must be registered or MODULE:FUNCTION, got "
            f"{name!r}; nearest: {nearest(name, known)}{did_you_mean(name)}"
        )
    _refuse_engine(config)
    _refuse_settings(config, "a function of your own knows its own numerics")
    return _user_attention(name, _import_user_function(name))


def is_users(config: AttentionConfig) -> bool:
    """Whether an attention would have to be imported from the user's or another package's code."""
    return config.implementation not in IMPLEMENTATIONS


def attention_function(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the attention that `name` stands for as its author wrote it, with its own arguments.

    ValueError as `resolve_attention`, which wraps a user's function so that only the arguments of
    an `AttentionFn` reach it.
    """
    resolved = resolve_attention(name, device)
    config = attention_from_text(name)
    if config.implementation in IMPLEMENTATIONS:
        return resolved.function
    own = _import_user_function(config.implementation)
    return plant(own, config.fault) if config.fault else own


def with_input_format(config: AttentionConfig, format: Format | None) -> AttentionConfig:
    """Return `config` with each rounding point that follows the input set to `format`.

    Where a run's precision is emulated, q, k and v are FP32 tensors whose values lie on the grid of
    the format: their dtype no longer says what such points should round to. None leaves the config
    as it is. ValueError for an implementation without rounding points.
    """
    if format is None:
        return config
    implementation = IMPLEMENTATIONS.get(config.implementation)
    if implementation is None or not implementation.default:
        raise ValueError(
            "attention.implementation must be flash or baseline where the precision is emulated, "
            f"got {config.implementation!r}; it can't be told to round to {format.name}"
        )
    numerics = implementation.profiles[config.profile or implementation.default].with_(
        **config.numerics
    )
    following = [name for name, value in numerics.to_dict().items() if value == "input"]
    backward = {field.name for field in fields(BackwardNumerics)}
    # a gradient beyond the format's range must become inf, or the loss scaler would not back off
    overflowing = format.name.removesuffix("-saturate")
    points = {name: overflowing if name in backward else format.name for name in following}
    return replace(config, numerics={**config.numerics, **points})


def _may_be_users(name: str) -> bool:
    """Whether `name` is an entry point or reads as module:function; imports nothing."""
    module, colon, function = name.partition(":")
    readable = all(part.isidentifier() for part in (*module.split("."), function))
    return name in plugins(ATTENTIONS) or bool(colon and readable)


def _import_user_function(name: str) -> Callable[..., Any]:
    """Import what `name` stands for; ValueError if that fails or it can't be called."""
    entry = plugins(ATTENTIONS).get(name)
    return import_function(entry.value if entry else name, "attention")


def _user_attention(name: str, function: Callable[..., Any]) -> ResolvedAttention:
    """Return a user's `function` as an attention called `name`.

    Its description has the module and the SHA-256 of its source, so that two runs with different
    sources are told apart. ValueError if it can't be called as (q, k, v, causal=, scale=).
    """
    takes = _arguments(name, function)
    return ResolvedAttention(
        name=name,
        function=partial(_call_user_function, function, name, takes, _needs_scale(function)),
        description={
            "implementation": name,
            "engine": getattr(function, "__module__", ""),
            "source": source_hash(function),
        },
        takes_mask_mod="mask_mod" in takes,
    )


def _arguments(name: str, function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments that a user's function takes."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin does not tell
        return frozenset(("causal", "scale"))
    try:
        # tried before the run, which would else fail at its first step
        signature.bind(None, None, None, causal=True, scale=1.0)
    except TypeError as error:
        raise ValueError(
            "attention must be a function of (q, k, v, *, causal, scale), got "
            f"{name!r} of {signature}; {error}"
        ) from error
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        # what is not named may be ignored, and a function is easily: it gets the tensor
        return frozenset(MaskArguments.__annotations__) - {"mask_mod"} | signature.parameters.keys()
    return frozenset(signature.parameters)


def _needs_scale(function: Callable[..., Any]) -> bool:
    """Whether a user's function has no default for the scale."""
    try:
        parameter = inspect.signature(function).parameters.get("scale")
    except ValueError:  # a builtin does not tell
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _call_user_function(
    function: Callable[..., Tensor],
    name: str,
    takes: frozenset[str],
    needs_scale: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **mask: Unpack[MaskArguments],
) -> Tensor:
    asked = {key: value for key, value in mask.items() if _changes_the_call(key, value)}
    visible = asked.get("attn_mask")
    takes_functions_alone = "mask_mod" in takes - asked.keys() and "attn_mask" not in takes
    if takes_functions_alone and isinstance(visible, Tensor) and visible.dtype == torch.bool:
        asked["mask_mod"] = _looked_up(visible)
        del asked["attn_mask"]
    refused = [key for key in asked if key not in takes]
    if refused:
        raise ValueError(
            f"{name}: the mask must be one that it takes, got {refused[0]}; "
            f"it takes {', '.join(sorted(takes & set(MaskArguments.__annotations__)))}"
        )
    if needs_scale:
        asked.setdefault("scale", q.shape[-1] ** -0.5)
    # causal is always said: a function's own default may be the other
    return function(q, k, v, **{"causal": False, **asked})


def _looked_up(visible: Tensor) -> MaskFunction:
    """Return the mask_mod of a bool mask that broadcasts to (batch, heads, query_len, key_len)."""
    visible_BHQK = visible[(None,) * (4 - visible.dim())]

    def mask_mod(*places: Tensor) -> Tensor:
        sizes = zip(places, visible_BHQK.shape, strict=True)
        return visible_BHQK[tuple(at if size > 1 else at * 0 for at, size in sizes)]

    return mask_mod


def _changes_the_call(key: str, value: Any) -> bool:
    """Whether a mask argument differs from having been left out."""
    if value is None or (isinstance(value, tuple) and value == (None, None)):
        return False
    # a scale of 0 is a scale; any other 0 is an argument that is off
    return key == "scale" or isinstance(value, Tensor) or bool(value)
