"""Flash against baseline attention by tile: swapped, square and larger ones, at four formats.

Claim: (a) swapping the two dimensions of a tile makes the difference larger; (b) a square tile
    changes nothing; (c) larger tiles have the smaller difference
Source: arXiv 2405.02803, figure 6
Published: (a) larger, (b) nothing, (c) smaller; the values exist as an image only. (b), as we read
    it: making the tile square, with as many queries as keys, leaves the output unchanged
Varies: the tile, ceil(M / 4d) keys by min(keys, d) queries for an SRAM of M elements at head_dim d
    (arXiv 2205.14135, algorithm 1), and each tile swapped; the format at every rounding point of
    both (BF16, FP16, e8m12, FP32); the format of the arithmetic between the points, which is FP32,
    and for FP32 points also FP64; the seed
Measured: max |flash - baseline| of out on q, k, v of N(0, 1), rounded to the format; flash goes
    over keys outside and rounds O in memory at each key block, as FlashAttention-1
Refuted if: at a format (a) or (c) does not hold, or (b) not to the bit
Sizes: cpu: length 1024, 2 heads, head_dim 64, M from 4096 to 65536, 12 seeds; gpu: length 4096, 16
    heads, 8 seeds; quick: length 512, M 4096 and 65536, two formats, 5 seeds

    stability experiment stable_fig6 [--size cpu|gpu]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from torch import Tensor

from attention_kernels import baseline_attention, flash_attention
from attention_kernels.testing import Shape
from experiments.kit.numerics import round_everywhere
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, mean, values_by
from experiments.kit.stated_tests import StatedTest, equal, monotone, ratio_within
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import new_figure, print_styles

Tile = tuple[int, int]
"""block_q, block_k."""

HEAD_DIM = 64
NAMES = {"bf16": "BF16", "fp16": "FP16", "e8m12": "e8m12", "fp32": "FP32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large, with how much SRAM (in elements), at which formats, over how many seeds."""

    length: int
    heads: int
    sram: tuple[int, ...]
    formats: tuple[str, ...] = tuple(NAMES)
    seeds: int = 8
    device: str = "cpu"


SRAM = (4096, 8192, 16384, 32768, 65536)
SIZES = {
    "quick": Settings(length=512, heads=2, sram=(4096, 65536), formats=("bf16", "fp32"), seeds=5),
    "cpu": Settings(length=1024, heads=2, sram=SRAM, seeds=12),
    "gpu": Settings(length=4096, heads=16, sram=SRAM, device="cuda"),
}


def tile_for(sram: int) -> Tile:
    """Return block_q and block_k of FlashAttention-1 for an SRAM of so many elements."""
    block_k = math.ceil(sram / (4 * HEAD_DIM))
    return min(block_k, HEAD_DIM), block_k


def measure(settings: Settings) -> Findings:
    """Measure each tile and its swap, at each format, between-format and seed."""
    rows: list[dict[str, Any]] = [
        {"format": format, "between": between, "seed": seed, **row}
        for format in settings.formats
        # FP64 between the points tells rounding at the points from the order of FP32 additions
        for between in (("work", "fp64") if format == "fp32" else ("work",))
        for seed in range(settings.seeds)
        for row in _of_tiles(settings, format, between, seed)
    ]
    published = [t for format in settings.formats for t in _on(rows, settings, format, "work")]
    published.append(
        equal(
            "(b) an oblong tile made square, as many queries as keys, changes no bit of out",
            (row["made_square"] for row in rows if row["block_q"] != row["block_k"]),
        )
    )
    wide = _on(rows, settings, "fp32", "fp64") if "fp32" in settings.formats else []
    # a negative control: a square tile swapped is the same tile
    same = equal(
        "a square tile and its swap differ by nothing",
        (row["swapped_from_it"] for row in rows if row["block_q"] == row["block_k"]),
    )
    return Findings(
        measured=_sentence(rows, settings),
        published=published,
        controls=[same, *wide],
        rows=rows,
        explain=partial(_explanation, rows, settings, wide),
    )


def _of_tiles(settings: Settings, format: str, between: str, seed: int) -> list[dict[str, Any]]:
    """Return the difference of each tile, as FlashAttention-1 has it and swapped."""
    shape = Shape(1, settings.heads, settings.heads, settings.length, settings.length, HEAD_DIM)
    q, k, v, _ = draw_inputs("normal", shape, format, seed, settings.device)
    flash, baseline = round_everywhere(format)
    if between == "fp64":  # the inputs are on the format's grid, so that this rounds nothing
        flash, baseline = flash.with_(operands="fp64"), baseline.with_(operands="fp64")
    plain = baseline_attention(q, k, v, numerics=baseline).double()

    def attend(block_q: int, block_k: int) -> Tensor:
        numerics = flash.with_(loop_order="key_outer", block_q=block_q, block_k=block_k)
        # the twin on any device: no GPU holds a tile of 256 x 256 in FP64 in its shared memory
        return flash_attention(q, k, v, numerics=numerics, engine="twin").double()

    rows = []
    for sram in settings.sram:
        block_q, block_k = tile_for(sram)
        out, swapped = attend(block_q, block_k), attend(block_k, block_q)
        square = attend(block_k, block_k)
        rows.append(
            {
                "sram": sram,
                "block_q": block_q,
                "block_k": block_k,
                "max_abs": (out - plain).abs().max().item(),
                "swapped_max_abs": (swapped - plain).abs().max().item(),
                "swapped_from_it": (swapped - out).abs().max().item(),
                "made_square": (square - out).abs().max().item(),
            }
        )
    return rows


