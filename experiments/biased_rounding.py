"""Ties in P bias the rounding of P v, and no absolute error tells; which signal sees a bias first.

Claim: in rows whose P is exactly 1 more than once P v is rounded away from zero where v has one
    sign, and delta = rowsum(dO * O) carries that on; the exploding loss is the gpu size's
Source: arXiv 2510.04212
Published: each alone cures: O in FP32; P v in FP32; delta = rowsum(dP * P); beta * r for a repeated
    maximum r > 0, beta in 2 to 8. The size of the bias is not published; derived in this project,
    not published: 0.202 ULP, mean absolute error 0.25 with and without it
Varies: first, at the operator: ties, residuals, the sign of v, beta, and what is rounded to BF16 (P
    v alone, or P, P v and O). The cure "O in FP32" is taken to mean that O is computed in FP32: an
    O that is only stored in FP32, after a P v in BF16, keeps the bias. Then, in training: out of
    one layer of a GPT is made 0.2 ULP too large on average. Beside it run a coin (errors as large,
    without bias) and a nudge (each weight moved by 1 ULP of FP32), all on the clean arm's batches
Measured: mean signed and mean absolute error of out against FP64, in ULPs of BF16, with all 32 keys
    in one tile and statistics in FP32; the error of delta, in ULPs of out. In training: bias_ulp of
    each layer, and the gaps to the clean arm of W_Q's spectral norms and of the loss; a signal has
    noticed when its gap exceeds the nudge's at three looks in a row
Refuted if: the bias has not the sign of v, or is beyond 0.02 ULP without ties or with a cure
Sizes: cpu: 96 heads of 64 rows, 12 seeds; a GPT of 4 layers, width 64, context 64, 100 steps, not
    trained to where a loss explodes; gpu: 512 heads, 5 seeds; GPT-2 small, context 1024, AdamW
    0.9/0.95, lr 1e-3, no weight decay, for 10,000 steps at beta 1 and 7 (ours are text, batch 16,
    warm-up and no clipping); quick: 48 heads, 5 seeds; 2 layers, 20 steps

    stability experiment biased_rounding [--size cpu|gpu]
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.kit.biased_training import (
    SIGNALS,
    Recipe,
    explosion,
    first_bias,
    load_blocks,
    noticed,
    signal_rows,
    train,
    training_controls,
    training_in_words,
    when_noticed,
)
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed, mean, values_by
from experiments.kit.stated_tests import StatedTest, equal, mean_within, ratio_within
from experiments.kit.tie_cases import ALL, ALONE, DOWN, UP, beta_case, tie_rows
from stability.config.schema import AttentionConfig, DataConfig, ModelConfig, OptimizerConfig
from stability.probe.attention_registry import resolve_attention
from stability.report.paper.style import GREY, log_axis, new_figure, print_styles


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How many heads, betas and seeds; how the GPT is trained; steps of the published recipe."""

    heads: int
    betas: tuple[int, ...] = tuple(range(2, 9))
    seeds: int
    recipe: Recipe
    failing_steps: int = 0


ADAMW = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=20)
TINY = ModelConfig(depth=2, width=32, heads=2, context=32)
SMALL = ModelConfig(depth=4, width=64, heads=4, context=64)
GPT2 = ModelConfig(depth=12, width=768, heads=12, context=1024, vocab_size=50257)
ON_CPU = Recipe(model=SMALL, optimizer=ADAMW, batch_size=8, steps=100, probe_every=10)
ON_GPU = Recipe(
    model=GPT2,
    optimizer=replace(ADAMW, warmup_steps=500),
    data=DataConfig(source="Salesforce/wikitext:wikitext-103-raw-v1", tokenizer="gpt2"),
    batch_size=16,
    steps=300,
    probe_every=20,
    device="cuda",
)
ON_QUICK = replace(ON_CPU, model=TINY, batch_size=4, steps=20, probe_every=4)
SIZES = {
    "quick": Settings(heads=48, betas=(2, 7), seeds=5, recipe=ON_QUICK),
    "cpu": Settings(heads=96, seeds=12, recipe=ON_CPU),
    "gpu": Settings(heads=512, seeds=5, recipe=ON_GPU, failing_steps=10_000),
}


