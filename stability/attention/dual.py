"""The dual-attention hook: the primary decides the run, a shadow and a golden only look.

At a probed step each attention call is repeated on the very same q, k, v, detached and without
gradient, and compared as `metrics.deviation` says. Nothing leaves the device until `collect`, which
transfers the numbers of all layers at once. Leaves out gradients, per-head figures, and when to
probe (`schedule`, `callbacks.deviation_probe`).

The deviation is always candidate minus baseline: its sign means the same in every arm, whichever of
the two is the primary.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_kernels import AttentionFn, golden_attention
from attention_kernels.choices import input_format
from stability.metrics.deviation import (
    DEVIATION_METRICS,
    GOLDEN_METRICS,
    deviation_tensor,
    golden_tensor,
)
from stability.records.names import deviation_name

__all__ = ["AttentionProbe", "DualAttention"]


@dataclass(kw_only=True, slots=True)
class AttentionProbe:
    """What the layers of one model share: the shadow, the golden, and the numbers of this step."""

    shadow: AttentionFn
    shadow_is_candidate: bool
    golden: bool
    active: bool = False
    _rows: dict[str, Tensor] = field(default_factory=dict)

    def observe(
        self,
        layer: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        causal: bool,
        scale: float | None,
    ) -> None:
        """Compare `out` with the shadow on the same inputs; once per layer until `collect`.

        With gradient accumulation the first micro-batch of a step is the one observed.
        """
        if layer in self._rows:
            return
        with torch.no_grad():
            q, k, v, out = q.detach(), k.detach(), v.detach(), out.detach()
            shadow = self.shadow(q, k, v, causal=causal, scale=scale)
            candidate, baseline = (shadow, out) if self.shadow_is_candidate else (out, shadow)
            row = deviation_tensor(candidate, baseline, output_format=input_format(out.dtype))
            if self.golden:
                golden = golden_attention(q, k, v, causal=causal, scale=scale)
                row = torch.cat([row, golden_tensor(candidate, baseline, golden)])
            self._rows[layer] = row

    def collect(self) -> dict[str, float]:
        """Return this step's deviations by metric name, and forget them: one transfer for all."""
        if not self._rows:
            return {}
        layers = list(self._rows)
        table = torch.stack([self._rows[layer] for layer in layers]).cpu().tolist()
        self._rows.clear()
        metrics = (*DEVIATION_METRICS, *GOLDEN_METRICS) if self.golden else DEVIATION_METRICS
        return {
            deviation_name(layer, "out", metric): value
            for layer, values in zip(layers, table, strict=True)
            for metric, value in zip(metrics, values, strict=True)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DualAttention:
    """The attention of one layer: an `AttentionFn` that shows its inputs to the probe."""

    layer: str
    primary: AttentionFn
    probe: AttentionProbe

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """Return the primary's result, untouched."""
        out = self.primary(q, k, v, causal=causal, scale=scale)
        if self.probe.active:
            self.probe.observe(self.layer, q, k, v, out, causal=causal, scale=scale)
        return out
