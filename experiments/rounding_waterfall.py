"""Which rounding point carries the error of out, dq, dk and dv, by profile.

Claim: the error enters the gradients by O in delta = rowsum(dO O), and O by P V in BF16
Source: arXiv 2510.04212
Published: the carrier is delta; cured by O in FP32, or by P V in FP32; V of one sign; no figures.
    arXiv 2405.02803 lowers every step and names none
Varies: the one point that rounds as in its profile while all others are FP64; the profile; the
    inputs; the seed
Measured: relative error (Frobenius) of out, dq, dk and dv against the golden, causal: of the whole
    profile, of each point alone, and of the whole profile with O (accumulator and output) in FP64.
    Not here: training; the repeated maxima that bias O (see biased_rounding); the third cure, delta
    = rowsum(dP P), for which there is no dial
Refuted if: with V of one sign and P V (accumulator) in BF16 another point makes more of dq's error,
    or O in FP64 leaves half of it
Sizes: cpu: length 512, 2 heads, head_dim 64, 12 seeds; gpu: length 1024, 12 heads (GPT-2 small);
    quick: length 256, 5 seeds

    stability experiment rounding_waterfall [--size cpu|gpu]
"""

import math
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, over
from experiments.kit.stated_tests import StatedTest, mean_within, ratio_within
from stability.probe.attention_inputs import draw_inputs
from stability.probe.microbenchmark import POINTS, Problem, waterfall
from stability.report.paper.style import GREY, new_figure

RESULTS = ("out", "dq", "dk", "dv")
LAWS = {"normal": "N(0, 1)", "uniform": "U(0, 1): one sign"}
WIDE_O = (("accumulator", "fp64"), ("output", "fp64"))
ARMS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "all_bf16": ("all_bf16", ()),
    "fa2": ("fa2", ()),
    "fa2, P V bf16": ("fa2", (("accumulator", "bf16"),)),
    "fa3_fp8": ("fa3_fp8", ()),
}
"""By name: a profile, and what is changed in it."""
FAILING = "fa2, P V bf16"
"""What arXiv 2510.04212 sees fail."""
CARRIERS: dict[str, dict[str, tuple[str, ...]]] = {
    "all_bf16": {"out": ("scores", "statistics"), "dq": ("lse",), "dk": ("lse",), "dv": ("lse",)},
    "fa2": {
        "out": ("output", "probabilities"),
        "dq": ("ds", "gradients"),
        "dk": ("ds", "gradients"),
        "dv": ("probabilities", "gradients"),
    },
    "fa2, P V bf16": {
        "out": ("accumulator",),
        "dq": ("ds", "gradients"),
        "dk": ("ds", "gradients"),
        "dv": ("probabilities", "gradients"),
    },
    "fa3_fp8": dict.fromkeys(RESULTS, ("operands",)),
}
"""Points that each make more of a result's error than any other does, on N(0, 1); ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large, and how many seeds."""

    length: int
    heads: int
    seeds: int
    device: str = "cpu"


SIZES = {
    "quick": Settings(length=256, heads=2, seeds=5),
    "cpu": Settings(length=512, heads=2, seeds=12),
    "gpu": Settings(length=1024, heads=12, seeds=8, device="cuda"),
}


def measure(settings: Settings) -> Findings:
    """Measure each profile on each law at each seed."""
    rows = [
        {"inputs": law, "arm": arm, "seed": seed, "what": what, **errors}
        for law in LAWS
        for arm in ARMS
        for seed in range(settings.seeds)
        for what, errors in _errors(settings, law, arm, seed).items()
    ]
    return Findings(
        measured=_measured(rows),
        published=_published(rows),
        controls=_controls(rows),
        rows=rows,
        explain=partial(_explanation, rows),
    )


def _errors(settings: Settings, law: str, arm: str, seed: int) -> dict[str, dict[str, float]]:
    """Return by result the error of the whole, of each point alone, and of the whole, O wide."""
    profile, changes = ARMS[arm]

    def problem(*more: tuple[str, Any]) -> Problem:
        return Problem(
            profile=profile,
            length=settings.length,
            heads=settings.heads,
            distribution=law,
            seed=seed,
            causal=True,
            # the twin on any device: tiles in FP64 do not fit a GPU's shared memory
            engine="twin",
            changes=(*changes, *more),
        )

    inputs = draw_inputs(law, problem().shape(), "bf16", seed, settings.device)
    found = {}
    for step in waterfall(problem(), inputs):
        if step.change == "raised":
            break
        found[step.point or "whole"] = step.errors
    found["wide_o"] = next(waterfall(problem(*WIDE_O), inputs)).errors
    return {what: {name: errors[what] for name, errors in found.items()} for what in RESULTS}


def _measured(rows: Rows) -> str:
    alone = fmean(_share(rows, "uniform", FAILING, "dq", "accumulator").values())
    left = {law: fmean(_share(rows, law, FAILING, "dq", "wide_o").values()) for law in LAWS}
    return (
        f"on U(0, 1) P V in BF16 alone makes {alone:.2f} of dq's error, and O in FP64 "
        f"leaves {left['uniform']:.2f}; on N(0, 1) it leaves {left['normal']:.2f}"
    )


