"""Flash and baseline attention at BF16, each against FP64: which rounding points make the 10x.

Claim: flash attention at BF16 lies about 10 times as far from FP64 as baseline at BF16.
Source: arXiv 2405.02803, figure 4
Published: about 10x; which intermediates were BF16, length and tile are not said
Varies: the rounding points of flash that are BF16: all (all_bf16), all but one to three that are
    FP32, or those of fa1, fa2, fa3 and stabilised; the number of key blocks; the seed
Measured: relative Frobenius and max error of out against FP64, over those of a baseline with every
    point in BF16, whose softmax is rounded once as PyTorch's is. q, k and v are N(0, 1) on the BF16
    grid; there is no mask, so that a part of the queries can stand for all of them
Refuted if: with every point of both in BF16 the ratio is not within 5 to 20
Sizes: cpu: 128 queries, 4096 keys in blocks of 64, 4 heads, head_dim 64, 8 seeds, up to 256 blocks;
    gpu: 4096 queries, 16 heads; quick: 64 queries, 1024 keys in blocks of 16, 2 heads, 5 seeds

    stability experiment stable_fig4 [--size cpu|gpu]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    FlashNumerics,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.testing import Shape
from experiments.kit.numerics import round_everywhere
from experiments.kit.plots import draw_dots, draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, mean, values_by
from experiments.kit.stated_tests import StatedTest, equal, monotone, ratio_within
from stability.metrics.deviation import deviation
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import GREY, new_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large, in which tiles, up to how many key blocks and how many seeds."""

    queries: int
    heads: int
    blocks: int
    """How many key blocks the table by profile has."""
    tiles: tuple[int, int]
    """Two numbers of keys in a block; the second is that of the table by profile."""
    counts: tuple[int, ...]
    """Over how many key blocks the sweep goes, at either tile."""
    seeds: int
    device: str = "cpu"


COUNTS = (8, 32, 64, 128, 256)
SIZES = {
    "quick": Settings(queries=64, heads=2, blocks=64, tiles=(32, 16), counts=(8, 256), seeds=5),
    "cpu": Settings(queries=128, heads=4, blocks=64, tiles=(16, 64), counts=COUNTS, seeds=8),
    "gpu": Settings(
        queries=4096, heads=16, blocks=64, tiles=(16, 64), counts=COUNTS, seeds=8, device="cuda"
    ),
}
ABOUT_TEN = {"above": 5.0, "below": 20.0}
FURTHER, AS_FAR, NEARER = (1.0, float("inf")), (0.9, 1.1), (0.0, 1.0)
BASELINE, WIDE_BASELINE = "baseline", "baseline, FP32 scores and softmax"
EVERY, NO_RECURRENCE = "all_bf16", "FP32 statistics, accumulator"
PROBABILITIES, OUTPUT = "FP32 probabilities", "FP32 output"
TABLE = {
    EVERY: FURTHER,
    "all_bf16, key_outer": FURTHER,
    PROBABILITIES: FURTHER,
    OUTPUT: FURTHER,
    "FP32 scores": FURTHER,
    "FP32 statistics": FURTHER,
    "FP32 accumulator": FURTHER,
    NO_RECURRENCE: AS_FAR,
    "FP32 statistics, accumulator, scores": NEARER,
    "fa1": FURTHER,
    "stabilised": FURTHER,
    "fa2": NEARER,
    "fa3": NEARER,
}
"""Flash by rounding points ("FP32 scores": all_bf16 but for scores), and where its ratio lies."""


def flash_numerics(name: str, block_k: int) -> FlashNumerics:
    """Return the numerics of a name of `TABLE`, in key blocks of `block_k`."""
    numerics, _ = round_everywhere("bf16")
    if name in PROFILES:
        numerics = PROFILES[name]
    elif name.startswith("FP32 "):
        points = name.removeprefix("FP32 ").split(", ")
        numerics = numerics.with_(**dict.fromkeys(points, "fp32"))
    else:
        numerics = numerics.with_(loop_order="key_outer")
    return numerics.with_(block_k=block_k)


