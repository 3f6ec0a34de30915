"""FlashAttention-4's polynomial exp2 and rescale threshold against exact, at BF16 and FP8.

Claim: a cubic exp2 is invisible in BF16; together with a rescale threshold it is said to cost
    accuracy
Source: FlashAttention-4's code and flash-attention PR 2067
Published: relative error 8.8e-5 at most, invisible after BF16's 3.9e-3; threshold 8 (FP8: 0);
    users report a loss of accuracy on BF16 data, no figures
Varies: exp (exact, exp2, or the polynomial); the threshold, in powers of two; the format of P:
    BF16, FP32 or e4m3, the last with or without FlashAttention-3's factor of 256 (256 at threshold
    8 is past e4m3's 448); the mantissa bits of inputs, P and out; the inputs; the seed. Every other
    rounding point is that of the profile fa4
Measured: relative error of 2^x on [0, 1); of out against the golden, Frobenius, largest, bias
Refuted if: the polynomial shows in BF16 (1 %), or no BF16 data loses accuracy
Sizes: cpu: length 512, 2 heads, head_dim 64, 8 seeds; gpu: length 8192, 16 heads; quick: length
    256, thresholds 0 and 8, 5 seeds

    stability experiment fa4_numerics [--size cpu|gpu]
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, geometric_mean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_kernels import PROFILES, FlashNumerics, flash_attention, golden_attention, round_to
from attention_kernels.testing import Shape
from attention_kernels.twin.arithmetic import exponential
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed, over
from experiments.kit.stated_tests import StatedTest, mean_within, ratio_within
from stability.metrics.deviation import deviation
from stability.probe.attention_inputs import AttentionInputs, draw_inputs, round_inputs
from stability.probe.microbenchmark import at_format
from stability.report.paper.style import log_axis, new_figure

INPUTS = {"normal": "N(0, 1)", "outliers": "outliers", "large": "N(0, 16)", "climb": "climbing"}
CLIMB = 3.5
"""Nats from the first block's largest score to that of the next: 5 powers of two, within the
threshold, where BF16 rounds P = e^3.5 by -3.5e-3 and 1 by nothing."""
GRID = 2**18
"""Values of x at which 2^x is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large, over which thresholds (powers of two) and mantissa widths, how many seeds."""

    length: int
    heads: int
    thresholds: tuple[float, ...]
    widths: tuple[int, ...]
    seeds: int
    device: str = "cpu"


LINES = {"thresholds": (0.0, 2.0, 4.0, 6.0, 8.0), "widths": (7, 10, 13, 16, 19, 23)}
SIZES = {
    "quick": Settings(length=256, heads=2, thresholds=(0.0, 8.0), widths=(7, 10, 23), seeds=5),
    "cpu": Settings(length=512, heads=2, seeds=8, **LINES),
    "gpu": Settings(length=8192, heads=16, seeds=8, device="cuda", **LINES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one output is computed with."""

    width: int = 7
    exp: str = "exact"
    threshold: float = 0.0
    probabilities: str = "input"
    factor: bool = False
    """Multiply P by 256, as FlashAttention-3 does for e4m3."""

    def numerics(self) -> FlashNumerics:
        """Return FlashAttention-4's numerics with the changes of this case."""
        scaling = "per_block" if self.factor else "none"
        dials = {"exp": self.exp, "rescale_threshold": self.threshold, "scaling": scaling}
        changed = PROFILES["fa4"].with_(probabilities=self.probabilities, **dials)
        return at_format(changed, f"e8m{self.width}")


PAIRS = {
    "fa4": (Case(exp="exp2_polynomial", threshold=8.0), Case()),
    "polynomial": (Case(exp="exp2_polynomial"), Case()),
    "wide": (Case(probabilities="fp32", threshold=8.0), Case(probabilities="fp32")),
    "fp8": (Case(probabilities="e4m3", threshold=8.0), Case(probabilities="e4m3")),
    "factor": (Case(probabilities="e4m3"), Case(probabilities="e4m3", factor=True)),
}
"""What is held against what."""