def _on(rows: Rows, settings: Settings, format: str, between: str) -> list[StatedTest]:
    """State (a) and (c) of one format."""
    name = NAMES[format] + (", FP64 between the points" if between == "fp64" else "")
    only = {"format": format, "between": between}
    longest = max(settings.sram)
    swapped, plain = (
        by_seed(rows, column, sram=longest, **only) for column in ("swapped_max_abs", "max_abs")
    )
    block_q, block_k = tile_for(longest)
    by_tile = {
        "x".join(map(str, tile_for(sram))): by_seed(rows, "max_abs", sram=sram, **only)
        for sram in settings.sram
    }
    return [
        ratio_within(
            f"(a) {name}: {block_k}x{block_q} over {block_q}x{block_k} is above 1",
            swapped,
            plain,
            above=1,
        ),
        monotone(f"(c) {name}: each larger tile's max is below", by_tile, rising=False),
    ]


def _sentence(rows: Rows, settings: Settings) -> str:
    """Say how far the largest tile and its swap are from the smallest, at each format."""
    small, large = (min(settings.sram), max(settings.sram))
    block_q, block_k = tile_for(large)
    first = "x".join(map(str, tile_for(small)))
    said = []
    for format in settings.formats:
        only = {"format": format, "between": "work"}
        of_small, of_large, of_swap = (
            mean(rows, column, sram=sram, **only)
            for sram, column in (
                (small, "max_abs"),
                (large, "max_abs"),
                (large, "swapped_max_abs"),
            )
        )
        said.append(f"{NAMES[format]} {of_large / of_small:.2f}x and {of_swap / of_large:.2f}x")
    return (
        f"max of {block_q}x{block_k} over {first}, and of {block_k}x{block_q} over "
        f"{block_q}x{block_k}: {'; '.join(said)}"
    )


def _explanation(rows: Rows, settings: Settings, wide_tests: Sequence[StatedTest]) -> str:
    """Say what is left in FP32, where the points round nothing that the arithmetic has not."""
    small, large = (min(settings.sram), max(settings.sram))
    usual, wide = (
        mean(rows, "max_abs", format="fp32", between=between, sram=large)
        / mean(rows, "max_abs", format="fp32", between=between, sram=small)
        for between in ("work", "fp64")
    )
    held = sum(test.holds for test in wide_tests)
    return (
        "At FP32 the arithmetic between the points is FP32 as well, and what differs is the order "
        "of its additions: a larger tile adds more products in one run. The largest tile's max is "
        f"{usual:.2f}x that of the smallest; with that arithmetic alone in FP64 it is {wide:.2f}x, "
        f"and {held} of (a) and (c) hold. Out does not depend on the queries in a tile, so that "
        "(a) is (c): a swapped tile has fewer keys."
    )


def draw(rows: Rows) -> Figure:
    """Draw the difference over the tile's keys, at each format; hollow marks are swapped tiles."""
    figure = new_figure("column", 3.4)
    axes = figure.add_subplot()
    plain, swapped = (_lines(rows, column) for column in ("max_abs", "swapped_max_abs"))
    draw_series(
        axes,
        plain,
        x="keys in a tile (block_k); hollow: swapped",
        y="max |flash \N{MINUS SIGN} baseline|,\nover that of the smallest tile",
    )
    styles = print_styles(list(plain))
    for name, line in swapped.items():
        style = styles[name]
        means = {keys: sum(values) / len(values) for keys, values in line.items() if keys > 64}
        hollow = {"markerfacecolor": "white", "markersize": 4.5, "linestyle": "none", "zorder": 3}
        axes.plot(list(means), list(means.values()), style.marker, color=style.colour, **hollow)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["block_k"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, None)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _lines(rows: Rows, column: str) -> dict[str, dict[float, list[float]]]:
    """Return `column` over the mean of the smallest tile, by format and then by block_k."""
    found = {}
    for format, between in dict.fromkeys((row["format"], row["between"]) for row in rows):
        only = {"format": format, "between": between}
        unit = mean(rows, "max_abs", sram=min(row["sram"] for row in rows), **only)
        by_keys = values_by(rows, "block_k", column, **only)
        name = NAMES[format] + (", FP64 between" if between == "fp64" else "")
        found[name] = {keys: [value / unit for value in values] for keys, values in by_keys.items()}
    return found