def measure(settings: Settings) -> Findings:
    """Measure every profile at one number of key blocks, and three of them over that number."""
    other, tile = settings.tiles
    rows: list[dict[str, Any]] = []
    for seed in range(settings.seeds):
        rows += _errors(settings, "profiles", list(TABLE), settings.blocks, tile, seed)
        for blocks in settings.counts:
            sweep = [EVERY, NO_RECURRENCE, "fa2"]
            rows += _errors(settings, "blocks", sweep, blocks, tile, seed)
            rows += _errors(settings, "blocks", [EVERY], blocks, other, seed)
    profiles = [row for row in rows if row["part"] == "profiles"]
    whole, fa1, fa2 = (mean(profiles, "rel_ratio", who=name) for name in (EVERY, "fa1", "fa2"))
    published = [
        ratio_within(
            f"{settings.blocks} key blocks: flash's {words} error is 5 to 20 times baseline's",
            by_seed(profiles, value, who=EVERY),
            by_seed(profiles, value, who=BASELINE),
            **ABOUT_TEN,
        )
        for words, value in (("relative Frobenius", "rel_fro"), ("max", "max_abs"))
    ]
    published.append(_over_most(settings, rows))
    return Findings(
        measured=f"relative Frobenius error over that of baseline, every point BF16: all_bf16 "
        f"{whole:.2g}x, fa1 {fa1:.2g}x, fa2 {fa2:.2g}x, over {settings.blocks} key blocks; max "
        f"error of all_bf16 {published[1].found}",
        published=published,
        controls=[*_by_profile(profiles), *_by_blocks(settings, rows)],
        rows=rows,
        explain=partial(_explanation, rows, settings),
    )


def _errors(
    settings: Settings, part: str, names: Sequence[str], blocks: int, tile: int, seed: int
) -> list[dict[str, Any]]:
    """Return a row for both baselines and each of `names`: errors against FP64, and ratios."""
    heads, keys = settings.heads, blocks * tile
    shape = Shape(1, heads, heads, settings.queries, keys, 64)
    q, k, v, _ = draw_inputs("normal", shape, "bf16", seed, settings.device)
    _, every = round_everywhere("bf16")
    wide = BASELINE_PROFILES["plain"].with_(products="fp32", scores="fp32", softmax="fp32")
    out = {
        BASELINE: baseline_attention(q, k, v, numerics=every),
        WIDE_BASELINE: baseline_attention(q, k, v, numerics=wide),
    }
    for name in names:
        out[name] = flash_attention(q, k, v, numerics=flash_numerics(name, tile))
    golden = golden_attention(q, k, v).double()
    errors = {name: deviation(x.double(), golden) for name, x in out.items()}
    place = {"part": part, "tile": tile, "blocks": blocks, "seed": seed}
    return [
        {
            **place,
            "who": name,
            "rel_fro": error["rel_fro"],
            "max_abs": error["max_abs"],
            "rel_ratio": error["rel_fro"] / errors[BASELINE]["rel_fro"],
        }
        for name, error in errors.items()
    ]


def _by_profile(rows: Rows) -> list[StatedTest]:
    """Return the table by profile: on which side of baseline each lies."""
    words = {FURTHER: "further away", AS_FAR: "as far away within a tenth", NEARER: "nearer"}
    raised = [f"{words[side]}: {name}" for name, side in TABLE.items()]
    nothing = (
        "FP32 probabilities or output change nothing: P was rounded at statistics, and out is "
        "stored in BF16"
    )
    every = by_seed(rows, "rel_fro", who=EVERY)
    apart = [
        by_seed(rows, "rel_fro", who=name)[seed] - every[seed]
        for name in (PROBABILITIES, OUTPUT)
        for seed in every
    ]
    return [
        *(
            _ratio(statement, rows, name, above=above, below=below)
            for statement, (name, (above, below)) in zip(raised, TABLE.items(), strict=True)
        ),
        equal(nothing, apart),
        ratio_within(
            f"5 to 20 times as far as {WIDE_BASELINE}: {EVERY}",
            every,
            by_seed(rows, "rel_fro", who=WIDE_BASELINE),
            **ABOUT_TEN,
        ),
    ]


