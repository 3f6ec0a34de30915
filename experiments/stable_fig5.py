"""Flash against baseline attention at BF16 as the keys get more, at a fixed tile.

Claim: at a fixed tile a longer sequence has the larger max, mean and std of flash - baseline.
Source: arXiv 2405.02803, figure 5
Published: all three rise; the law of the inputs is not said, the values exist as an image only
Varies: the number of keys; the law of q, k and v, N(0, 1) or U(0, 1); the seed
Measured: max and mean |flash - baseline| and the std of the difference of out, with every rounding
    point of both in BF16 and a tile of 64 x 64; how often a row's running maximum moves, which
    rescales its accumulator; the difference relative to the baseline (Frobenius)
Refuted if: under a law a longer sequence does not have the larger max, mean and std
Sizes: cpu: 256 queries on 128 to 4096 keys, 2 heads, head_dim 64, 8 seeds; gpu: 4096 queries on 512
    to 16384 keys, 16 heads; quick: 64 queries on 128, 512 and 2048 keys, 5 seeds

    stability experiment stable_fig5 [--size cpu|gpu]
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from torch import Tensor

from attention_kernels import baseline_attention, flash_attention
from attention_kernels.testing import Shape
from experiments.kit.numerics import round_everywhere
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, mean, values_by
from experiments.kit.stated_tests import StatedTest, mean_within, monotone
from stability.metrics.deviation import deviation
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import new_figure

BLOCK = 64
LAWS = {"normal": "N(0, 1)", "uniform": "U(0, 1)"}
PUBLISHED = {"max_abs": "max", "mean_abs": "mean", "std": "std"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How many queries and heads, over which numbers of keys and how many seeds."""

    queries: int
    heads: int
    keys: tuple[int, ...]
    seeds: int = 8
    device: str = "cpu"


SIZES = {
    "quick": Settings(queries=64, heads=2, keys=(128, 512, 2048), seeds=5),
    "cpu": Settings(queries=256, heads=2, keys=(128, 256, 512, 1024, 2048, 4096)),
    "gpu": Settings(
        queries=4096, heads=16, keys=(512, 1024, 2048, 4096, 8192, 16384), device="cuda"
    ),
}


