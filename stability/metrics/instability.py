"""Signs of instability in a training run, and the thresholds past which one is worth an alert.

What is watched: the norm of all gradients; RMS_t, the size of a gradient in units of Adam's own
estimate of it (where it is large, a loss spike follows 1 to 8 steps later: arXiv 2304.13013); log Z
of the output logits and the largest attention logit (arXiv 2309.14322); spikes of the loss; and NaN
or infinity in the gradients. Functions of tensors return FP64 scalars on the tensors' device
without synchronising, so a caller can gather a step's values and transfer them at once.

Which thresholds: only those that can be checked at their source, or need none. "All points with
attention logits above 1e4 diverged" (arXiv 2309.14322); NaN and infinity are wrong by definition;
the rule for a loss spike is our own, and is called so wherever it is shown. RMS_t has no threshold,
since it passes 2 in sound runs too: like the gradient norm, log Z and entropy it is only logged,
for the reader to judge.

Leaves out what is computed inside attention (`inside_attention`), and who receives an alert.
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
"""A loss is a spike if it is more than so many standard deviations above the mean before it."""

_POSITIONS = 4096
"""How many positions `log_z` widens to FP32 at a time: 0.8 GB for a vocabulary of 50,000."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all `gradients` as one vector, in FP64. ValueError if there is none."""
    _require_some("gradient_norm", gradients)
    # the square of an FP32 gradient above 1.8e19 overflows in FP32
    norms = [torch.linalg.vector_norm(g.detach(), dtype=torch.float64) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Count the NaN and infinite values in all `tensors`. ValueError if there is no tensor."""
    _require_some("count_nonfinite", tensors)
    # FP64 as every other figure, so that one tensor takes them to the host; exact up to 2^53
    return torch.stack([(~torch.isfinite(x)).sum() for x in tensors]).sum().double()


def rms_ratio(
    grad: Tensor, exp_avg_sq: Tensor, *, step: int | Tensor, beta2: float, eps: float
) -> Tensor:
    """Return RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of one tensor (arXiv 2304.13013).

    g is `grad`. `exp_avg_sq` is Adam's running mean of g^2 after `step` updates, this gradient's
    among them, so `step` is at least 1; it may be a 0-d tensor, as in torch's optimizer state. v is
    `exp_avg_sq` without its bias towards 0, i.e. divided by 1 - beta2^step. RMS_t is 1 where v
    matches the present gradients, larger where v lags behind their growth, and at most
    sqrt((1 - beta2^step) / (1 - beta2)). ValueError unless `grad` and `exp_avg_sq` have one shape.
    """
    if grad.shape != exp_avg_sq.shape:
        raise ValueError(
            f"rms_ratio: exp_avg_sq must have the shape of grad {tuple(grad.shape)}, got "
            f"{tuple(exp_avg_sq.shape)}; pass the state of the same parameter"
        )
    # a tensor step would make beta2^step FP32, where 1 - 0.999 is off by up to 3e-5 of itself
    updates = step.double() if isinstance(step, Tensor) else step
    v = exp_avg_sq.detach().double() / (1 - beta2**updates)
    # a weight that has had no gradient yet has v = 0: eps^2 keeps 0 / 0 out of the mean
    return (grad.detach().double().square() / v.clamp_(min=eps**2)).mean().sqrt()


def log_z(logits: Tensor) -> Tensor:
    """Return log Z = log(sum(exp(logits))), natural log, averaged over all positions.

    `logits` have the shape `(..., vocab)`; a dtype narrower than FP32 is widened to FP32.
    ValueError for a 0-d tensor.
    """
    if logits.dim() == 0:
        raise ValueError("log_z: logits must be (..., vocab), got a 0-d tensor; pass the logits")
    # log Z of 50,000 equal logits lies 10.8 above them, where BF16 has a spacing of 1/16
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.detach().reshape(-1, logits.shape[-1])
    sums = [part.to(wide).logsumexp(-1).double().sum() for part in rows.split(_POSITIONS)]
    return torch.stack(sums).sum() / len(rows)


class LossSpikes:
    """Tells whether a loss is a spike: above mean + `deviations` * std of the losses before it.

    Mean and std are over the last `window` finite losses; std divides by their number. A finite
    loss is no spike until the window is full. A spike enters the window too, so a new level of the
    loss stops being one; a loss that is not finite is always a spike and never enters. The window
    of 50 and `LOSS_SPIKE_DEVIATIONS` are our choice, not published values. ValueError for a window
    below 2 or deviations that are not positive.
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
        """Add the next step's loss and return whether it is a spike."""
        # in the window it would make the limit NaN, which no loss exceeds
        if not math.isfinite(loss):
            return True
        # before it enters the window: a spike inside would raise the limit it is held against
        spike = len(self._losses) == self._losses.maxlen and loss > self._limit()
        self._losses.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """Return the window, oldest loss first."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the window that `state_dict` returned."""
        self._losses = deque(state_dict["losses"], maxlen=self._losses.maxlen)

    def _limit(self) -> float:
        mean = _mean(self._losses)
        # about the mean: mean(x^2) - mean^2 cancels where the loss has become flat
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
    """A limit on every metric whose whole name matches the regular expression `pattern`.

    The group `layer`, where the pattern has one, finds the layer or parameter in the name.
    """

    pattern: str
    relation: Literal[">", ">="]
    limit: float
    meaning: str
    """What a value past the limit shows, in a few words."""
    source: str
    """Where the limit comes from."""

    def is_past(self, value: float) -> bool:
        """Whether `value` is past the limit. NaN never is: `count_nonfinite` reports those."""
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
    """The metrics that crossed one threshold at the same step."""

    threshold: Threshold
    values: dict[str, float]
    """The value of each metric by its name, the largest first; never empty."""

    @property
    def layer(self) -> str:
        """The layer or parameter of the largest value; "" if the metric is of the whole run."""
        found = re.fullmatch(self.threshold.pattern, next(iter(self.values)))
        return (found.groupdict() if found else {}).get("layer", "")

    @property
    def text(self) -> str:
        """One line for the alert: metric, value, how many others crossed, the rule, its meaning."""
        (name, value), *others = self.values.items()
        more = f", and {len(others)} more" if others else ""
        rule = f"{self.threshold.relation} {self.threshold.limit:g}, {self.threshold.source}"
        return f"{name} = {value:.4g}{more} ({rule}): {self.threshold.meaning}"


def crossings(
    metrics: Mapping[str, float],
    previous: Mapping[str, float],
    thresholds: Sequence[Threshold] = THRESHOLDS,
) -> list[Crossing]:
    """Return a crossing for each threshold that some metric is past now and was not past before.

    `previous` holds the last measured value of each metric; a metric that is not in it was not
    past. The caller updates it to `{**previous, **metrics}` after each call, so a metric that stays
    past its limit is reported once. Metrics that cross one threshold together share a crossing.
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
