"""An attention call of a model: as it was made, and as the probe holds it until it is compared.

Leaves out how calls are caught (`intercept`) and what is compared (`attention_probe`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.probe.autocast import product_dtypes, rounded_as
from stability.probe.isolation import isolated

__all__ = [
    "AttentionCall",
    "BoundAttention",
    "CallHandler",
    "CapturedCall",
    "Interceptor",
    "add_bias",
    "as_computed",
    "ask_computed",
    "dtype_not_told",
    "in_dtype_of_q",
    "is_repeating",
    "repeating",
    "valid_rows",
    "version_of",
]

_LOWEST = -1e4
"""An additive mask below this hides a key: models add the lowest number of some dtype there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The inputs of one call; q `(batch, heads, query_len, head_dim)`, k and v with kv_heads.

    `mask` is what `flash_attention` takes besides q, k and v. `valid`, bool `(batch, query_len)`,
    is false for query rows that are padding; None means that none are. `dtype` is the one in which
    the model's attention computes, where autocast makes it differ from q's; `lowered_to` the one to
    which autocast converts q, k, v and an additive mask at the call itself, as it does at SDPA's,
    None if it does not or if nobody knows. `unsupported` names what the golden and the shadows
    cannot do, e.g. "dropout_p 0.1"; such a call is not compared, and becomes a finding. `trains` is
    false for a call of an evaluation.

    `trained` holds what of the mask has a gradient that can be compared, as the model gave it:
    "bias", a floating one that is added to the scores, and "sinks". A primary takes others in their
    place by these names. `mask` has them too, the bias as part of `attn_mask`; `hides` is what that
    holds beside it, None if nothing. `rounding` is what an attention that rounds stochastically
    draws by (`rounding_keys`).
    """

    layer: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskArguments = field(default_factory=MaskArguments)
    valid: Tensor | None = None
    dtype: torch.dtype | None = None
    unsupported: str = ""
    trains: bool = True
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    hides: Tensor | None = None
    lowered_to: torch.dtype | None = None
    rounding: Mapping[str, Any] = field(default_factory=dict)

    def mask_with(self, **trained: Tensor) -> MaskArguments:
        """Return the mask with other tensors in the place of those of `trained` that are given.

        An additive mask has the values that the model's own attention gets, as autocast rounds it.
        """
        mask = self.mask.copy()
        if "bias" in trained:
            mask["attn_mask"] = add_bias(self.hides, trained["bias"])
        if "sinks" in trained:
            mask["sinks"] = trained["sinks"]
        added = mask.get("attn_mask")
        if self.lowered_to is not None and added is not None and added.dtype.is_floating_point:
            mask["attn_mask"] = rounded_as(added, self.lowered_to)
        return mask


def add_bias(hides: Tensor | None, bias: Tensor) -> Tensor:
    """Return one mask for a bias and a mask, bool or added, that hides keys beside it."""
    if hides is None:
        return bias
    if hides.dtype == torch.bool:
        return bias.masked_fill(~hides, -torch.inf)
    return bias + hides


BoundAttention = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention with one call's mask and options bound. It takes q, k and v, and by name what stands
for the tensors of `AttentionCall.trained`. It returns out, shaped as q, and the LSE, or None where
the implementation does not give one."""


def as_computed(call: AttentionCall, out: Tensor, inputs: Sequence[Tensor]) -> AttentionCall | None:
    """Return a call with the dtype in which the model's attention has computed `out`.

    One that is written by hand may switch autocast off inside: it then gets q, k and v as they are,
    and is not to be compared with what rounds them. None if autograd does not tell.
    """
    if call.dtype is None or call.lowered_to is not None:
        return call
    dtypes = product_dtypes(out, inputs)
    if dtypes:
        return call if call.dtype in dtypes else replace(call, dtype=None)
    return call if out.dtype == call.dtype else None


def ask_computed(call: AttentionCall, primary: BoundAttention) -> AttentionCall | None:
    """Return the same before the call is made, by making it on the side, where that is needed."""
    if call.dtype is None or call.lowered_to is not None:
        return call
    # views: of leaves autocast would keep what it converts
    leaves = [x.detach().requires_grad_().view_as(x) for x in (call.q, call.k, call.v)]
    autocast = torch.autocast(call.q.device.type, dtype=call.dtype)
    with repeating(), isolated(call.q.device), torch.enable_grad(), autocast:
        return as_computed(call, primary(*leaves)[0], leaves)


def dtype_not_told(call: AttentionCall) -> str:
    """Return the finding about a call for which that gave None: it is compared as it is."""
    return (
        f"taken to compute in {call.dtype}, to which autocast lowers products: whether this "
        "attention switches it off inside is not seen without a graph of its products; give it "
        "inputs of the dtype in which it computes"
    )


CallHandler = Callable[[AttentionCall, BoundAttention], Tensor]
"""Is given each call with the attention that the model would use, the primary, and returns out.
To leave the call alone it returns `primary(call.q, call.k, call.v)[0]`."""

Interceptor = Callable[[nn.Module, CallHandler], AbstractContextManager[None]]
"""Gives a context in which each attention call of the model goes through the handler."""


