"""Four arms that tell which signal of a training sees a bias: clean, biased, coin and nudged.

In one layer of the biased arm out is `SHARE` of an ULP too large on average (`injected_bias`); the
coin errs as far there, with no bias; the nudge moves every initial weight by 1 ULP of FP32 and has
the clean attention. Batches and all else are the same. A signal's gap is its distance from the
clean arm; the nudge's is one that means nothing. Leaves out the loop (`replayed`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from experiments.kit.injected_bias import Move, injected_bias
from experiments.kit.replay import Course, Recipe, train
from experiments.kit.rows import first_notice
from stability.analysis.stated_tests import StatedTest, equal, every, mean_within
from stability.records.metric_names import deviation_name, head_part, watch_name

__all__ = [
    "ARMS",
    "SIGNALS",
    "explosion",
    "first_bias",
    "noticed",
    "signal_rows",
    "training_in_words",
    "training_tests",
    "when_noticed",
]

SHARE = 0.2
"""Of an ULP of BF16."""
ARMS: dict[str, tuple[float, Move, int]] = {
    "clean": (0.0, "up", 0),
    "biased": (SHARE, "up", 0),
    "coin": (SHARE, "coin", 0),
    "nudge": (0.0, "up", 1),
}
"""Share of an ULP in the one layer, where to, and ULPs of the nudge."""
STANDARD_ERRORS = 5.0
"""A bias is noticed above so many of its own."""
SIGNALS = {
    "bias": f"|bias_ulp| / {STANDARD_ERRORS:g} s.e.",
    "norm": "norms of W_Q, gap / nudge's",
    "loss": "loss, gap / nudge's",
}
"""What a row has of each signal; above 1 it tells."""

Rows = Sequence[Mapping[str, Any]]


def signal_rows(recipe: Recipe, blocks: Tensor, seed: int) -> list[dict[str, Any]]:
    """Train the four arms of a seed and return a row for each arm and probed step.

    `bias_ulp` and `error_ratio` are of the injected layer, the middle one; `bias` is |bias_ulp|
    over `STANDARD_ERRORS`, `elsewhere` the largest such of the other layers. `norm` and `loss` are
    gaps over those of the nudge, NaN where that has none: of W_Q's spectral norms in the injected
    layer, root mean square over heads, and of the losses, over the steps since the last look.
    `norm_gap`, and `loss_gap` in nats, are the gaps themselves.
    """
    depth = recipe.model.depth
    layer = depth // 2
    clean = injected_bias(0.0)
    courses = {}
    for arm, (share, move, nudge_ulps) in ARMS.items():
        there = injected_bias(share, move)
        attention = [there if index == layer else clean for index in range(depth)]
        courses[arm] = train(recipe, attention, blocks, seed=seed, nudge_ulps=nudge_ulps)
    rows = []
    for step in courses["clean"].probed:
        gaps = {
            arm: _gaps(course, courses["clean"], step, layer, recipe)
            for arm, course in courses.items()
        }
        rows += [
            {"arm": arm, "seed": seed, "step": step}
            | _biases(course.probed[step], layer, depth)
            | {f"{name}_gap": gap for name, gap in gaps[arm].items()}
            | {name: gap / (gaps["nudge"][name] or math.nan) for name, gap in gaps[arm].items()}
            for arm, course in courses.items()
        ]
    return rows


def _biases(metrics: Mapping[str, float], layer: int, depth: int) -> dict[str, float]:
    sure = [_sureness(metrics, index) for index in range(depth)]
    return {
        "bias_ulp": metrics[_name(layer, "bias_ulp")],
        "error_ratio": metrics[_name(layer, "error_ratio")],
        "bias": sure.pop(layer),
        "elsewhere": max(sure),
    }


def _sureness(metrics: Mapping[str, float], layer: int) -> float:
    """Return |bias_ulp| over `STANDARD_ERRORS`."""
    bias, error = (metrics[_name(layer, metric)] for metric in ("bias_ulp", "bias_ulp_se"))
    return abs(bias) / (STANDARD_ERRORS * error) if bias else 0.0


def _name(layer: int, metric: str) -> str:
    return deviation_name(f"layer_{layer}", "out", metric)


def _gaps(course: Course, clean: Course, step: int, layer: int, recipe: Recipe) -> dict[str, float]:
    names = [
        watch_name("query_norm", layer=f"layer_{layer}", part=head_part(head))
        for head in range(recipe.model.heads)
    ]
    norms = [course.probed[step][name] - clean.probed[step][name] for name in names]
    since = range(max(0, step - recipe.probe_every + 1), step + 1)
    losses = [course.losses[at] - clean.losses[at] for at in since]
    return {"norm": _rms(norms), "loss": _rms(losses)}


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def noticed(rows: Rows, arm: str, signal: str) -> int | None:
    """Return the step from which `signal`, `bias`, `norm` or `loss`, tells in `arm`, or None."""
    ratios: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["arm"] == arm:
            ratios.setdefault(row["step"], {})[row["seed"]] = float(row[signal])
    return first_notice(ratios)


def when_noticed(rows: Rows, arm: str, signal: str) -> str:
    """Return `noticed` in words."""
    step = noticed(rows, arm, signal)
    return "never" if step is None else f"from step {step}"


def training_tests(rows: Rows) -> list[StatedTest]:
    """State what an instrument that sees a bias must see; all of them are controls."""
    biased = [row for row in rows if row["arm"] == "biased"]
    start = [row for row in biased if row["step"] == 0]
    alarms = [row["elsewhere"] for row in rows]
    alarms += [row["bias"] for row in rows if row["arm"] != "biased"]
    within, always = partial(mean_within, control=True), partial(every, control=True)
    return [
        within(
            f"{SHARE} ULP in a layer: bias_ulp measures it at step 0",
            {row["seed"]: row["bias_ulp"] for row in start},
            unit="ULP",
            above=0.75 * SHARE,
            below=1.25 * SHARE,
        ),
        within(
            "its error over fa2's, both against FP64, is below the 2 that kernel suites allow",
            {row["seed"]: row["error_ratio"] for row in start},
            unit="x",
            below=2,
        ),
        always(
            f"there |bias_ulp| is above {STANDARD_ERRORS:g} standard errors at every look",
            [row["bias"] * STANDARD_ERRORS for row in biased],
            unit="s.e.",
            above=STANDARD_ERRORS,
        ),
        always(
            "in no other layer, and in no other arm, is it at any look",
            [ratio * STANDARD_ERRORS for ratio in alarms],
            unit="s.e.",
            below=STANDARD_ERRORS,
        ),
        equal(
            "of as large an error with no bias no signal tells",
            [float(noticed(rows, "coin", signal) is not None) for signal in SIGNALS],
            control=True,
        ),
    ]


def training_in_words(rows: Rows) -> str:
    """Return from which step on each signal tells the bias, and the coin."""
    said = {arm: [when_noticed(rows, arm, signal) for signal in SIGNALS] for arm in ARMS}
    bias, norm, loss = said["biased"]
    return (
        f"{SHARE} ULP in a layer of a GPT, looked at to step {max(row['step'] for row in rows)}: "
        f"bias_ulp tells {bias}, norms of W_Q {norm}, the loss {loss}; "
        f"as far with no bias: {', '.join(said['coin'])}"
    )


def first_bias(course: Course, depth: int) -> int | None:
    """Return the first probed step at which some layer's bias_ulp tells, None if none does."""
    for step, metrics in course.probed.items():
        if any(_sureness(metrics, layer) > 1 for layer in range(depth)):
            return step
    return None


def explosion(losses: Sequence[float], rise: float = 1.0) -> int | None:
    """Return the first step whose loss is not finite, or `rise` nats above the least before it."""
    least = math.inf
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) or loss > least + rise:
            return step
        least = min(least, loss)
    return None
