"""Weights of flash against baseline attention through training.

Claim: the difference between weights trained with flash and with baseline attention grows through
    training, its maximum and its Wasserstein distance
Source: arXiv 2405.02803, figure 7
Published: both grow; the values exist as an image only, model size and steps are not published
Varies: the attention (flash with every point in BF16, as the source rounds; `fa2`, whose statistics
    and accumulators are FP32; baseline), a repeat, 1 ULP of the initial weights; the seed
Measured: max |difference| and W1 of all weights of separate, otherwise identical BF16-mixed runs
Refuted if: either is not larger at each snapshot than at the one before
Sizes: cpu: configs/stable.yaml, 0.37 M weights, 200 steps, 5 seeds; gpu: 33.5 M weights, 2000
    steps, 5 seeds, about 50 GB of weights on disk; quick: 7,900 weights, 20 steps, 5 seeds

    stability experiment stable_fig7 [--size cpu|gpu]

Runs are kept in runs/experiments and shared with stable_fig8; one that was cut short goes on.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, values_by
from experiments.kit.stated_tests import StatedTest, equal, monotone, ratio_within
from experiments.kit.study import KEPT, STABLE, at_step, drift_of_pairs, shipped_study
from stability.report.paper.style import log_axis, new_figure

FLASH = {"flash, all BF16": "flash_all_bf16", "flash, fa2": "flash_fa2"}
CONTROLS = {"1-ULP nudge": "nudge", "repeat": "rerun"}
METRICS = {"w1": "W1", "max_abs": "max"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What of the study's base is changed, the snapshots compared, and where runs are kept."""

    overrides: Mapping[str, str]
    grows_over: tuple[int, ...]
    folder: str
    """Where runs are kept; "" is a temporary one."""
    jobs: int = 1


SIZES = {
    "quick": Settings(overrides=STABLE["quick"], grows_over=(1, 2, 5, 10, 20), folder=""),
    "cpu": Settings(
        overrides=STABLE["cpu"], grows_over=(1, 2, 5, 10, 20, 50, 100, 200), folder=KEPT, jobs=2
    ),
    "gpu": Settings(
        overrides=STABLE["gpu"],
        grows_over=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        folder=KEPT,
    ),
}


def measure(settings: Settings) -> Findings:
    """Train what has not been trained yet, and compare the weights at every snapshot."""
    study = shipped_study("stable", settings.overrides)
    pairs = {name: (arm, "baseline") for name, arm in (FLASH | CONTROLS).items()}
    rows = drift_of_pairs(study, pairs, settings.folder, settings.jobs)
    first, last = settings.grows_over[0], settings.grows_over[-1]
    nudge, harsh = (at_step(rows, name, "w1", last) for name in ("1-ULP nudge", "flash, all BF16"))
    optimizer = study.base.optimizer
    share = sum(nudge.values()) / sum(harsh.values())
    return Findings(
        measured=f"{'; '.join(_course(rows, name, first, last) for name in FLASH)}; "
        f"1-ULP nudge: {100 * share:.0f} % of the W1 of flash, all BF16, at step {last}",
        published=[
            monotone(
                f"{name}: {title} grows from each snapshot to the next",
                {f"step {at}": at_step(rows, name, metric, at) for at in settings.grows_over},
                rising=True,
            )
            for name in FLASH
            for metric, title in METRICS.items()
        ],
        controls=_controls(rows, first, last, 2 * optimizer.lr / optimizer.warmup_steps),
        rows=rows,
        explanation=_explanation(rows, settings),
    )


def _controls(rows: Rows, first: int, last: int, turned_round: float) -> list[StatedTest]:
    """State what has nothing to do with flash attention, or with Adam alone.

    Adam's first update is the learning rate times the gradient's sign, so that a weight whose sign
    is turned round ends `turned_round`, two learning rates, away.
    """
    repeats = [row[metric] for row in rows if row["pair"] == "repeat" for metric in METRICS]
    nudge = [at_step(rows, "1-ULP nudge", "w1", step) for step in (last, first)]
    return [
        equal("a repeat differs from the baseline by nothing", repeats),
        ratio_within(
            f"1-ULP nudge: W1 at step {last} is over ten times that at step {first}, with no "
            "flash attention",
            *nudge,
            above=10.0,
        ),
        ratio_within(
            f"flash, all BF16: max at step {first} is a sign of Adam's first update turned "
            "round, twice the learning rate",
            at_step(rows, "flash, all BF16", "max_abs", first),
            turned_round,
            above=0.8,
            below=1.01,
        ),
    ]


def _explanation(rows: Rows, settings: Settings) -> str:
    """Say how far max and W1 of the harshest flash go in the first and in the second half."""
    points = settings.grows_over
    middle = points[len(points) // 2]
    said = []
    for start, end in ((points[0], middle), (middle, points[-1])):
        w1, largest = (
            statistics.fmean(at_step(rows, "flash, all BF16", metric, end).values())
            / statistics.fmean(at_step(rows, "flash, all BF16", metric, start).values())
            for metric in METRICS
        )
        said.append(f"from step {start} to {end} max grows {largest:.2g}x, W1 {w1:.2g}x")
    return (
        "max is that of one weight, at first one whose gradient's sign the rounding turned round: "
        f"Adam makes it a whole step each way. {'; '.join(said)}"
    )


def _course(rows: Rows, name: str, first: int, last: int) -> str:
    """Return the means over seeds at the first and last step, in words."""
    said = []
    for metric, title in METRICS.items():
        ends = [at_step(rows, name, metric, at) for at in (first, last)]
        start, end = (statistics.fmean(values.values()) for values in ends)
        said.append(f"{title} {start:.2g} to {end:.2g}")
    return f"{name}: {', '.join(said)}, steps {first} to {last}"


def draw(rows: Rows) -> Figure:
    """Draw max and W1 over steps; the repeat, 0 throughout, has no place on a log axis."""
    figure = new_figure("column", 3.6)
    panels = figure.subplots(2, sharex=True)
    for axes, (metric, title) in zip(panels, METRICS.items(), strict=True):
        trained = [row for row in rows if row["step"] > 0]
        series = {
            name: values_by(trained, "step", metric, pair=name) for name in (*FLASH, "1-ULP nudge")
        }
        draw_series(axes, series, y=f"{title} difference, weight units", log="y")
    log_axis(panels[-1], "x")
    panels[-1].set_xlabel("updates made; mean and range of seeds")
    panels[0].legend(loc="lower right")
    return figure
