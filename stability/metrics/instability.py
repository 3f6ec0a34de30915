"""Signs of instability in a training run, and the thresholds past which one is worth an alert.

What is watched. The norm of all gradients; RMS_t, the size of a gradient in units of Adam's own
estimate of it (where it is large, a loss spike follows 1 to 8 steps later: arXiv 2304.13013); log Z
of the output logits and the largest attention logit (arXiv 2309.14322); spikes of the loss;
gradients that are no numbers. The measures of tensors return FP64 scalars on the tensors' device
and do not wait for it, so a caller gathers them and transfers once.

Which thresholds. Only what can be checked at its source, or needs no source: "all points with
attention logits above 1e4 diverged" (arXiv 2309.14322), NaN and infinity by definition, and our own
rule for a loss spike, which is called ours wherever it is shown. RMS_t has none: it passes 2 in
sound runs too, so it is logged for the reader to judge, as the gradient norm, log Z and entropy
are.

Leaves out what is watched inside attention (`inside_attention`), and who is told.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "LOSS_SPIKE_DEVIATIONS",
    "THRESHOLDS",
    "Crossing",
    "LossSpikes",
    "Threshold",
    "count_nonfinite",
    "crossings",
    "gradient_norm",
    "log_z",
    "rms_ratio",
]

LOSS_SPIKE_DEVIATIONS = 3.2
"""How many standard deviations above its mean a loss counts as a spike."""

_POSITIONS = 4096
"""Positions that `log_z` widens at a time: 0.8 GB in FP32 for 50,000 logits each."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all `gradients` together, squares summed in FP64, so none overflows.

    ValueError without a gradient.
    """
    _require_some("gradient_norm", gradients)
    # the square of an FP32 gradient above 1.8e19 overflows in FP32
    norms = [torch.linalg.vector_norm(g.detach(), dtype=torch.float64) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return how many values of all `tensors` are NaN or infinite. ValueError without a tensor."""
    _require_some("count_nonfinite", tensors)
    return torch.stack([(~torch.isfinite(x)).sum() for x in tensors]).sum().double()


def rms_ratio(
    grad: Tensor, exp_avg_sq: Tensor, *, step: int | Tensor, beta2: float, eps: float
) -> Tensor:
    """Return RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of one tensor (arXiv 2304.13013).

    `exp_avg_sq` is Adam's running mean of g^2, this gradient included, after `step` updates (from
    1; a 0-d tensor as in the optimizer's state will do); v is that divided by 1 - beta2^step. 1
    means that v is up to date with the gradients; it is at most sqrt((1 - beta2^step) / (1 -
    beta2)). ValueError unless both have one shape.
    """
    if grad.shape != exp_avg_sq.shape:
        raise ValueError(
            f"rms_ratio: exp_avg_sq must have the shape of grad {tuple(grad.shape)}, got "
            f"{tuple(exp_avg_sq.shape)}; pass the state of the same parameter"
        )
    updates = step.double() if isinstance(step, Tensor) else step
    v = exp_avg_sq.detach().double() / (1 - beta2**updates)
    return (grad.detach().double().square() / v.clamp_(min=eps**2)).mean().sqrt()


def log_z(logits: Tensor) -> Tensor:
    """Return the mean over positions of log(sum(exp(logits))), natural log.

    `logits` are `(..., vocab)`, and widened to FP32 if they are narrower. ValueError for a tensor
    with no dimension.
    """
    if logits.dim() == 0:
        raise ValueError("log_z: logits must be (..., vocab), got a 0-d tensor; pass the logits")
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.detach().reshape(-1, logits.shape[-1])
    sums = [part.to(wide).logsumexp(-1).double().sum() for part in rows.split(_POSITIONS)]
    return torch.stack(sums).sum() / len(rows)


