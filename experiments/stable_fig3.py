"""Flash against baseline attention in the same format, from BF16 to FP64.

Claim: max |flash - baseline|, both in one format, falls as the format gets mantissa bits.
Source: arXiv 2405.02803, figure 3
Published: falls from BF16 to FP64; the values exist as an image only
Varies: the format of every rounding point of both: each mantissa width from e8m7 (BF16) over e8m23
    (FP32) to e8m51, and FP64. Also the format of the arithmetic between the points, which is FP64
    throughout, or FP32 wherever that is as wide as the points; and the seed
Measured: max |flash - baseline| of out on the same q, k, v, N(0, 1), rounded to the format
Refuted if: a format with more mantissa bits does not have the smaller difference
Sizes: cpu: length 512, 2 heads, head_dim 64, 8 seeds, every mantissa width; gpu: length 4096,
    16 heads; quick: length 64, 2 heads, three widths, 5 seeds

    stability experiment stable_fig3 [--size cpu|gpu]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from attention_kernels import baseline_attention, flash_attention
from attention_kernels.testing import Shape
from experiments.kit.numerics import round_everywhere
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed, values_by
from experiments.kit.stated_tests import equal, monotone
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import new_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large, over which mantissa widths and how many seeds."""

    length: int
    heads: int
    widths: tuple[int, ...]
    seeds: int
    device: str = "cpu"


SIZES = {
    "quick": Settings(length=64, heads=2, widths=(7, 15, 23), seeds=5),
    "cpu": Settings(length=512, heads=2, widths=tuple(range(7, 52)), seeds=8),
    "gpu": Settings(length=4096, heads=16, widths=tuple(range(7, 52)), seeds=8, device="cuda"),
}
BETWEEN = ("fp32", "fp64")
"""The narrowest format of the arithmetic between the rounding points; past FP32's 23 mantissa bits
it is FP64 in either."""


def measure(settings: Settings) -> Findings:
    """Measure each format at each seed."""
    formats = {f"e8m{width}": float(width) for width in settings.widths} | {"fp64": 52.0}
    rows: list[dict[str, Any]] = [
        {"format": format, "mantissa": width, "between": between, "seed": seed}
        | _differences(settings, format, between, seed)
        for between in BETWEEN
        for format, width in formats.items()
        for seed in range(settings.seeds)
    ]
    usual, wide = (
        {format: by_seed(rows, "max_abs", format=format, between=between) for format in formats}
        for between in BETWEEN
    )
    named = {format: usual[format] for format in ("e8m7", "e8m23", "fp64")}
    named_fall = monotone("max falls from BF16 to FP32 to FP64", named, rising=False)
    falls = monotone("each format's max is below that of the one before", usual, rising=False)
    falls_too = monotone(
        "so it is at each step with the arithmetic between the points in FP64",
        wide,
        rising=False,
    )
    rerun = equal("a second run differs from the first by nothing", (r["rerun"] for r in rows))
    return Findings(
        measured=f"max over {_mean(usual['e8m7']):.2g} at BF16 to {_mean(usual['fp64']):.2g} at "
        f"FP64, mean of {settings.seeds} seeds; {falls.found}",
        published=[named_fall, falls],
        controls=[falls_too, rerun],
        rows=rows,
        explain=partial(_explanation, usual, wide),
    )


def _explanation(usual: Mapping[str, BySeed], wide: Mapping[str, BySeed]) -> str:
    """Say what is left where the points have as many bits as the arithmetic between them."""
    formats = list(usual)
    before = formats[formats.index("e8m23") - 1]
    return (
        "At e8m23 the points round to FP32, which is also the format of the arithmetic between "
        "them: what is left is that the two add in another order, and no format of the points "
        f"lowers that. The mean of the seeds goes from {_mean(usual[before]):.2g} at {before} to "
        f"{_mean(usual['e8m23']):.2g} at e8m23; with the arithmetic alone in FP64 from "
        f"{_mean(wide[before]):.2g} to {_mean(wide['e8m23']):.2g}."
    )


def _mean(values: BySeed) -> float:
    return sum(values.values()) / len(values)


def _differences(settings: Settings, format: str, between: str, seed: int) -> dict[str, float]:
    """Return max |flash - baseline|, and max |flash - flash| of a second run.

    q, k and v lie on the grid of `format`, so that naming FP64 for `operands` rounds nothing, but
    makes FP64 the format of the arithmetic between the points.
    """
    shape = Shape(1, settings.heads, settings.heads, settings.length, settings.length, 64)
    q, k, v, _ = draw_inputs("normal", shape, format, seed, settings.device)
    flash, baseline = round_everywhere(format)
    if between == "fp64":
        flash, baseline = flash.with_(operands="fp64"), baseline.with_(operands="fp64")
    out = flash_attention(q, k, v, numerics=flash, engine="twin")
    others = {
        "max_abs": baseline_attention(q, k, v, numerics=baseline),
        "rerun": flash_attention(q, k, v, numerics=flash, engine="twin"),
    }
    return {name: (out.double() - x.double()).abs().max().item() for name, x in others.items()}


def draw(rows: Rows) -> Figure:
    """Draw the difference over mantissa bits, for either arithmetic between the points."""
    figure = new_figure("column", 2.4)
    axes = figure.add_subplot()
    series = {
        f"at least {between.upper()} between the points": values_by(
            rows, "mantissa", "max_abs", between=between
        )
        for between in BETWEEN
    }
    draw_series(
        axes,
        series,
        x="mantissa bits at each point; mean, range of seeds",
        y="max |flash \N{MINUS SIGN} baseline|, units of v",
        log="y",
    )
    axes.legend()
    return figure
