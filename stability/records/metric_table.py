"""The table of metrics: what each is called, what it says, and how a reader draws it.

A metric is added in two places: in the function of `stability.metrics` that computes it, and in a
line here. The metric log, W&B, the terminal, the pages, the paper figures, the command line's
choices and the reference of the documentation read this table; a test asserts that the functions
return exactly these names. Leaves out how a name is put together with a layer or a parameter
(`metric_names`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stability.records.metric_names import (
    EVAL_LOSS,
    NONFINITE_WEIGHTS,
    TRAIN_LOSS,
    ULP_HISTOGRAM,
    WEIGHT_HISTOGRAM,
)

__all__ = [
    "DEVIATION_COUNTS",
    "DEVIATION_METRICS",
    "DRIFT_METRICS",
    "GRADIENT_METRICS",
    "HEAD_WATCH_METRICS",
    "LAYER_METRICS",
    "LAYER_WATCH_METRICS",
    "PARAMETER_WATCH_METRICS",
    "RUN_METRICS",
    "SHOWN_DRIFTS",
    "WATCH_METRICS",
    "Metric",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric as its readers need it."""

    name: str
    label: str
    """What an axis says, with the unit in brackets."""
    short: str = ""
    """The label, or in the terminal the name, where there is little room; with its line break."""
    scale: Literal["log", "linear"] = "log"
    """The axis for the values as they are."""
    worse: Literal["higher", "lower", "farther"] = "higher"
    """The direction in which two results are less alike; `farther` is away from `centre`."""
    centre: float | None = None
    """The value in the middle of a colour scale with two ends: 1 of a ratio, 0 of a bias."""
    complement: str = ""
    """The name of 1 - value, which charts draw instead, on a log axis: the value itself is so near
    to 1 that only its distance says anything. `label` speaks of the complement."""

    @property
    def shown_as(self) -> str:
        """The name under which charts show it."""
        return self.complement or self.name

    @property
    def shown_scale(self) -> Literal["log", "linear"]:
        """The axis for what charts show."""
        return "log" if self.complement else self.scale

    def shown(self, value: float) -> float:
        """Return what charts show of a value."""
        return 1 - value if self.complement else value


def _by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


RUN_METRICS = _by_name(
    (
        Metric(
            name=TRAIN_LOSS, label="training loss of the step's batch, as it is back-propagated"
        ),
        Metric(name=EVAL_LOSS, label="loss on held-out text, at each snapshot (nats a token)"),
        Metric(name=NONFINITE_WEIGHTS, label="weights that are no finite number"),
        Metric(name=WEIGHT_HISTOGRAM, label="counts of all weights by value"),
    )
)
"""What is logged of a run as a whole under a name of its own, with the loss and the weights."""

DRIFT_METRICS = _by_name(
    (
        Metric(name="rel_l2", label="drift of all weights: relative L2"),
        Metric(name="w1", label="W1 of all weights (units of the weights)"),
        Metric(name="max_abs", label="largest |difference| of all weights"),
        Metric(
            name="cosine",
            label="1 - cosine of the angle between all weights",
            scale="linear",
            worse="lower",
            complement="1-cosine",
        ),
        Metric(
            name="w1_over_std",
            label="W1 of all weights / their standard deviation",
            short="w1\nover_std",
        ),
        Metric(name="mean_abs", label="mean |difference| of all weights"),
        Metric(name="sign_flips", label="share of weights with another sign", short="sign\nflips"),
    )
)
"""How far one run's weights are from another's, what matters first: a narrow terminal shows the
first few. `metrics.drift` defines them."""

SHOWN_DRIFTS = {metric.shown_as: metric for metric in DRIFT_METRICS.values()}
"""The drift metrics by the name under which charts show them."""