def in_dtype_of_q(mask: Tensor | None, called: Tensor, q: Tensor) -> Tensor | None:
    """Return a mask of a call's in the dtype of `q`, if it had that of the q it was `called` with.

    In a model that was widened, whose attention alone is to round, q comes narrower than its mask.
    """
    follows = mask is not None and mask.dtype == called.dtype != q.dtype
    return mask.to(q.dtype) if mask is not None and follows else mask


class _Repeating(local):
    depth = 0


_REPEATING = _Repeating()


@contextmanager
def repeating() -> Iterator[None]:
    """Inside, this thread repeats a call: the attention calls it makes are none of the model's."""
    _REPEATING.depth += 1
    try:
        yield
    finally:
        _REPEATING.depth -= 1


def is_repeating() -> bool:
    """Whether this thread is inside `repeating`."""
    return _REPEATING.depth > 0


def valid_rows(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return which query rows are not padding, bool `(batch, query_len)`; None if any row may be.

    In self-attention a padded token is a key that no query of its sequence may attend. `attn_mask`
    is bool, true where a key may be attended, or is added to the scores, and broadcasts to
    `(batch, heads, query_len, key_len)`. Nothing here synchronises with the device.
    """
    # with other numbers of queries and keys, key i is not query i's own token
    if attn_mask is None or q.shape[2] != k.shape[2] or attn_mask.dim() < 2:
        return None
    visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask > _LOWEST
    attended = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    attended = attended.any(dim=2).any(dim=1)  # (batch or 1, key_len or 1)
    return attended.expand(q.shape[0], q.shape[2])


def version_of(x: Tensor) -> int:
    """Return how often `x` was written to; -1 for an inference tensor, which can't tell."""
    return -1 if x.is_inference() else x._version


@dataclass(kw_only=True, slots=True)
class CapturedCall:
    """One captured attention call: its tensors, plus the shadow and golden results to compare.

    It lives from the layer's forward to its backward. The tensors of `call` are detached, in the
    dtype in which the primary computes. They share memory with the run's own, which autograd keeps
    for the backward anyway, so capturing costs no memory; `was_overwritten` tells if that memory
    has changed since.
    """

    call: AttentionCall
    primary: BoundAttention
    out: Tensor
    lse: Tensor | None
    seen: bool = False
    """Whether shadows and golden have been run."""
    in_second_forward: bool = False
    """Whether a second forward pass has made the call again."""
    awaited: set[str] = field(default_factory=set)
    """The gradients that the backward pass has still to bring: of dq, dk, dv, dbias, dsinks."""
    lse_is_trained: bool = False
    """Whether the loss takes the LSE, too: dq and dk then have what that gives to them."""
    shadows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Results still to be compared, by shadow and then by name: out, lse and the gradients."""
    golden: dict[str, Tensor] = field(default_factory=dict)
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        primary: BoundAttention,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
    ) -> "CapturedCall":
        """Capture `call`, made on `qkv`, with the primary's result."""
        # detached tensors share memory and version counter with the run's, and hold no graph
        tensors = [x.detach() for x in (*qkv, out)]
        q, k, v = (x.to(call.dtype or x.dtype) for x in tensors[:3])
        trained = {name: x.detach() for name, x in call.trained.items()}
        tensors += trained.values()
        return cls(
            call=replace(call, q=q, k=k, v=v, mask=_detached(call.mask), trained=trained),
            primary=primary,
            out=tensors[3],
            lse=None if lse is None else lse.detach(),
            _versions=[(x, version_of(x)) for x in tensors],
        )

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.call.layer

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs."""
        return self.call.q, self.call.k, self.call.v

    @property
    def valid(self) -> Tensor | None:
        """Which rows of a head are not padding, `(batch, 1, query_len)`; None if all."""
        return None if self.call.valid is None else self.call.valid[:, None, :]

    def was_overwritten(self) -> bool:
        """Whether the run has written into one of the tensors since the call.

        Detached tensors share torch's version counter with the run's own.
        """
        return any(version_of(x) != version for x, version in self._versions)

    def forget_forward(self) -> None:
        """Free everything but the gradients of shadows and golden, which wait for the run's own."""
        # empty tensors in their place, so that the fields keep their types
        nothing = self.out.new_empty(0)
        self.call = replace(self.call, q=nothing, k=nothing, v=nothing, trained={})
        self.out, self.lse = nothing, None
        # it may hold the call's results, and so the graph whose hooks hold this
        self.primary = _forgotten
        self._versions.clear()
        self.forget("out")
        self.forget("lse")

    def forget(self, what: str) -> None:
        """Free a result that has been compared."""
        for results in (*self.shadows.values(), self.golden):
            results.pop(what, None)


def _forgotten(*_: Tensor, **__: Tensor) -> tuple[Tensor, Tensor | None]:
    raise RuntimeError("a call that has been compared is not made again")


def _detached(mask: MaskArguments) -> MaskArguments:
    detached = mask.copy()
    for name, x in mask.items():
        detached[name] = x.detach() if isinstance(x, Tensor) else x
    return detached
