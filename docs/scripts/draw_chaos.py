"""Draws `docs/chaos.svg`: how far runs drift apart over steps, from an experiment's record.

Nothing is trained: the values are those of `experiments/results/stable_fig8.cpu.json`, of which the
page's table has a few too. `make docs` runs it.
"""

import json
import os
from pathlib import Path
from statistics import geometric_mean

# before pyplot: the figure is drawn on machines without a screen
os.environ.setdefault("MPLBACKEND", "svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "experiments" / "results" / "stable_fig8.cpu.json"
PICTURE = ROOT / "docs" / "chaos.svg"

STYLES = {
    "two inits": ("another initialisation", "#7d3c98", "-"),
    "BF16 vs FP32": ("BF16 against FP32", "#c0392b", "-"),
    "flash, all BF16": ("flash, every point in BF16", "#e08e0b", "-"),
    "flash, fa2": ("flash, fa2", "#1b6ca8", "-"),
    "1-ULP nudge": ("nudge of 1 ULP", "#222222", "--"),
    "flash, all FP32": ("flash against plain, both in FP32", "#2e8b57", "-"),
}
"""The pairs that are drawn, by their names in the record: label, colour, line."""


def drifts() -> dict[str, dict[int, float]]:
    """Return of each pair the geometric mean over seeds of the relative L2 drift, by step.

    Steps at which the two runs of a seed are equal are left out.
    """
    rows = json.loads(RECORD.read_text())["rows"]
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        found.setdefault(row["pair"], {}).setdefault(row["step"], []).append(row["rel_l2"])
    return {
        pair: {step: geometric_mean(x) for step, x in sorted(steps.items()) if min(x) > 0}
        for pair, steps in found.items()
    }


def main() -> None:
    """Write the figure."""
    plt.rcParams.update({"svg.hashsalt": "chaos", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    found = drifts()
    for pair, (label, colour, line) in STYLES.items():
        values = found[pair]
        axes.plot([*values], [*values.values()], line, color=colour, label=label, marker=".")
    axes.set(yscale="log", xlabel="step", ylabel="relative L2 drift")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    # no date: the same figure has the same bytes
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
