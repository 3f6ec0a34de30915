"""Draws the figures of docs/verdict.md: one a level, and one of the looks. `make docs` runs it.

Every curve is computed here, from attentions of this project or by simulation, but for the excess
in training, whose runs take minutes: its values are those of the table on the page.
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

# before pyplot: the figures are drawn on machines without a screen
os.environ.setdefault("MPLBACKEND", "svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from scipy.stats import t

from attention_kernels import baseline_attention, flash_attention, golden_attention
from attention_kernels.testing.faults import plant
from stability.analysis.sequential import LOOKS, look_alpha
from stability.metrics.coherence import coherence_of
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor

FOLDER = Path(__file__).parents[1]
RIGHT, WRONG, LIMIT = "#1b6ca8", "#c0392b", "#555555"
WRONGS = (WRONG, "#e08e0b", "#7d3c98")
"""One colour each, where several wrong ones are told apart."""
LOOKS_DRAWN = 12

EXCESS = {
    "nudge": [1.000, 1.002, 1.004, 1.010, 1.007],
    "flash fa2": [0.999, 1.013, 1.028, 1.025, 1.010],
    "SDPA": [1.000, 1.016, 1.030, 1.024, 0.979],
    "golden": [0.992, 0.989, 0.990, 0.996, 1.007],
    "all BF16": [1.043, 1.106, 1.163, 1.193, 1.191],
    "dv x 1.01": [1.77, 1.88, 1.79, 1.71, 1.57],
    "out x 1.003": [1.47, 2.5, 3.4, 3.9, 4.3],
}
"""Geometric means over 3 seeds at steps 10, 20, 30, 40 and 60: the table on the page."""
EXCESS_STEPS = [10, 20, 30, 40, 60]


def main() -> None:
    """Write the five figures beside this file."""
    plt.rcParams.update({"svg.hashsalt": "verdict", "font.size": 9, "axes.spines.right": False})
    for name, draw in {
        "operator": draw_operator,
        "gradient": draw_gradient,
        "training": draw_training,
        "outcome": draw_outcome,
        "looks": draw_looks,
    }.items():
        figure, axes = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
        draw(axes)
        axes.spines["top"].set_visible(False)
        # no date: the same figure has the same bytes
        figure.savefig(FOLDER / f"verdict-{name}.svg", metadata={"Date": None})
        plt.close(figure)


def draw_operator(axes: Axes) -> None:
    """Draw gain and error ratio of dq at some looks, for right attentions and planted faults."""
    names = {
        "flash fa2": flash_attention,
        "scale x 1.005": plant(flash_attention, "scale_gain"),
        "dq x 1.005": plant(flash_attention, "dq_gain"),
        "dropped key": plant(flash_attention, "dropped_key"),
    }
    columns = [GOLDEN_COLUMNS.index(name) for name in ("gain", "error_ratio")]
    for (name, attention), colour in zip(names.items(), (RIGHT, *WRONGS), strict=True):
        found = np.array([_of_dq(attention, look)[columns] for look in range(LOOKS_DRAWN)])
        axes.scatter(
            100 * found[:, 0],
            found[:, 1],
            s=14,
            label=name,
            color=colour,
        )
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.axhline(2, color=LIMIT, lw=0.8, ls="--")
    for side in (-0.1, 0.1):
        axes.axvline(side, color=LIMIT, lw=0.8, ls="--")
    axes.set_xlabel("gain of dq, %")
    axes.set_ylabel("error ratio of dq")
    axes.legend(frameon=False, fontsize=8)


def _of_dq(attention: object, look: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(look)
    draw = [torch.randn(2, 4, 64, 32, generator=generator).bfloat16() for _ in range(4)]
    results = []
    for one, dtype in ((attention, None), (baseline_attention, None), (golden_attention, "golden")):
        q, k, v, dout = (x.double() if dtype else x for x in draw)
        q.requires_grad_()
        out = one(q, k, v, causal=True)  # pyright: ignore[reportCallIssue]
        results.append(torch.autograd.grad(out, q, dout)[0])
        q.requires_grad_(False)
    return golden_tensor(*results).numpy()


def draw_gradient(axes: Axes) -> None:
    """Draw coherence and share over looks, of errors with and without a part that repeats."""
    dice = np.random.default_rng(0)
    looks = np.arange(2, 61)
    for share, colour in ((0.0, RIGHT), (0.02, WRONGS[1]), (0.06, WRONG)):
        common = dice.normal(size=400) * math.sqrt(share / (1 - share))
        errors = common + dice.normal(size=(looks[-1], 400))
        found = [coherence_of(errors[:n] @ errors[:n].T) for n in looks]
        axes.plot(looks, [one.coherence for one in found], color=colour, label=f"C, share {share}")
        axes.plot(looks, [1 + 20 * one.share for one in found], color=colour, ls=":")
    axes.axhline(1 + 20 * 0.01, color=LIMIT, lw=0.8, ls="--")
    axes.set_xlabel("looks N")
    axes.set_ylabel("C (lines);  1 + 20 f (dots)")
    axes.legend(frameon=False, fontsize=8)


def draw_training(axes: Axes) -> None:
    """Draw the excess of right and wrong arms over steps."""
    for (name, values), colour in zip(EXCESS.items(), (RIGHT,) * 4 + WRONGS, strict=True):
        axes.plot(EXCESS_STEPS, values, marker="o", ms=3, label=name, color=colour)
    axes.axhline(1.1, color=LIMIT, lw=0.8, ls="--")
    axes.axvspan(45, 60, color=LIMIT, alpha=0.1, lw=0)
    axes.set_yscale("log")
    axes.set_yticks([1, 1.1, 1.5, 2, 4], labels=["1", "1.1", "1.5", "2", "4"])
    axes.minorticks_off()
    axes.set_xlabel("step (grey: nudges have left the window)")
    axes.set_ylabel("excess E")
    axes.legend(frameon=False, fontsize=8, ncols=2)


def draw_outcome(axes: Axes) -> None:
    """Draw how often a study passes against the true difference in loss."""
    dice, margin, sd = np.random.default_rng(0), 0.005, 0.002
    true = np.linspace(-0.002, 0.008, 41)
    for look, colour in zip(LOOKS, plt.get_cmap("viridis")(np.linspace(0, 0.85, 5)), strict=True):
        values = sd * dice.normal(size=(4000, look))
        reach = t.ppf(1 - look_alpha(0.05), look - 1) * values.std(axis=1, ddof=1) / math.sqrt(look)
        passed = [float((mean + values.mean(axis=1) + reach < margin).mean()) for mean in true]
        axes.plot(1e3 * true, passed, color=colour, label=f"{look} seeds")
    axes.axvline(1e3 * margin, color=LIMIT, lw=0.8, ls="--")
    axes.set_xlabel("true difference in held-out loss, 0.001 nats (SD over seeds 2)")
    axes.set_ylabel("chance that it holds")
    axes.legend(frameon=False, fontsize=8)


def draw_looks(axes: Axes) -> None:
    """Draw how the chance of a wrong PASS grows from look to look."""
    values = np.random.default_rng(0).normal(size=(40_000, LOOKS[-1]))
    for share, label, colour in ((0.05, "5 % at each look", WRONG), (0.014, "1.4 %", RIGHT)):
        wrong, rates = np.zeros(len(values), dtype=bool), []
        for look in LOOKS:
            seen = values[:, :look]
            statistic = seen.mean(axis=1) / (seen.std(axis=1, ddof=1) / math.sqrt(look))
            wrong |= statistic < t.ppf(share, look - 1)
            rates.append(100 * wrong.mean())
        axes.plot(LOOKS, rates, marker="o", ms=3, color=colour, label=label)
    axes.axhline(5, color=LIMIT, lw=0.8, ls="--")
    axes.set_ylim(0)
    axes.set_xticks(LOOKS)
    axes.set_xlabel("seeds at the look")
    axes.set_ylabel("wrong PASS so far, %")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
