"""A call that the probe has caught and not yet compared: its tensors, and what others made of it.

Leaves out who fills it and what is compared (`probe`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from stability.probe.captured_call import AttentionCall, Primary

__all__ = ["Pending"]


@dataclass(kw_only=True, slots=True)
class Pending:
    """One layer's call between its forward and its backward.

    The tensors of `call` are detached, in the dtype that the primary computes in. They share memory
    with the run's own, which the run's backward keeps as well; `was_overwritten` tells if that
    changed.
    """

    call: AttentionCall
    primary: Primary
    out: Tensor
    lse: Tensor | None
    seen: bool = False
    shadows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Results by name of the shadow, then by what they are."""
    golden: dict[str, Tensor] = field(default_factory=dict)
    _watched: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        primary: Primary,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
    ) -> "Pending":
        """Return `call`, made on `qkv`, with its own result, to be compared later."""
        own = [x.detach() for x in (*qkv, out)]
        q, k, v = (x.to(call.dtype or x.dtype) for x in own[:3])
        return cls(
            call=replace(call, q=q, k=k, v=v),
            primary=primary,
            out=own[3],
            lse=None if lse is None else lse.detach(),
            _watched=[(x, x._version) for x in own],
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
        """Which rows of one head are no padding, `(batch, 1, length)`; None if all are."""
        return None if self.call.valid is None else self.call.valid[:, None, :]

    def was_overwritten(self) -> bool:
        """Whether the run has written into one of the tensors since."""
        return any(x._version != version for x, version in self._watched)

    def forget_forward(self) -> None:
        """Drop all but the gradients of the others, which wait for the run's own."""
        nothing = self.out.new_empty(0)
        self.call = replace(self.call, q=nothing, k=nothing, v=nothing)
        self.out, self.lse = nothing, None
        self._watched.clear()
        self.forget("out")
        self.forget("lse")

    def forget(self, what: str) -> None:
        """Drop a result that has been compared."""
        for results in (*self.shadows.values(), self.golden):
            results.pop(what, None)
