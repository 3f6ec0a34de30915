"""Gradient evidence: what an attention's error does to the gradient of the whole model.

On the run's own weights and batch the gradient of the loss is computed with the candidate, with the
baseline attention and with the golden in the attention's place. e = candidate - golden and
b = baseline - golden are then the errors that reach the weights. Two things are measured of them,
for the whole model and by group of parameters:

- *ratio* |e| / |b| of one look: how large the error is beside the one that everybody accepts;
- *coherence* and *share* over looks on different batches (`metrics.coherence`): whether errors add
  up from step to step, as a bias does, or average out, as rounding does.

*Isolated* means that all but the attention is one precision wider than it: FP32 around attention
in 16 bits or fewer, FP64 around FP32. Otherwise the rounding of all other layers, which falls anew
with each change of the attention, covers what is looked for: 5 to 8 times less sensitive on a GPT
of 3 layers in BF16. The attention is given q, k and v, and in the backward dO, rounded to the
format that it gets in the run, and so is the golden, which computes in FP64 from there and rounds
nothing more. *As trained* leaves the run's own precision everywhere; that is description.

Leaves out how a model's attention is exchanged (`study.model_gradients`, `intercept.gradients`),
when to look, and what is decided from it (`analysis.gradient_evidence`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from attention_kernels import Format, MaskArguments, golden_attention, round_to
from stability.metrics.coherence import coherence_of
from stability.metrics.parameter_groups import grouped
from stability.metrics.sketch import SKETCH_BUCKETS, sketch
from stability.probe.measurements import ProbeFinding, StepMeasurements
from stability.records.metric_names import ALL_WEIGHTS, gradient_name

__all__ = [
    "MOST_LOOKS",
    "AttentionRole",
    "GradientMeter",
    "Gradients",
    "TakeGradients",
    "isolated_attention",
    "isolated_golden",
    "rounded_value",
    "surrounding_dtype",
]

Attention = Callable[..., Tensor]
"""Takes q, k, v and the masks of `MaskArguments`, and returns out."""

AttentionRole = Literal["candidate", "baseline", "golden"]

Gradients = Mapping[str, Tensor]
"""The gradient of the loss by parameter name, dense."""

TakeGradients = Callable[[AttentionRole, bool], Gradients]
"""Computes the gradient with the attention of that role; isolated, or as trained if False."""

MOST_LOOKS = 256
"""Kept looks; beyond it every other one is dropped, and from then on only every other one kept."""

_FINDING = "gradient"
"""Stands for the layer in a finding about the whole model's gradient."""


class GradientMeter:
    """Measures look after look, and keeps the errors' sketches for what is over all looks."""

    def __init__(self) -> None:
        self._isolated = _KeptErrors()
        self._as_trained = _ErrorSum()
        self._reported: set[str] = set()

    def look(self, take: TakeGradients, *, as_trained: bool = True) -> StepMeasurements:
        """Return the metrics of one look; without `as_trained` those of the isolated one alone.

        Where the candidate raises, or its gradient is not finite, the ratio is NaN. Where baseline
        or golden do, nothing is measured. Either is a finding, each reported once.
        """
        metrics: dict[str, float] = {}
        findings: list[str] = []
        # as trained first: a model that is not ours tells in it what its attention is given
        for isolated in (False, True) if as_trained else (True,):
            try:
                metrics |= self._measure(take, isolated)
            except _UnusableLookError as error:
                findings.append(str(error))
                if error.role == "candidate":
                    metrics[gradient_name(ALL_WEIGHTS, "ratio", as_trained=not isolated)] = math.nan
        new = [text for text in dict.fromkeys(findings) if text not in self._reported]
        self._reported.update(new)
        return StepMeasurements(metrics, {}, tuple(ProbeFinding(_FINDING, text) for text in new))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs."""
        return {
            "isolated": self._isolated.state_dict(),
            "as_trained": self._as_trained.state_dict(),
            "reported": sorted(self._reported),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._isolated.load_state_dict(state["isolated"])
        self._as_trained.load_state_dict(state["as_trained"])
        self._reported = set(state["reported"])

    def _measure(self, take: TakeGradients, isolated: bool) -> dict[str, float]:
        golden = _taken(take, "golden", isolated)
        groups = grouped(golden)
        size = _squares(golden, groups)
        if not all(map(math.isfinite, size.values())):
            raise _UnusableLookError("golden", "the run's own gradient is not finite")
        baseline = _errors(_taken(take, "baseline", isolated), golden)
        candidate = _errors(_taken(take, "candidate", isolated), golden)
        squares = {"golden": size}
        for role, errors in (("baseline", baseline), ("candidate", candidate)):
            squares[role] = _squares(errors, groups)
            if not all(map(math.isfinite, squares[role].values())):
                raise _UnusableLookError(role, "its gradient is not finite")
        sketches = {
            group: sketch([candidate[name] for name in names]).cpu().numpy().astype(np.float32)
            for group, names in groups.items()
        }
        memory = self._isolated if isolated else self._as_trained
        memory.add(sketches)
        metrics = {}
        for group in (ALL_WEIGHTS, *groups):
            of_group = {role: _pooled(values, group) for role, values in squares.items()}
            values = {**_of_look(of_group), **memory.figures(group)}
            for name, value in values.items():
                metrics[gradient_name(group, name, as_trained=not isolated)] = value
        return metrics


class _UnusableLookError(ValueError):
    """A gradient that can't be had, or holds values that are no numbers."""

    def __init__(self, role: str, reason: str) -> None:
        super().__init__(f"{role}: {reason}")
        self.role = role