class LossSpikes:
    """Tells whether a loss stands out: above mean + `deviations` * std of the `window` before it.

    The window of 50 and the deviations of `LOSS_SPIKE_DEVIATIONS` are ours, no published ones.
    Nothing is a spike until the window is full. std is that of the window itself (divided by its
    length). A loss that is not finite is a spike, and stays out of the window. ValueError for a
    window below 2 or deviations that are not positive.
    """

    def __init__(self, deviations: float, window: int = 50) -> None:
        if window < 2:
            raise ValueError(
                f"LossSpikes: window must be >= 2, got {window}; one loss has no deviation"
            )
        if not deviations > 0:
            raise ValueError(f"LossSpikes: deviations must be > 0, got {deviations}; try 3.2")
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=window)

    def update(self, loss: float) -> bool:
        """Take in the next step's loss and return whether it is a spike."""
        if not math.isfinite(loss):
            return True
        spike = len(self._losses) == self._losses.maxlen and loss > self._limit()
        self._losses.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """Return the window, oldest loss first."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the window of a checkpoint."""
        self._losses = deque(state_dict["losses"], maxlen=self._losses.maxlen)

    def _limit(self) -> float:
        mean = _mean(self._losses)
        variance = _mean((loss - mean) ** 2 for loss in self._losses)
        return mean + self._deviations * math.sqrt(variance)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _require_some(function: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError(f"{function}: must be given a tensor, got none; leave the figure out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A limit on every metric whose whole name matches `pattern`.

    The pattern's group `layer`, if it has one, is the layer or parameter that the name speaks of.
    """

    pattern: str
    relation: Literal[">", ">="]
    limit: float
    meaning: str
    """What it means to be past the limit, in a few words."""
    source: str

    def is_past(self, value: float) -> bool:
        """Whether `value` is past the limit; NaN never is: non-finite values are counted apart."""
        return value >= self.limit if self.relation == ">=" else value > self.limit


THRESHOLDS = (
    Threshold(
        pattern=r"watch/(?P<layer>[^/]+)/(?:[^/]+/)?max_logit",
        relation=">",
        limit=1e4,
        meaning="attention logits of runs that diverge",
        source="arXiv 2309.14322",
    ),
    Threshold(
        pattern=r"watch/loss_spike",
        relation=">",
        limit=0.0,
        meaning=f"loss above its running mean by {LOSS_SPIKE_DEVIATIONS} standard deviations",
        source="our rule",
    ),
    Threshold(
        pattern=r"watch/nonfinite_gradients",
        relation=">",
        limit=0.0,
        meaning="NaN or infinity in the gradients",
        source="by definition",
    ),
)


class Crossing(NamedTuple):
    """The metrics that got past one threshold together."""

    threshold: Threshold
    values: dict[str, float]
    """By name, the largest first; never empty."""

    @property
    def layer(self) -> str:
        """The layer or parameter of the largest value, "" if it is the whole run's."""
        found = re.fullmatch(self.threshold.pattern, next(iter(self.values)))
        return (found.groupdict() if found else {}).get("layer", "")

    @property
    def text(self) -> str:
        """What happened, in one line."""
        (name, value), *others = self.values.items()
        more = f", and {len(others)} more" if others else ""
        rule = f"{self.threshold.relation} {self.threshold.limit:g}, {self.threshold.source}"
        return f"{name} = {value:.4g}{more} ({rule}): {self.threshold.meaning}"


def crossings(
    metrics: Mapping[str, float],
    previous: Mapping[str, float],
    thresholds: Sequence[Threshold] = THRESHOLDS,
) -> list[Crossing]:
    """Return the thresholds that metrics are past now and were not past before.

    `previous` holds the last value of each metric that was ever measured: the caller goes on with
    `{**previous, **metrics}`, and a name that is not in it counts as not past. Metrics that cross
    one threshold at once make one crossing.
    """
    found = []
    for threshold in thresholds:
        crossed = {
            name: value
            for name, value in metrics.items()
            if re.fullmatch(threshold.pattern, name)
            and threshold.is_past(value)
            and not (name in previous and threshold.is_past(previous[name]))
        }
        if crossed:
            largest_first = sorted(crossed.items(), key=lambda item: -item[1])
            found.append(Crossing(threshold, dict(largest_first)))
    return found