def _by_blocks(settings: Settings, rows: Rows) -> list[StatedTest]:
    """Return what the number of key blocks does to the ratio."""
    swept = [r for r in rows if r["part"] == "blocks" and r["tile"] == settings.tiles[1]]
    most = max(settings.counts)
    ratio = {str(n): by_seed(swept, "rel_ratio", who=EVERY, blocks=n) for n in settings.counts}
    last = [row for row in swept if row["blocks"] == most]
    least, greatest = AS_FAR
    return [
        monotone(f"{EVERY}: the ratio rises with key blocks", ratio, rising=True),
        _ratio(
            f"as far away over {most} key blocks too: {NO_RECURRENCE}",
            last,
            NO_RECURRENCE,
            above=least,
            below=greatest,
        ),
    ]


def _over_most(settings: Settings, rows: Rows) -> StatedTest:
    """Return the published statement over the largest number of key blocks."""
    most = {"part": "blocks", "tile": settings.tiles[1], "blocks": max(settings.counts)}
    return ratio_within(
        f"{most['blocks']} key blocks: flash's relative Frobenius error is 5 to 20 times "
        "baseline's",
        by_seed(rows, "rel_fro", who=EVERY, **most),
        by_seed(rows, "rel_fro", who=BASELINE, **most),
        **ABOUT_TEN,
    )


def _ratio(statement: str, rows: Rows, who: str, *, above: float, below: float) -> StatedTest:
    """Return the control that `who` errs so many times what baseline does."""
    error, plain = (by_seed(rows, "rel_fro", who=name) for name in (who, BASELINE))
    return ratio_within(statement, error, plain, above=above, below=below)


def _explanation(rows: Rows, settings: Settings) -> str:
    """Say what makes the distance: the recurrence's roundings, once a key block."""
    _, tile = settings.tiles

    def said(who: str, **only: object) -> str:
        return f"{mean(rows, 'rel_ratio', who=who, tile=tile, **only):.2g}x"

    no_recurrence, fa2 = (said(who, part="profiles") for who in (NO_RECURRENCE, "fa2"))
    swept = [said(EVERY, part="blocks", blocks=blocks) for blocks in settings.counts]
    return (
        "The distance is made by what is rounded once a key block: with every point in BF16 it is "
        f"{', '.join(swept)} over {', '.join(map(str, settings.counts))} key blocks, so about 10x "
        f"names a number of blocks. With statistics and accumulator in FP32 it is "
        f"{no_recurrence}, and fa2, whose scores are FP32 as well, is nearer to "
        f"FP64 than baseline: {fa2}."
    )


def draw(rows: Rows) -> Figure:
    """Draw the ratio by rounding points, and over the number of key blocks."""
    figure = new_figure("column", 5.6)
    upper, lower = figure.subplots(2, 1, height_ratios=(1.8, 1))
    profiles = [row for row in rows if row["part"] == "profiles" and row["who"] in TABLE]
    by_name = {name: by_seed(profiles, "rel_ratio", who=name) for name in TABLE}
    named = {
        name.replace("statistics, accumulator", "stat., acc."): list(found.values())
        for name, found in by_name.items()
    }
    draw_dots(upper, {"": named})
    upper.axvline(1, color=GREY, linewidth=0.8)
    upper.set_xlim(0, None)
    upper.set_title(f"{profiles[0]['blocks']} key blocks; a dot a seed")
    upper.set_xlabel("error / baseline's")
    swept = [row for row in rows if row["part"] == "blocks"]
    lines = {
        f"{EVERY}, {tile} keys a block": values_by(
            swept, "blocks", "rel_ratio", who=EVERY, tile=tile
        )
        for tile in sorted({row["tile"] for row in swept})
    }
    lines |= {
        who: values_by(swept, "blocks", "rel_ratio", who=who) for who in (NO_RECURRENCE, "fa2")
    }
    draw_series(
        lower, lines, x="key blocks", y="error / baseline's;\nmean, range of seeds", log="xy"
    )
    lower.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0))
    return figure