def measure(settings: Settings) -> Findings:
    """Measure the bias of tied rows, and what notices a bias in training."""
    recipe, seeds = settings.recipe, range(settings.seeds)
    ties = tie_rows(
        heads=settings.heads, betas=settings.betas, seeds=settings.seeds, device=recipe.device
    )
    blocks = load_blocks(recipe)
    trained = [row for seed in seeds for row in signal_rows(recipe, blocks, seed)]
    failing = list(_failing(settings, blocks)) if settings.failing_steps else []
    worst = max(map(beta_case, settings.betas), key=lambda case: abs(_bias(ties, case, ALL)))
    return Findings(
        measured=f"{_ties_in_words(ties, worst)}. {training_in_words(trained)}",
        published=[*_published(ties, worst), *_on_failing(failing)],
        controls=[*_controls(ties, worst), *training_controls(trained)],
        rows=[
            {"part": part, **row}
            for part, rows in (("ties", ties), ("training", trained), ("failing", failing))
            for row in rows
        ],
    )


def _failing(settings: Settings, blocks: Tensor) -> Iterator[dict[str, Any]]:
    """Train the published recipe at beta 1 and 7: when a bias is told, when the loss explodes."""
    recipe = replace(settings.recipe, steps=settings.failing_steps, probe_every=500)
    for beta in (1, 7):
        changes: dict[str, Any] = {"repeated_max_beta": beta}
        config = AttentionConfig(implementation="flash", profile="stabilised", numerics=changes)
        attention = [resolve_attention(config, torch.device(recipe.device))] * recipe.model.depth
        for seed in range(settings.seeds):
            course = train(recipe, attention, blocks, seed=seed)
            told = first_bias(course, recipe.model.depth)
            end = {"explodes": explosion(course.losses), "last_loss": course.losses[-1]}
            yield {"beta": beta, "seed": seed, "bias_told": told, **end}


def _bias(rows: Rows, case: str, points: str) -> float:
    return mean(rows, "bias_ulp", case=case, points=points)


def _of(rows: Rows, case: str, points: str, figure: str = "bias_ulp") -> BySeed:
    return by_seed(rows, figure, case=case, points=points)


def _published(rows: Rows, worst: str) -> list[StatedTest]:
    """State where out and delta are biased, and that each cure removes it."""
    of = partial(_of, rows)
    ulp = partial(mean_within, unit="ULP")
    none = partial(ulp, above=-0.02, below=0.02)
    single, mixed = "a single one", "mixed residuals"
    return [
        ulp(f"{UP}; {ALL} in BF16: out is too large", of(UP, ALL), above=0),
        ulp(f"{DOWN}; {ALL} in BF16: out is too small", of(DOWN, ALL), below=0),
        none(f"{single}; {ALONE} in BF16: no bias", of(single, ALONE)),
        none(f"residuals of both signs; {ALONE} in BF16: no bias", of(mixed, ALONE)),
        ulp(f"{UP}: delta = rowsum(dO * O) is too large", of(UP, ALL, "delta_ulp"), above=0),
        none("P v in FP32: no bias of delta", of("P v in FP32", ALL, "delta_ulp")),
        none("O, and P v, in FP32: no bias of delta", of("P v, O in FP32", ALL, "delta_ulp")),
        none("delta = rowsum(dP * P): no bias of delta", of(UP, ALL, "delta_from_p_ulp")),
        none(f"each beta: no bias of out; the worst, {worst}", of(worst, ALL)),
    ]


