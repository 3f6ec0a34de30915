"""PyTorch's scaled_dot_product_attention with one backend and no other.

Its `is_causal` is aligned to the top left, so it is used only where both lengths agree; every other
mask becomes an explicit one, which the backend takes or refuses. A row that attends nothing would
be NaN in one backend and the mean of v in another. So the mask of such a row is opened, and its
output, and with it its gradient, is set to 0. Bias and ALiBi are added in FP32 (FP64 for FP64
inputs), but the efficient and cuDNN backends want them in q's dtype, and there they are rounded to
it. SDPA has no softcap and no packed sequences. Which arguments may be asked for is `registry`'s.

API: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_kernels.checks import PeerRefusalError
from attention_kernels.masks import Mask

__all__ = ["BACKENDS", "attend", "status"]

BACKENDS = {
    "sdpa:math": SDPBackend.MATH,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
}
_CHECKS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
}
_BIAS_IN_INPUT_DTYPE = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_NO_BACKEND = ("No viable backend", "No available kernel")


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, backend: SDPBackend
) -> Tensor:
    """Return out, shaped and typed as q; PeerRefusalError if the backend does not take it."""
    is_causal, attn_mask, empty = False, None, None
    plain = mask.window == (None, None) and mask.key_padding is None and mask.visible is None
    plain = plain and mask.bias is None and mask.alibi_slopes is None
    if plain and mask.causal and q.shape[2] == k.shape[2]:
        is_causal = True
    else:
        attn_mask, empty = _explicit(q, k, mask, backend)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        reason = _refusal(q, k, v, attn_mask, is_causal, grouped, backend)
        if reason:
            raise PeerRefusalError(reason)
        try:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
            )
        except RuntimeError as error:
            if not str(error).startswith(_NO_BACKEND):
                raise
            reason = f"PyTorch has no such kernel for it on {q.device.type}"
            raise PeerRefusalError(reason) from error
    return out if empty is None else out.masked_fill(empty, 0.0)


def _explicit(
    q: Tensor, k: Tensor, mask: Mask, backend: SDPBackend
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask that SDPA takes and, true where a row attends nothing, `(..., rows, 1)`."""
    sizes = (q.shape[2], k.shape[2])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    narrow = q.is_cuda and backend in _BIAS_IN_INPUT_DTYPE
    tile = (range(sizes[0]), range(sizes[1]), *sizes)
    hidden = mask.hidden(*tile, q.device)
    added = mask.added(*tile, wide, q.device)
    if added is not None:
        lost = added == -torch.inf
        hidden = lost if hidden is None else hidden | lost
    if hidden is None:
        return None, None
    empty = hidden.all(dim=-1, keepdim=True)
    if added is None:
        made = ~hidden | empty
    else:
        made = added.masked_fill(hidden, -torch.inf).masked_fill(empty, 0.0)
        made = made.to(q.dtype) if narrow else made
    return made.expand(*made.shape[:-2], *sizes), empty


def _refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    grouped: bool,
    backend: SDPBackend,
) -> str:
    """Return why the backend does not take this call on CUDA, in PyTorch's words, or ""."""
    if not q.is_cuda or backend not in _CHECKS:
        return ""
    call = torch.backends.cuda.SDPAParams(q, k, v, attn_mask, 0.0, is_causal, grouped)
    check = _CHECKS[backend]
    if check(call, False):
        return ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(call, True)
    reasons = [str(warning.message).split(" (Triggered")[0] for warning in said]
    return "; ".join(reasons) or "PyTorch does not say why"


def status(device: torch.device, backend: SDPBackend) -> tuple[str, bool, str]:
    """Return version, whether a tiny real call succeeds on `device`, and what it says if not."""
    version = torch.__version__
    if backend == SDPBackend.CUDNN_ATTENTION and torch.backends.cudnn.version():
        version += f", cuDNN {torch.backends.cudnn.version()}"
    try:
        x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
        attend(x, x, x, mask=Mask(causal=True), scale=1.0, backend=backend)
    except (RuntimeError, AssertionError) as error:
        return version, False, str(error).splitlines()[0]
    return version, True, ""