def _explanation(rows: Rows) -> str:
    """Say what the error of dq is made of once P V is FP32."""
    output, wide = (
        fmean(_share(rows, "uniform", "fa2", "dq", name).values()) for name in ("output", "wide_o")
    )
    return (
        "With P V in FP32 O is still stored in BF16, and delta reads that: alone it makes "
        f"{output:.2f} of what is left of dq's error, and with O in FP64 as well {wide:.2f} of it "
        "is left. The source counts exploding losses, of which these errors know nothing."
    )


def _share(rows: Rows, law: str, arm: str, what: str, name: str) -> dict[int, float]:
    """Return by seed what one point, or the whole with O wide, makes of the whole error."""
    only = {"inputs": law, "arm": arm, "what": what}
    return over(by_seed(rows, name, **only), by_seed(rows, "whole", **only))


def _with_wide_p_v(rows: Rows) -> tuple[dict[int, float], dict[int, float]]:
    """Return by seed the whole error of dq with P V in FP32, and with P V in BF16, on U(0, 1)."""
    wide, failing = (
        by_seed(rows, "whole", inputs="uniform", arm=arm, what="dq") for arm in ("fa2", FAILING)
    )
    return wide, failing


def _published(rows: Rows) -> list[StatedTest]:
    """State what carries dq's error where V has one sign, and what removes it."""
    shares = {point: _share(rows, "uniform", FAILING, "dq", point) for point in POINTS}
    others = [share for point, share in shares.items() if point != "accumulator"]
    rest = {seed: max(share[seed] for share in others) for seed in others[0]}
    wide = _share(rows, "uniform", FAILING, "dq", "wide_o")
    return [
        ratio_within(
            "on U(0, 1), where V has one sign, P V in BF16 makes more of dq's error than any other "
            "point",
            shares["accumulator"],
            rest,
            above=1,
        ),
        mean_within("O in FP64 leaves less than half of it", wide, unit="", below=0.5),
        ratio_within("P V in FP32 leaves less than half of it", *_with_wide_p_v(rows), below=0.5),
    ]


def _controls(rows: Rows) -> list[StatedTest]:
    """State what each cure leaves, and which points carry the error of every profile."""
    wide_fa2 = _share(rows, "uniform", "fa2", "dq", "wide_o")
    wide_dk = _share(rows, "uniform", FAILING, "dk", "wide_o")
    wide_normal = _share(rows, "normal", FAILING, "dq", "wide_o")
    share = partial(mean_within, unit="")
    return [
        share("P V in FP32 leaves less of it", over(*_with_wide_p_v(rows)), below=1),
        share("and O in FP64 as well less than a third of that", wide_fa2, below=1 / 3),
        share("O in FP64 leaves less of dk's error as well", wide_dk, below=1),
        share("on N(0, 1) O in FP64 leaves over 0.8 of dq's error", wide_normal, above=0.8),
        *(_carried(rows, arm) for arm in ARMS),
        share(
            "squares of the points' errors add to the whole's; the worst of all profiles",
            _squares(rows),
            above=0.8,
            below=1.25,
        ),
    ]


def _carried(rows: Rows, arm: str) -> StatedTest:
    """State that each carrier makes more than any other point, at the result where it is least."""
    margins: list[dict[int, float]] = []
    for what, carriers in CARRIERS[arm].items():
        shares = {point: _share(rows, "normal", arm, what, point) for point in POINTS}
        rest = [share for point, share in shares.items() if point not in carriers]
        margins.append(
            {
                seed: min(shares[point][seed] for point in carriers) / max(x[seed] for x in rest)
                for seed in rest[0]
            }
        )
    least = {seed: min(margin[seed] for margin in margins) for seed in margins[0]}
    named = "; ".join(f"{what}: {', '.join(CARRIERS[arm][what])}" for what in RESULTS)
    statement = f"{arm}: no other point makes as much as ({named})"
    return ratio_within(statement, least, 1.0, above=1)


def _squares(rows: Rows) -> dict[int, float]:
    """Return by seed the sum of squares over the whole's that is furthest from 1, on N(0, 1)."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        if row["inputs"] == "normal":
            squares = sum(row[point] ** 2 for point in POINTS)
            sums.setdefault(row["seed"], []).append(squares / row["whole"] ** 2)
    return {seed: max(found, key=lambda x: abs(math.log(x))) for seed, found in sums.items()}


def draw(rows: Rows) -> Figure:
    """Draw what each point makes of the whole error, mean of the seeds, a panel a law."""
    figure = new_figure("column", 5.0)
    panels = figure.subplots(len(LAWS), 1, sharex=True)
    columns = [(arm, what) for arm in ARMS for what in RESULTS]
    for axes, (law, label) in zip(panels, LAWS.items(), strict=True):
        shares = [
            [fmean(_share(rows, law, *column, point).values()) for column in columns]
            for point in POINTS
        ]
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.grid(False)
        axes.set_title(label)
        axes.set_yticks(range(len(POINTS)), POINTS, fontsize=6)
        for edge in range(1, len(ARMS)):
            axes.axvline(edge * len(RESULTS) - 0.5, color=GREY, linewidth=0.6)
    panels[-1].set_xticks(range(len(columns)), [what for _, what in columns], rotation=90)
    for place, arm in enumerate(ARMS):
        name = arm.replace(", ", ",\n")
        middle = (place + 0.5) / len(ARMS)
        panels[-1].text(middle, -0.22, name, transform=panels[-1].transAxes, ha="center", va="top")
    bar = figure.colorbar(image, ax=panels, aspect=30, pad=0.02)
    bar.set_label("error of the point alone / of the whole profile")
    return figure
