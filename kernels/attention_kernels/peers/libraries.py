"""The attention libraries outside of PyTorch: FlashAttention 2, 3 and 4, and FlashInfer.

All of them are optional. They take `(batch, length, heads, head_dim)`, packed `(tokens, heads,
head_dim)`, and align causal masks and windows bottom-right, as we do. FlashAttention gives 0 where
a row attends nothing; FlashInfer's backends differ, so such rows are set to 0 here. FlashInfer has
no backward. Which arguments may be asked for is `registry`'s.

APIs: flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py of github.com/Dao-AILab/flash-attention;
docs.flashinfer.ai/api/prefill.html (BatchPrefillWithRaggedKVCacheWrapper).
"""

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels.checks import PeerRefusalError
from attention_kernels.masks import Mask

__all__ = ["LIBRARIES", "Library", "attend_flash", "attend_flashinfer", "status"]

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends for its split-k sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """Where a library is, and the compute capabilities (major) that its kernels are built for."""

    module: str
    attribute: str
    distributions: tuple[str, ...]
    majors: tuple[int, ...]
    no_window: int | None = -1
    """How it writes the side of a window that has no bound."""
    takes_alibi: bool = False


LIBRARIES = {
    "flash_attn2": Library(
        module="flash_attn",
        attribute="flash_attn_func",
        distributions=("flash_attn", "flash-attn"),
        majors=(8, 9, 10, 11, 12),
        takes_alibi=True,
    ),
    "flash_attn3": Library(
        module="flash_attn_interface",
        attribute="flash_attn_func",
        distributions=("flash_attn_3", "flashattn-hopper"),
        majors=(8, 9),
    ),
    "flash_attn4": Library(
        module="flash_attn.cute",
        attribute="flash_attn_func",
        distributions=("flash-attn-4",),
        majors=(9, 10, 11),
        no_window=None,
    ),
    "flashinfer": Library(
        module="flashinfer",
        attribute="BatchPrefillWithRaggedKVCacheWrapper",
        distributions=("flashinfer-python", "flashinfer"),
        majors=(8, 9, 10, 11, 12),
    ),
}


def device_problem(library: Library, device: torch.device) -> str:
    """Return why the library cannot run on `device`, or ""."""
    if device.type != "cuda":
        return f"runs on CUDA only, not on {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in library.majors:
        built = ", ".join(f"{m}.x" for m in library.majors)
        return f"built for compute capability {built}, the device has {major}.{minor}"
    return ""


def load(name: str, device: torch.device) -> Any:
    """Return the library's module; PeerRefusalError if it is not installed or cannot run."""
    library = LIBRARIES[name]
    try:
        # optional dependency: only this call needs it
        module = importlib.import_module(library.module)
        getattr(module, library.attribute)
    except ModuleNotFoundError as error:
        raise PeerRefusalError(f"{library.module} is not installed") from error
    except Exception as error:  # a library built for another torch fails in its own ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PeerRefusalError(f"{library.module} fails to import: {reason}") from error
    problem = device_problem(library, device)
    if problem:
        raise PeerRefusalError(problem)
    return module


def attend_flash(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, name: str) -> Tensor:
    """Return out of FlashAttention 2, 3 or 4, shaped and typed as q."""
    library, module = LIBRARIES[name], load(name, q.device)
    left, right = (library.no_window if side is None else side for side in mask.window)
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": mask.causal,
        "window_size": (left, right),
    }
    if mask.softcap:
        options["softcap"] = mask.softcap
    if mask.alibi_slopes is not None:
        slopes = mask.alibi_slopes.float()  # the libraries take no other dtype
        options["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        out = module.flash_attn_func(*tensors, **options)
    else:
        out = module.flash_attn_varlen_func(
            *(x.squeeze(0) for x in tensors),
            cu_seqlens_q=mask.cu_seqlens_q,
            cu_seqlens_k=mask.cu_seqlens_k,
            max_seqlen_q=int(mask.cu_seqlens_q.diff().max()),
            max_seqlen_k=int(mask.cu_seqlens_k.diff().max()),
            **options,
        )
    # versions differ in whether lse comes along unasked
    out = out[0] if isinstance(out, tuple) else out
    return (out.unsqueeze(0) if out.dim() == 3 else out).transpose(1, 2)


def attend_flashinfer(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    """Return out of FlashInfer, shaped and typed as q; PeerRefusalError if a gradient is due."""
    load("flashinfer", q.device)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise PeerRefusalError("FlashInfer has no backward; call it under torch.no_grad()")
    if v.shape[3] != q.shape[3]:
        raise PeerRefusalError("FlashInfer is planned for a head_dim of v that is q's")
    left, right = mask.window
    if right is not None and not (mask.causal or right == 0):
        raise PeerRefusalError("FlashInfer's window has a left side only")
    starts_q, starts_k = _starts(q, mask.cu_seqlens_q), _starts(k, mask.cu_seqlens_k)
    wrapper = _planned(
        starts_q,
        starts_k,
        q.shape[1],
        k.shape[1],
        q.shape[3],
        mask.causal or right == 0,
        -1 if left is None else left,
        mask.softcap,
        scale,
        q.dtype,
        q.device,
    )
    rows = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))
    out = wrapper.run(*rows)
    out = _zeroed(out, starts_q, starts_k, mask.causal or right == 0)
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _starts(x: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if offsets is not None:
        return tuple(offsets.tolist())
    return tuple(range(0, (x.shape[0] + 1) * x.shape[2], x.shape[2]))


# One plan is cached: making it costs more than a small attention, and a loop repeats its shapes.
@functools.lru_cache(maxsize=1)
def _planned(
    starts_q: tuple[int, ...],
    starts_k: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    window_left: int,
    softcap: float,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    module = load("flashinfer", device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.tensor(starts_q, dtype=torch.int32, device=device),
        torch.tensor(starts_k, dtype=torch.int32, device=device),
        heads,
        kv_heads,
        head_dim,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=softcap,
        sm_scale=scale,
        q_data_type=dtype,
    )
    return wrapper


def _zeroed(
    out: Tensor, starts_q: tuple[int, ...], starts_k: tuple[int, ...], causal: bool
) -> Tensor:
    """Set to 0 the rows that attend nothing: a sequence without keys, or those before its keys."""
    for index, first in enumerate(starts_q[:-1]):
        rows, keys = (s[index + 1] - s[index] for s in (starts_q, starts_k))
        empty = max(0, rows - keys) if causal else rows * (keys == 0)
        out[first : first + empty] = 0.0
    return out


def status(name: str, device: torch.device) -> tuple[str, bool, str]:
    """Return version, whether the library runs on `device`, and why not."""
    try:
        load(name, device)
    except PeerRefusalError as error:
        return _version(name), False, str(error)
    note = "forward only" if name == "flashinfer" else ""
    return _version(name), True, note


def _version(name: str) -> str:
    for distribution in LIBRARIES[name].distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