def measure(settings: Settings) -> Findings:
    """Measure each law at each number of keys and seed."""
    rows: list[dict[str, Any]] = [
        {"law": law, "keys": keys, "seed": seed, **_difference(settings, law, keys, seed)}
        for law in LAWS
        for keys in settings.keys
        for seed in range(settings.seeds)
    ]
    published = [
        _rises(f"{name}: {word} rises with each length", rows, law, metric)
        for law, name in LAWS.items()
        for metric, word in PUBLISHED.items()
    ]
    relative = [
        _rises(f"{name}: relative to the baseline it rises with each length", rows, law, "rel_fro")
        for law, name in LAWS.items()
    ]
    falls = _rises("N(0, 1): the size of out falls with each length", rows, "normal", "rms")
    longest = max(settings.keys)
    over_expected = {
        seed: moves / _expected_rescales(longest // BLOCK)
        for seed, moves in by_seed(rows, "rescales", law="normal", keys=longest).items()
    }
    as_expected = mean_within(
        "N(0, 1): rescales of the longest over 1/2 + ... + 1/n of n blocks are about 1",
        over_expected,
        unit="x",
        above=0.9,
        below=1.1,
    )
    return Findings(
        measured=_sentence(rows, settings),
        published=published,
        controls=[*relative, falls, as_expected],
        rows=rows,
        explain=partial(_explanation, rows, settings),
    )


def _difference(settings: Settings, law: str, keys: int, seed: int) -> dict[str, float]:
    """Return the figures of one set of inputs."""
    shape = Shape(1, settings.heads, settings.heads, settings.queries, keys, 64)
    q, k, v, _ = draw_inputs(law, shape, "bf16", seed, settings.device)
    flash, baseline = round_everywhere("bf16")
    plain = baseline_attention(q, k, v, numerics=baseline)
    out = flash_attention(q, k, v, numerics=flash.with_(block_q=BLOCK, block_k=BLOCK))
    found = deviation(out, plain)
    return {
        **{metric: found[metric] for metric in (*PUBLISHED, "rel_fro")},
        "rms": plain.double().square().mean().sqrt().item(),
        "rescales": rescales(q, k, block_k=BLOCK).double().mean().item(),
    }


def _rises(statement: str, rows: Rows, law: str, metric: str) -> StatedTest:
    """State of one figure that it rises, of the size of out that it falls."""
    by_keys = {
        f"{keys:g} keys": by_seed(rows, metric, law=law, keys=keys)
        for keys in sorted({row["keys"] for row in rows})
    }
    return monotone(statement, by_keys, rising=metric != "rms")


def rescales(q: Tensor, k: Tensor, *, block_k: int) -> Tensor:
    """Return how often each row's running maximum grows after its first block of `block_k` keys.

    Each time the recurrence multiplies running sum and accumulator by exp(old max - new max). q and
    k have as many heads each; the answer is int64 `(batch, heads, query_len)`. The scores are not
    rounded, which would make a few of the moves ties.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    first, *others = k.to(work).split(block_k, dim=2)
    largest = (q.to(work) @ first.mT).amax(dim=-1)
    moves = torch.zeros_like(largest, dtype=torch.int64)
    for block in others:
        largest_here = (q.to(work) @ block.mT).amax(dim=-1)
        moves += largest_here > largest
        largest = torch.maximum(largest, largest_here)
    return moves


def _expected_rescales(blocks: int) -> float:
    """Return 1/2 + ... + 1/blocks, the mean count for keys in no particular order.

    Block j then holds the largest score so far with probability 1/j.
    """
    return sum(1 / block for block in range(2, blocks + 1))


def _sentence(rows: Rows, settings: Settings) -> str:
    """Say by how much each figure grows from the shortest to the longest, and the rescales."""
    short, long = min(settings.keys), max(settings.keys)
    said = []
    for law, name in LAWS.items():
        grown = {
            word: mean(rows, metric, law=law, keys=long) / mean(rows, metric, law=law, keys=short)
            for metric, word in {**PUBLISHED, "rel_fro": "relative"}.items()
        }
        words = ", ".join(f"{word} {factor:.2g}x" for word, factor in grown.items())
        said.append(f"{name}: {words}")
    moves = [mean(rows, "rescales", law="normal", keys=keys) for keys in (short, long)]
    return (
        f"{long} over {short} keys: {'; '.join(said)}; a row rescales {moves[0]:.2g} times at "
        f"{short} keys, {moves[1]:.2g} at {long}"
    )


def _explanation(rows: Rows, settings: Settings) -> str:
    """Say what falls under N(0, 1) while the relative difference rises."""
    short, long = min(settings.keys), max(settings.keys)
    sizes = [mean(rows, "rms", law="normal", keys=keys) for keys in (short, long)]
    relative = [mean(rows, "rel_fro", law="normal", keys=keys) for keys in (short, long)]
    return (
        f"Values of either sign average out: under N(0, 1) the RMS of out falls from "
        f"{sizes[0]:.2g} at {short} keys to {sizes[1]:.2g} at {long}, and the absolute difference "
        f"with it, while the relative one rises from {relative[0]:.2g} to {relative[1]:.2g}. Under "
        "U(0, 1), where nothing averages out, see the absolute figures above."
    )


def draw(rows: Rows) -> Figure:
    """Draw the absolute figures, the relative one and the rescales over the keys."""
    figure = new_figure("column", 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    lines = {
        f"{word}, {name}": values_by(rows, "keys", metric, law=law)
        for metric, word in PUBLISHED.items()
        for law, name in LAWS.items()
    }
    draw_series(upper, lines, y="flash \N{MINUS SIGN} baseline, units of v", log="y")
    upper.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
    relative = {
        f"relative difference (%), {name}": {
            keys: [100 * value for value in values]
            for keys, values in values_by(rows, "keys", "rel_fro", law=law).items()
        }
        for law, name in LAWS.items()
    }
    moves = {"rescales of a row, N(0, 1)": values_by(rows, "keys", "rescales", law="normal")}
    draw_series(
        lower, {**relative, **moves}, x="keys; mean and range of seeds", y="per cent, or count"
    )
    lower.set_ylim(0, None)
    lower.set_xscale("log", base=2)
    lower.set_xticks(sorted({row["keys"] for row in rows}))
    lower.xaxis.set_major_formatter(ScalarFormatter())
    lower.xaxis.set_minor_locator(NullLocator())
    lower.legend(loc="upper left")
    return figure
