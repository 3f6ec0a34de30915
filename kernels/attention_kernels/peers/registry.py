"""One interface over every attention there is: our own, PyTorch's, the libraries', the user's.

The name says who computes, and nobody else ever does: what is not installed, or does not take an
argument, a dtype or a device, is refused with the reason. A silent fallback would be the very
confound that a comparison of numerics looks for. Arguments mean the same whoever computes: masks
are aligned bottom-right, and a row that attends nothing gives 0. How each library is called is in
`sdpa`, `flex` and `libraries`.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Unpack

import torch
from torch import Tensor

from attention_kernels.api import (
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.checks import check_mask_values, check_tensors, read_mask, require
from attention_kernels.masks import Mask, MaskArguments
from attention_kernels.peers import flex, libraries, sdpa
from attention_kernels.profiles import (
    BASELINE_PROFILES,
    DEFAULT_BASELINE_PROFILE,
    DEFAULT_FLASH_PROFILE,
    PROFILES,
)

__all__ = ["PEERS", "PeerStatus", "attention", "peers"]


class PeerStatus(NamedTuple):
    """Whether an implementation runs on a device; `reason` says why not, or what it leaves out."""

    name: str
    version: str
    available: bool
    reason: str
    backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """How to call an attention that is not ours, and which arguments it takes."""

    attend: Callable[..., Tensor]
    status: Callable[[torch.device], tuple[str, bool, str]]
    takes: tuple[str, ...]
    no_backward_on: tuple[str, ...] = ()
    """Types of devices."""
    bias_gradient: bool = False
    """Whether a floating attn_mask gets its gradient."""


_EXPLICIT = ("causal", "window", "key_padding", "attn_mask", "alibi_slopes")
_FLASH = ("causal", "window", "softcap", "cu_seqlens_q", "cu_seqlens_k")


def _library(name: str) -> Peer:
    takes = _FLASH + ("alibi_slopes",) * libraries.LIBRARIES[name].takes_alibi
    if name == "flash_attn4":  # its backward has no softcap
        takes = tuple(argument for argument in takes if argument != "softcap")
    call = partial(libraries.attend_flash, name=name)
    return Peer(
        attend=libraries.attend_flashinfer if name == "flashinfer" else call,
        status=partial(libraries.status, name),
        takes=takes,
        no_backward_on=("cpu", "cuda") if name == "flashinfer" else (),
    )


PEERS: dict[str, Peer] = {
    **{
        name: Peer(
            attend=partial(sdpa.attend, backend=backend),
            status=partial(sdpa.status, backend=backend),
            takes=_EXPLICIT,
            bias_gradient=name == "sdpa:math",  # autograd's own; the fused ones give none or round
        )
        for name, backend in sdpa.BACKENDS.items()
    },
    "flex": Peer(
        attend=flex.attend,
        status=flex.status,
        takes=(*_EXPLICIT, "softcap", "cu_seqlens_q", "cu_seqlens_k"),
        no_backward_on=("cpu",),
    ),
    **{name: _library(name) for name in libraries.LIBRARIES},
}


def peers(device: torch.device | str) -> list[PeerStatus]:
    """Return each attention that is not ours, whether it runs on `device`, and if not, why."""
    device = torch.device(device)
    found = []
    for name, peer in PEERS.items():
        version, available, reason = peer.status(device)
        backward = available and device.type not in peer.no_backward_on
        found.append(PeerStatus(name, version, available, reason, backward))
    return found


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, implementation: str, **mask: Unpack[MaskArguments]
) -> Tensor:
    """Attend with the named implementation; q, k, v, `mask` and the result as `flash_attention`.

    `implementation` is "flash:PROFILE", "baseline:PROFILE", "golden" (out in FP64), a name in
    `PEERS`, or "MODULE:FUNCTION" for a function of your own of (q, k, v, *, causal, scale), which
    `causal` asks to align bottom-right. Each peer takes some of the mask's arguments: `PEERS` says
    which. SDPA and FlexAttention add biases after softcap as `flash_attention` does; SDPA's
    efficient and cuDNN backends round them to q's dtype. Of the peers sdpa:math alone gives a
    floating attn_mask its gradient. ValueError for what is not installed, or does not run on this
    device, or does not take this dtype, head_dim or argument; nothing else is called instead.
    """
    family, _, rest = implementation.partition(":")
    if implementation == "golden":
        return golden_attention(q, k, v, **mask)
    if family == "flash":
        profile = _named(rest or DEFAULT_FLASH_PROFILE, PROFILES, "flash profile")
        return flash_attention(q, k, v, numerics=profile, **mask)
    if family == "baseline":
        profile = _named(rest or DEFAULT_BASELINE_PROFILE, BASELINE_PROFILES, "baseline profile")
        return baseline_attention(q, k, v, numerics=profile, **mask)
    own = bool(rest) and family != "sdpa"
    if not own:
        peer = _named(implementation, PEERS, "implementation", ("flash", "baseline", "golden"))
    check_tensors("attention", q, k, v)
    read, scale = read_mask(q, k, mask, "attention")
    if own:
        _refuse_others(implementation, mask, ("causal",))
        return _call_own(implementation, q, k, v, causal=read.causal, scale=scale)
    _refuse_others(implementation, mask, peer.takes)
    _refuse_trained_bias(implementation, peer, mask)
    return _call_peer(implementation, peer, q, k, v, read, scale)


def _named(name: str, table: dict[str, Any], what: str, others: tuple[str, ...] = ()) -> Any:
    if name not in table:
        known = [*table, *others]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
        raise ValueError(
            f"attention: implementation must name a known {what} or be MODULE:FUNCTION, got "
            f"{name!r}; nearest: {', '.join(near)}"
        )
    return table[name]


def _call_peer(
    name: str, peer: Peer, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> Tensor:
    packed = q.dim() == 3
    if packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_mask_values("attention", mask, q.shape[2], k.shape[2])
    try:
        out = peer.attend(q, k, v, mask=mask, scale=scale)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AssertionError, RuntimeError) as error:
        _refuse(name, q, k, v, error)
    return out.squeeze(0).transpose(0, 1) if packed else out


def _refuse(name: str, q: Tensor, k: Tensor, v: Tensor, error: Exception) -> NoReturn:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    call = f"{shapes}, {str(q.dtype).removeprefix('torch.')}"
    raise ValueError(
        f"attention: implementation must be one that takes this call, got {name!r} for {call} on "
        f"{q.device}; it says: {lines[0]}"
    ) from error


def _refuse_others(name: str, arguments: MaskArguments, takes: Iterable[str]) -> None:
    """Raise ValueError for an argument that is given, does something, and is not taken."""
    without_dropout = arguments.get("dropout_p", 0) == 0
    for argument, value in arguments.items():
        if argument in ("dropout_seed", "dropout_offset") and without_dropout:
            continue
        does_nothing = value is None or (isinstance(value, int | float) and not value)
        if argument == "scale" or argument in takes or does_nothing:
            continue
        shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"attention: {argument} must be left out with implementation {name!r}, got {shown}; "
            f"it takes {', '.join(takes)}"
        )


def _refuse_trained_bias(name: str, peer: Peer, arguments: MaskArguments) -> None:
    """Raise ValueError where a gradient of attn_mask is wanted that the peer would not give."""
    bias = arguments.get("attn_mask")
    if bias is None or peer.bias_gradient or not torch.is_grad_enabled():
        return
    require(
        not bias.requires_grad,
        "attention: attn_mask",
        f"without gradient with implementation {name!r}",
        "requires_grad=True",
        "detach it, or take sdpa:math, flash, baseline or golden, which give it one",
    )


def _call_own(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    function = _imported(name)
    require(
        q.dim() == 4,
        "attention: q",
        f"(batch, heads, length, head_dim) with {name!r}",
        tuple(q.shape),
        "it takes no cu_seqlens",
    )
    _check_signature(name, function, options)
    out = function(q, k, v, **options)
    got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    require(
        got == (*q.shape[:3], v.shape[3]),
        f"attention: what {name!r} returns",
        f"a tensor shaped as q {(*q.shape[:3], v.shape[3])}",
        got,
        "return out alone, (batch, heads, query_len, head_dim of v)",
    )
    return out


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"attention: implementation must be MODULE:FUNCTION of a module that imports, got "
            f"{name!r}; {error}"
        ) from error
    near = difflib.get_close_matches(attribute, dir(module), n=3, cutoff=0.4)
    require(
        callable(getattr(module, attribute, None)),
        "attention: implementation",
        "MODULE:FUNCTION of a function that the module has",
        repr(name),
        f"nearest: {', '.join(near)}" if near else f"{module_name} has nothing like it",
    )
    return getattr(module, attribute)


def _check_signature(name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin does not tell
    try:
        signature.bind(None, None, None, **options)
    except TypeError as error:
        raise ValueError(
            f"attention: implementation must be a function of (q, k, v, *, causal, scale), got "
            f"{name!r} of {signature}; {error}"
        ) from error