DEVIATION_METRICS = _by_name(
    (
        Metric(name="max_abs", label="largest |deviation|"),
        Metric(name="mean_abs", label="mean |deviation|"),
        Metric(name="std", label="standard deviation of the deviation"),
        Metric(name="rmse", label="root mean square of the deviation"),
        Metric(
            name="rel_fro",
            label="relative Frobenius deviation from the baseline attention",
            short="relative Frobenius\ndeviation",
        ),
        Metric(
            name="cosine",
            label="cosine of the angle between both results",
            scale="linear",
            worse="lower",
        ),
        Metric(
            name="sqnr_db",
            label="signal over quantisation noise (dB)",
            scale="linear",
            worse="lower",
        ),
        Metric(
            name="bias",
            label="mean signed deviation",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(
            name="bias_ulp",
            label="mean signed deviation (ULP of the output format)",
            short="bias (ULP)",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(name="bias_ulp_se", label="standard error of bias_ulp (ULP of the output format)"),
        Metric(name="ulp_max", label="largest |deviation| (ULP of the output format)"),
        Metric(name="nonfinite", label="values that are no finite number"),
        Metric(
            name="error_ratio",
            label="error against FP64, candidate over baseline attention",
            short="error over\nthe baseline's",
            centre=1.0,
        ),
        Metric(
            name="golden_candidate_rel_fro",
            label="relative Frobenius error of the candidate against FP64",
        ),
        Metric(
            name="golden_baseline_rel_fro",
            label="relative Frobenius error of the baseline attention against FP64",
        ),
        Metric(
            name="gain",
            label="gain against FP64: slope of the candidate on it, less 1",
            short="gain",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(
            name="gain_baseline",
            label="gain of the baseline attention against FP64",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(
            name="golden_bias_ulp",
            label="mean signed error against FP64 (ULP of the output format)",
            short="bias against\nFP64 (ULP)",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(
            name="golden_bias_ulp_baseline",
            label="mean signed error of the baseline attention against FP64 (ULP)",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(
            name="baseline_over_rounding",
            label="error of the baseline attention over that of rounding FP64 once",
        ),
        Metric(
            name="golden_nonfinite",
            label="values of the candidate that are no finite number where FP64's are",
        ),
    )
)
"""How far one attention's results are from another's on the same inputs; those from error_ratio on
need a golden. `metrics.deviation` and `metrics.golden_error` define them."""

DEVIATION_COUNTS = _by_name(
    (Metric(name=ULP_HISTOGRAM, label="counts of the deviations by value (ULP)"),)
)
"""The histogram beside the deviations of a layer, in the bins of `metrics.ulp`."""

LAYER_METRICS = {
    name: DEVIATION_METRICS[name]
    for name in ("error_ratio", "gain", "golden_bias_ulp", "rel_fro", "bias_ulp")
}
"""The deviations that are shown of each layer. What judges an attention, against FP64, comes first;
then its distance from the baseline, which contains the baseline's own error."""

GRADIENT_METRICS = _by_name(
    (
        Metric(
            name="ratio",
            label="error of the model's gradient, candidate over baseline attention",
            short="error over\nthe baseline's",
            centre=1.0,
        ),
        Metric(
            name="share",
            label="share of the gradient's error that is the same at every look",
            scale="linear",
            worse="farther",
            centre=0.0,
        ),
        Metric(name="share_se", label="standard error of the share"),
        Metric(
            name="coherence",
            label="coherence of the gradient's errors: 1 for rounding noise",
            scale="linear",
            centre=1.0,
        ),
        Metric(name="looks", label="looks that share and coherence are over", scale="linear"),
        Metric(name="error", label="error of the gradient / the gradient, candidate attention"),
        Metric(
            name="baseline_error", label="error of the gradient / the gradient, baseline attention"
        ),
    )
)
"""The whole model's gradient against the one with attention in FP64: of one look the ratio and the
errors, of all looks so far the others. `probe.gradient_evidence` defines them."""

WATCH_METRICS = _by_name(
    (
        Metric(name="grad_norm", label="norm of the gradient, before clipping"),
        Metric(name="log_z", label="log Z, mean over the tokens (nats)", scale="linear"),
        Metric(
            name="rms_max",
            label="largest RMS_t of a parameter",
            scale="linear",
        ),
        Metric(
            name="nonfinite_gradients",
            label="gradients that are no finite number",
            scale="linear",
        ),
        Metric(name="loss_spike", label="1 where the loss spiked", scale="linear"),
    )
)
"""What is watched of a run as a whole. `metrics.instability` defines them."""

LAYER_WATCH_METRICS = _by_name(
    (
        Metric(name="max_logit", label="largest attention logit", scale="linear"),
        Metric(name="mean_logit", label="mean attention logit", scale="linear"),
        Metric(
            name="entropy",
            label="entropy of the attention weights, mean over the rows (nats)",
            scale="linear",
        ),
        Metric(
            name="repeated_one_share",
            label="share of rows in which exp(score - largest) rounds to 1 at several keys",
            scale="linear",
        ),
        Metric(name="lse_min", label="smallest log-sum-exp of a row (nats)", scale="linear"),
        Metric(name="lse_max", label="largest log-sum-exp of a row (nats)", scale="linear"),
        Metric(
            name="delta_gap_sum",
            label="running sum over looks of the error of delta = rowsum(dO * O)",
            scale="linear",
        ),
    )
)
"""What is watched inside each attention, with `probe.inside`. `metrics.inside_attention` defines
them."""

HEAD_WATCH_METRICS = _by_name(
    (Metric(name="query_norm", label="largest singular value of the head's rows of W_Q"),)
)
"""The same of each head."""

PARAMETER_WATCH_METRICS = _by_name(
    (
        Metric(
            name="rms",
            label="RMS_t: RMS of the gradient over Adam's estimate of its size",
            scale="linear",
        ),
    )
)
"""What is watched of each parameter: its name stands behind that of the metric."""