def _controls(rows: Rows, worst: str) -> list[StatedTest]:
    """State the size of the bias as derived, and that absolute errors do not show it."""
    of = partial(_of, rows)
    ulp = partial(mean_within, unit="ULP")
    none = partial(ulp, above=-0.02, below=0.02)
    all_three, alone = (
        (of(worst, points, "mean_abs_ulp"), of(UP, points, "mean_abs_ulp"))
        for points in (ALL, ALONE)
    )
    return [
        ulp(f"{UP}; {ALONE}: 0.202", of(UP, ALONE), above=0.182, below=0.222),
        none(f"no residuals; {ALONE}: no bias", of("no residuals", ALONE)),
        none(f"both signs; P and {ALONE}: no bias", of("mixed residuals, O FP32", ALL)),
        ratio_within(
            f"{ALONE}: mean |error|, {worst} over biased, is about 1", *alone, above=0.8, below=1.2
        ),
        ratio_within(f"{ALL}: it is above 1, the biased is the better", *all_three, above=1),
    ]


def _on_failing(rows: Rows) -> list[StatedTest]:
    """State what the published recipe does at either beta; nothing where it was not trained."""
    if not rows:
        return []
    calm = {beta: [r["explodes"] is None for r in rows if r["beta"] == beta] for beta in (1, 7)}
    return [
        equal("beta 1: the loss explodes, in each seed", [float(each) for each in calm[1]]),
        equal("cure: beta 7: it does not", [float(not each) for each in calm[7]]),
    ]


def _ties_in_words(rows: Rows, worst: str) -> str:
    said = []
    for points in (ALONE, ALL):
        up, down, beta = (_bias(rows, case, points) for case in (UP, DOWN, worst))
        size, cured = (mean(rows, "mean_abs_ulp", case=case, points=points) for case in (UP, worst))
        said.append(
            f"{points} in BF16: bias {up:+.3f} ULP for v > 0, {down:+.3f} for v < 0, mean absolute "
            f"error {size:.2f}; at {worst}, the worst, {beta:+.4f} and {cured:.2f}"
        )
    return ". ".join(said)


def draw(rows: Rows) -> Figure:
    """Draw the bias of each case, and three signals of the biased layer over steps."""
    figure = new_figure("column", 5.0)
    upper, lower = figure.subplots(2, 1, height_ratios=(1.4, 1))
    _draw_ties(upper, [row for row in rows if row["part"] == "ties"])
    _draw_training(lower, [row for row in rows if row["part"] == "training"])
    return figure


def _draw_ties(axes: Axes, rows: Rows) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    styles = print_styles(["", ALONE, ALL])
    for shift, points in ((-0.18, ALONE), (0.18, ALL)):
        style = styles[points]
        for what, figure, face in (
            ("bias", "bias_ulp", style.colour),
            ("mean |error|", "mean_abs_ulp", "white"),
        ):
            axes.plot(
                [mean(rows, figure, case=case, points=points) for case in cases],
                [place + shift for place in range(len(cases))],
                linestyle="none",
                marker=style.marker,
                markersize=3.5,
                color=style.colour,
                markerfacecolor=face,
                label=f"{what}; {points} in BF16",
            )
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("error of out / ULP of BF16")
    axes.figure.legend(loc="outside upper center", ncols=2, columnspacing=1.0, handletextpad=0.2)


def _draw_training(axes: Axes, rows: Rows) -> None:
    signals = {f"{name}: {when_noticed(rows, 'biased', at)}": at for at, name in SIGNALS.items()}
    series = {
        label: values_by([row for row in rows if row[at]], "step", at, arm="biased")
        for label, at in signals.items()
    }
    others = [f"style {index}" for index in range(3)]
    draw_series(axes, series, y="signal / noise; mean, range", first_style=len(others))
    styles = print_styles([*others, *series])
    for label, at in signals.items():
        step = noticed(rows, "biased", at)
        if step is not None:
            edge = axes.get_xaxis_transform()
            colour = styles[label].colour
            axes.plot([step], [1.0], "v", color=colour, transform=edge, clip_on=False)
    log_axis(axes, "y")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.set_xlabel("step; \N{BLACK DOWN-POINTING TRIANGLE} first told")
    axes.legend(loc="lower center", bbox_to_anchor=(0.42, 1.02))
