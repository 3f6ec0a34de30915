"""Flash against baseline attention in the same format, from BF16 to FP64.

Claim: max |flash - baseline|, both in one format, falls as the format gets mantissa bits.
Source: arXiv 2405.02803, figure 3
Published: falls from BF16 to FP64; the values exist as an image only
Varies: the format of every rounding point of both, e8m7 (BF16) to e8m23 (FP32), and FP64; the seed
Measured: max |flash - baseline| of out on the same q, k, v, N(0, 1), rounded to the format
Refuted if: a format with more mantissa bits does not have the smaller difference
Sizes: cpu: length 512, 4 heads, head_dim 64, 8 seeds, every mantissa width; gpu: length 4096,
    16 heads; quick: three widths, 5 seeds

    stability experiment stable_fig3 [--size cpu|gpu]
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from attention_kernels import baseline_attention, flash_attention
from attention_kernels.testing import Shape
from stability.analysis.stated_tests import equal, monotone
from stability.attention.inputs import draw as draw_inputs
from stability.attention.microbenchmark import everywhere
from stability.cli.main import main
from stability.records.experiment_record import Findings
from stability.report.paper_series import draw_series, rows_by
from stability.report.paper_style import log_axis, new_figure


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
    "cpu": Settings(length=512, heads=4, widths=tuple(range(7, 24)), seeds=8),
    "gpu": Settings(length=4096, heads=16, widths=tuple(range(7, 24)), seeds=8, device="cuda"),
}


def measure(settings: Settings) -> Findings:
    """Measure each format at each seed."""
    formats = {f"e8m{width}": float(width) for width in settings.widths} | {"fp64": 52.0}
    rows: list[dict[str, Any]] = [
        {"format": format, "mantissa": width, "seed": seed, **_differences(settings, format, seed)}
        for format, width in formats.items()
        for seed in range(settings.seeds)
    ]
    by_format = {
        format: {row["seed"]: row["max_abs"] for row in rows if row["format"] == format}
        for format in formats
    }
    first, last = (sum(by_format[name].values()) / settings.seeds for name in ("e8m7", "fp64"))
    return Findings(
        measured=f"max over {first:.2g} at BF16 to {last:.2g} at FP64, mean of seeds",
        tests=[
            monotone("each format's max is below that of the one before", by_format, rising=False),
            equal(
                "a second run differs from the first by nothing",
                (row["rerun"] for row in rows),
                control=True,
            ),
        ],
        rows=rows,
    )


def _differences(settings: Settings, format: str, seed: int) -> dict[str, float]:
    """Return max |flash - baseline|, and max |flash - flash| of a second run."""
    shape = Shape(1, settings.heads, settings.heads, settings.length, settings.length, 64)
    q, k, v, _ = draw_inputs("normal", shape, format, seed, settings.device)
    flash, baseline = everywhere(format)
    out = flash_attention(q, k, v, numerics=flash)
    others = {
        "max_abs": baseline_attention(q, k, v, numerics=baseline),
        "rerun": flash_attention(q, k, v, numerics=flash),
    }
    return {name: (out.double() - x.double()).abs().max().item() for name, x in others.items()}


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the difference over mantissa bits."""
    figure = new_figure("column", 2.4)
    axes = figure.add_subplot()
    draw_series(axes, {"flash": rows_by(rows, "mantissa", "max_abs")})
    log_axis(axes, "y")
    axes.set_xlabel("mantissa bits of the format; mean and range of seeds")
    axes.set_ylabel("max |flash \N{MINUS SIGN} baseline|")
    return figure


if __name__ == "__main__":
    sys.exit(main(["experiment", "stable_fig3", *sys.argv[1:]]))