def _taken(take: TakeGradients, role: AttentionRole, isolated: bool) -> Gradients:
    try:
        return take(role, isolated)
    except torch.AcceleratorError:
        raise  # the device is lost, and the run with it
    except Exception as error:
        # whatever a candidate raises: the run must go on
        text = str(error).strip().splitlines() or [""]
        raise _UnusableLookError(role, f"{type(error).__name__}: {text[0]}") from error


def _errors(gradients: Gradients, golden: Gradients) -> dict[str, Tensor]:
    return {name: gradients[name] - exact for name, exact in golden.items()}


def _squares(gradients: Gradients, groups: Mapping[str, list[str]]) -> dict[str, float]:
    """Return the squared norm of each group, in FP64."""
    sums = [
        torch.stack([gradients[name].double().square().sum() for name in names]).sum()
        for names in groups.values()
    ]
    return dict(zip(groups, torch.stack(sums).tolist(), strict=True))


def _pooled(by_group: Mapping[str, float], group: str) -> float:
    return sum(by_group.values()) if group == ALL_WEIGHTS else by_group[group]


def _of_look(squares: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio of the errors, and both relative to the gradient."""
    norms = {role: math.sqrt(value) for role, value in squares.items()}
    return {
        "ratio": _quotient(norms["candidate"], norms["baseline"]),
        "error": _quotient(norms["candidate"], norms["golden"]),
        "baseline_error": _quotient(norms["baseline"], norms["golden"]),
    }


def _quotient(above: float, below: float) -> float:
    if below == 0:
        # an error that is exactly 0 is none, whatever it is put in ratio to
        return 0.0 if above == 0 else math.inf
    return above / below


class _KeptErrors:
    """The sketches of the errors at up to MOST_LOOKS looks, by group of parameters."""

    def __init__(self) -> None:
        self._groups: list[str] = []
        self._kept: list[np.ndarray] = []
        """Of each look (groups, buckets), in FP32."""
        self._grams = np.zeros((0, 0, 0))
        """Dot products of each two looks in each group (groups, looks, looks)."""
        self._seen = 0
        self._stride = 1

    def add(self, sketches: Mapping[str, np.ndarray]) -> None:
        """Keep one look's sketches, or leave them out where looks are thinned."""
        self._groups = list(sketches)
        if self._seen % self._stride == 0:
            self._keep(np.stack(list(sketches.values())))
        self._seen += 1
        if len(self._kept) > MOST_LOOKS:
            self._kept, self._grams = self._kept[::2], self._grams[:, ::2, ::2]
            self._stride *= 2

    def _keep(self, new: np.ndarray) -> None:
        self._kept.append(new)
        wide = new.astype(np.float64)
        n = len(self._kept)
        grams = np.zeros((len(new), n, n))
        grams[:, : n - 1, : n - 1] = self._grams.reshape(len(new), n - 1, n - 1)
        for look, old in enumerate(self._kept):
            grams[:, look, -1] = grams[:, -1, look] = (old * wide).sum(axis=1)
        self._grams = grams

    def figures(self, group: str) -> dict[str, float]:
        """Return coherence, share, its standard error and the number of kept looks."""
        grams = dict(zip(self._groups, self._grams, strict=True))
        found = coherence_of(self._grams.sum(axis=0) if group == ALL_WEIGHTS else grams[group])
        return {
            "share": found.share,
            "share_se": found.share_se,
            "coherence": found.coherence,
            "looks": float(found.looks),
        }

    def state_dict(self) -> dict[str, Any]:
        kept = np.stack(self._kept) if self._kept else np.zeros((0, 0, SKETCH_BUCKETS), np.float32)
        return {
            "groups": list(self._groups),
            "kept": torch.from_numpy(kept),
            "grams": torch.from_numpy(self._grams.copy()),
            "seen": self._seen,
            "stride": self._stride,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._groups, self._grams = list(state["groups"]), state["grams"].numpy()
        self._kept, self._stride = list(state["kept"].numpy()), state["stride"]
        self._seen = state["seen"]


class _ErrorSum:
    """Sum and squares of the errors of all looks: enough for coherence and share, not for error."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._squares: dict[str, float] = {}
        self._looks = 0

    def add(self, sketches: Mapping[str, np.ndarray]) -> None:
        """Add one look's sketches."""
        for group, one in sketches.items():
            wide = one.astype(np.float64)
            self._sums[group] = self._sums.get(group, np.zeros_like(wide)) + wide
            self._squares[group] = self._squares.get(group, 0.0) + float(wide @ wide)
        self._looks += 1

    def figures(self, group: str) -> dict[str, float]:
        """Return coherence, share and the number of looks."""
        sums = {name: float(one @ one) for name, one in self._sums.items()}
        total, energy = _pooled(sums, group), _pooled(self._squares, group)
        coherence = total / energy if energy else 1.0
        share = (coherence - 1) / (self._looks - 1) if self._looks > 1 else math.nan
        return {"share": share, "coherence": coherence, "looks": float(self._looks)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {group: torch.from_numpy(one) for group, one in self._sums.items()},
            "squares": dict(self._squares),
            "looks": self._looks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {group: one.numpy() for group, one in state["sums"].items()}
        self._squares, self._looks = dict(state["squares"]), state["looks"]


def surrounding_dtype(rounding: torch.dtype | Format) -> torch.dtype:
    """Return what all but the attention computes in, where `rounding` is what attention is given.

    One precision wider, so that the attention's error is the largest there is.
    """
    return torch.float64 if rounding in (torch.float32, torch.float64) else torch.float32


def isolated_attention(attention: Attention, rounding: torch.dtype | Format) -> Attention:
    """Return `attention` for a model of a wider dtype: q, k, v and dO are rounded on the way in.

    What it returns is widened again, forward and backward.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        if isinstance(rounding, torch.dtype):
            # autograd rounds dO and widens dq, dk and dv at the same two places
            out = attention(q.to(rounding), k.to(rounding), v.to(rounding), **mask)
            return out.to(q.dtype)
        q, k, v = (_RoundedValue.apply(x, rounding) for x in (q, k, v))
        return _RoundedGradient.apply(attention(q, k, v, **mask), rounding)

    return attend


def isolated_golden(rounding: torch.dtype | Format) -> Attention:
    """Return the golden for such a model: rounded as above on the way in, and nothing after."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        # not q.to(rounding): autograd would round dq, dk and dv there
        exact = [rounded_value(x, rounding).double() for x in (q, k, v)]
        out = golden_attention(*exact, **mask).to(q.dtype)
        return _RoundedGradient.apply(out, rounding)

    return attend


def rounded_value(x: Tensor, rounding: torch.dtype | Format) -> Tensor:
    """Return x rounded, in its own dtype; its gradient passes as it is."""
    return _RoundedValue.apply(x, rounding)


def _rounded(x: Tensor, rounding: torch.dtype | Format) -> Tensor:
    if isinstance(rounding, torch.dtype):
        return x.to(rounding).to(x.dtype)
    return round_to(x, rounding)


def _overflowing(rounding: torch.dtype | Format) -> torch.dtype | Format:
    # as in `model.precision`: a saturated gradient would look sound
    return replace(rounding, saturate=False) if isinstance(rounding, Format) else rounding


class _RoundedValue(torch.autograd.Function):
    """Rounds the value; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: torch.dtype | Format) -> Tensor:
        return _rounded(x, rounding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _RoundedGradient(torch.autograd.Function):
    """Rounds the gradient; the value passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: torch.dtype | Format) -> Tensor:
        ctx.rounding = _overflowing(rounding)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _rounded(grads[0], ctx.rounding), None