def measure(settings: Settings) -> Findings:
    """Measure 2^x alone, then out by dial and inputs, at each seed."""
    seeds = range(settings.seeds)
    alone = [{"what": "exp2", "seed": seed, **_exp2(seed)} for seed in seeds]
    rows = [row for name in INPUTS for seed in seeds for row in _outputs(settings, name, seed)]
    fa4, fp8 = (
        {name: geometric_mean(_ratios(rows, name, *PAIRS[pair]).values()) for name in INPUTS}
        for pair in ("fa4", "fp8")
    )
    cubic, rounded = (fmean(row[name] for row in alone) for name in ("max", "max_bf16"))
    return Findings(
        measured=f"polynomial {cubic:.2g}, {rounded:.2g} in BF16; with threshold 8 the error of "
        f"out grows {fa4['normal']:.3g}x on N(0, 1), {fa4['climb']:.3g}x at worst; with e4m3 P "
        f"{fp8['normal']:.3g}x and {fp8['climb']:.3g}x",
        published=_published(alone, rows),
        controls=_controls(rows),
        rows=[*alone, *rows],
    )


def _exp2(seed: int) -> dict[str, float]:
    """Return the relative errors of 2^x at random x in [0, 1), before and after BF16."""
    x = torch.rand(GRID, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    true, cubic = x.exp2(), exponential(x * math.log(2), "exp2_polynomial")
    narrow = {name: round_to(y, "bf16") / true - 1 for name, y in (("e", true), ("p", cubic))}
    excess = narrow["p"].norm() / narrow["e"].norm() - 1
    return {
        "max": (cubic / true - 1).abs().max().item(),
        "max_bf16": narrow["p"].abs().max().item(),
        "excess_percent": 100 * excess.item(),
    }


def _outputs(settings: Settings, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of out of each case."""
    cases = [Case(exp="exp2"), *sum(PAIRS.values(), ())]
    for format in ("input", "e4m3"):
        cases += [Case(probabilities=format, threshold=x) for x in settings.thresholds]
    for width in settings.widths if name == "normal" else (7,):
        inputs = _drawn(settings, name, f"e8m{width}", seed)
        golden = golden_attention(*(x.double() for x in inputs[:3]))
        for case in dict.fromkeys(cases if width == 7 else _cubic(width)):
            out = flash_attention(*inputs[:3], numerics=case.numerics())
            found = deviation(out.double(), golden, output_format=f"e8m{width}")
            errors = {metric: found[metric] for metric in ("rel_fro", "max_abs", "bias_ulp")}
            yield {"what": "out", "inputs": name, "seed": seed, **asdict(case), **errors}


def _cubic(width: int) -> tuple[Case, Case]:
    """Return the polynomial and exact exp at a mantissa width."""
    return Case(width=width, exp="exp2_polynomial"), Case(width=width)


def _drawn(settings: Settings, name: str, format: str, seed: int) -> AttentionInputs:
    """Return inputs of a law, or climbing: the second block that is read has every row's maximum.

    The last 128 keys are read first. There v is of one sign: the errors of all rows add up.
    """
    shape = Shape(1, settings.heads, settings.heads, settings.length, settings.length, 64)
    if name != "climb":
        return draw_inputs(name, shape, format, seed, settings.device)
    q, k, v, dout = (x.double() for x in draw_inputs("normal", shape, format, seed))
    q[..., 0], k[..., 0] = 8.0, -20.0  # a score is k[0] here, plus the noise of the other axes
    for block, score in ((1, 0.0), (2, CLIMB)):
        k[..., -128 * block, :] = 0.0
        k[..., -128 * block, 0] = score
    return round_inputs((x.to(settings.device) for x in (q, k, v.abs(), dout)), format)


def _published(alone: Rows, rows: Rows) -> list[StatedTest]:
    """State what the polynomial is alone, and that there is BF16 data which loses accuracy."""
    cubic, rounded, excess = (
        {row["seed"]: row[name] for row in alone} for name in ("max", "max_bf16", "excess_percent")
    )
    return [
        mean_within(
            "the polynomial errs by 8.8e-5 at most", cubic, unit="", above=8.75e-5, below=8.85e-5
        ),
        mean_within(
            "and by 3.9e-3 rounded to BF16", rounded, unit="", above=3.85e-3, below=3.95e-3
        ),
        mean_within(
            "rounded to BF16, its rms error exceeds exact 2^x's by under 1 %",
            excess,
            unit="%",
            below=1.0,
        ),
        _above(
            "there is BF16 data, climbing scores, that loses over 1 %",
            _ratios(rows, "climb", *PAIRS["fa4"]),
        ),
    ]


def _controls(rows: Rows) -> list[StatedTest]:
    """State what the polynomial and the threshold each do to the error of out."""
    ratios = {pair: [_ratios(rows, name, *PAIRS[pair]) for name in INPUTS] for pair in PAIRS}
    least = {
        pair: {seed: min(x[seed] for x in found) for seed in found[0]}
        for pair, found in ratios.items()
    }
    most = {
        pair: {seed: 100 * max(abs(x[seed] - 1) for x in found) for seed in found[0]}
        for pair, found in ratios.items()
    }
    half, wide = (_ratios(rows, "normal", *_cubic(width)) for width in (10, 23))
    bias, none = (_errors(rows, "climb", Case(threshold=x), "bias_ulp") for x in (8.0, 0.0))
    unseen = partial(mean_within, unit="%", below=1.0)
    signed = partial(mean_within, unit="ULP")
    return [
        _above("all four inputs lose over 1 %; the least", least["fa4"]),
        unseen("the polynomial alone changes none by 1 %", most["polynomial"]),
        unseen("with P in FP32 threshold 8 changes none by 1 %", most["wide"]),
        signed("threshold 8 biases out, climbing scores", bias, below=-0.1),
        signed("threshold 0 does not", none, above=-0.1, below=0.1),
        _above("with 10 mantissa bits, as FP16, the polynomial shows", half),
        _above("with 23, as FP32, it is nearly all", wide, 10.0),
        _above("with e4m3 P threshold 8 loses over 1 %; the least", least["fp8"]),
    ]


def _above(statement: str, ratios: BySeed, least: float = 1.01) -> StatedTest:
    return ratio_within(statement, ratios, 1.0, above=least)


def _errors(rows: Rows, name: str, case: Case, metric: str = "rel_fro") -> dict[int, float]:
    """Return a metric of a case by seed."""
    return by_seed(rows, metric, what="out", inputs=name, **asdict(case))


def _ratios(rows: Rows, name: str, case: Case, other: Case) -> dict[int, float]:
    """Return a case's error over another's, by seed."""
    return over(_errors(rows, name, case), _errors(rows, name, other))


def draw(rows: Rows) -> Figure:
    """Draw out's error over that of exact exp, by mantissa bits, and over that of threshold 0."""
    out = [row for row in rows if row["what"] == "out"]
    figure = new_figure("column", 3.9)
    axes = figure.subplot_mosaic("AA;BC")
    widths, thresholds = (sorted({row[name] for row in out}) for name in ("width", "threshold"))
    cubic = {float(x): list(_ratios(out, "normal", *_cubic(x)).values()) for x in widths}
    _panel(axes["A"], {"N(0, 1)": cubic}, "mantissa bits of inputs, P and out", widths)
    log_axis(axes["A"], "y")
    axes["A"].set_ylabel("error, polynomial / exact")
    for place, format, title in (("B", "input", "P in BF16"), ("C", "e4m3", "P in e4m3")):
        cases = {x: Case(probabilities=format, threshold=x) for x in thresholds}
        lines = {
            label: {x: list(_ratios(out, name, cases[x], cases[0.0]).values()) for x in thresholds}
            for name, label in INPUTS.items()
        }
        _panel(axes[place], lines, "rescale threshold\n(powers of two)", thresholds)
        axes[place].set_title(title)
    log_axis(axes["C"], "y")
    axes["B"].set_ylabel("error / at threshold 0")
    axes["B"].legend(handlelength=1.4, loc="upper left", borderpad=0)
    return figure


def _panel(axes: Axes, lines: Mapping[str, Any], label: str, places: Sequence[float]) -> None:
    draw_series(axes, lines)
    axes.set_xlabel(label)
    axes.set_xticks(places, [f"{place:g}" for place in places])
