"""Trains a small GPT with a known bias in one layer's attention, and asks which signal notices it.

Four arms of a seed see the same batches. `clean` has no bias. In one layer of `biased` out is
`SHARE` of an ULP too large on average (`attention_kernels.testing.injected_bias`). `coin` errs as
far there, with no bias. `nudge` has the clean attention and every initial weight moved by 1 ULP of
FP32. A signal's gap is its distance from the clean arm, and the nudge's gap is one that means
nothing: a signal notices where its gap is larger than the nudge's, look after look, over seeds.

Training is a plain loop, for many short arms whose figures are needed in memory: BF16 autocast over
FP32 weights, AdamW, a linear warm-up and then a constant learning rate, no clipping. Weights,
batches and nudge are functions of the seed alone. There are no records and no checkpoints here;
`stability.study` has both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from attention_kernels import flash_attention
from attention_kernels.fp_environment import settle_vector_math
from attention_kernels.testing import injected_bias
from attention_kernels.testing.faults import Move
from experiments.kit.stated_tests import StatedTest, equal, every, mean_within
from stability.analysis.intervals import paired_interval
from stability.config.schema import DataConfig, ModelConfig, OptimizerConfig, ProbeConfig
from stability.data.datamodule import batch_indices, cut_blocks
from stability.data.sources import load_texts
from stability.data.tokenizers import load_tokenizer
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise, nudge_weights
from stability.probe.attention_probe import AttentionProbe, DualAttention, as_shadows
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.records.metric_names import deviation_name, head_part, watch_name

__all__ = [
    "ARMS",
    "SIGNALS",
    "Course",
    "Recipe",
    "explosion",
    "first_bias",
    "first_notice",
    "load_blocks",
    "noticed",
    "signal_rows",
    "train",
    "training_controls",
    "training_in_words",
    "when_noticed",
    "with_bias",
]

SHADOW = "flash:fa2"
"""What the probe compares every layer's attention with, and with the FP64 golden."""
SHARE = 0.2
"""The injected bias, in ULPs of BF16."""
ARMS: dict[str, tuple[float, Move, int]] = {
    "clean": (0.0, "up", 0),
    "biased": (SHARE, "up", 0),
    "coin": (SHARE, "coin", 0),
    "nudge": (0.0, "up", 1),
}
"""By arm: the share of an ULP injected in one layer, which way, and the ULPs of the nudge."""
STANDARD_ERRORS = 5.0
"""A bias counts as noticed when it is more than so many of its own standard errors."""
SIGNALS = {
    "bias": f"|bias_ulp| / {STANDARD_ERRORS:g} s.e.",
    "norm": "norms of W_Q, gap / nudge's",
    "loss": "loss, gap / nudge's",
}
"""The columns that can reveal the bias, each scaled so that a value above 1 counts as noticed."""
LOOKS = 3
"""How many looks in a row must notice: a single one does so by chance once in twenty at a level of
0.9. Looks of one run are not independent, so this is a rule and has no level of its own."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all arms of a comparison share."""

    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch_size: int
    steps: int
    probe_every: int
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One arm's training: the loss of every step, and the probe's metrics by probed step."""

    losses: list[float]
    probed: dict[int, dict[str, float]]


def load_blocks(recipe: Recipe) -> Tensor:
    """Return the text as blocks `(n_blocks, context + 1)`.

    ValueError for a text that cannot be read or a tokenizer with more tokens than the model has.
    """
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ValueError(
            f"load_blocks: vocab_size must be at least the {tokenizer.vocab_size} of tokenizer "
            f"{recipe.data.tokenizer!r}, got {recipe.model.vocab_size}"
        )
    return cut_blocks(tokenizer.encode(load_texts(recipe.data)), recipe.model.context)


def train(
    recipe: Recipe,
    attention: Sequence[ResolvedAttention],
    blocks: Tensor,
    *,
    seed: int,
    nudge_ulps: int = 0,
) -> Course:
    """Train one arm: layer i attends by `attention[i]`, and the probe compares each with `SHADOW`.

    A loss at step s, counted from 0, is that of the weights after s updates. A run goes on to its
    last step, also where its loss is no number any more.
    """
    settle_vector_math()
    device = torch.device(recipe.device)
    model, probe = _model(recipe.model, attention, device)
    initialise(model, seed)
    nudge_weights(model, nudge_ulps, seed)
    model.to(device)
    optimizer = _optimizer(model, recipe.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, recipe.optimizer.warmup_steps))
    )
    losses, probed = [], {}
    for step in range(recipe.steps):
        batch = blocks[batch_indices(seed, step, recipe.batch_size, len(blocks))].long().to(device)
        if step % recipe.probe_every == 0:
            probe.arm()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        probe.disarm()
        if step % recipe.probe_every == 0:
            probed[step] = probe.collect().metrics
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Course(losses=torch.stack(losses).tolist(), probed=probed)


def _model(
    config: ModelConfig, attention: Sequence[ResolvedAttention], device: torch.device
) -> tuple[GPT, AttentionProbe]:
    """Return the model on the CPU, and the probe that looks at every layer of it."""
    modules: dict[str, torch.nn.Module] = {}
    probe = AttentionProbe(
        ProbeConfig(golden=True, backward=False, inside=True),
        as_shadows([resolve_attention(SHADOW, device)]),
        shadow_is_candidate=False,
        modules=modules,
    )
    layers = [
        DualAttention(layer=f"layer_{index}", primary=each, probe=probe)
        for index, each in enumerate(attention)
    ]
    model = GPT(config, layers)
    modules.update(model.blocks.named_children())
    return model, probe


def _optimizer(model: GPT, chosen: OptimizerConfig) -> AdamW:
    return AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )


def with_bias(share: float, move: Move = "up") -> ResolvedAttention:
    """Return flash attention whose out is moved by `share` of an ULP of its dtype."""
    name = f"injected:{move}:{share:g}"
    return ResolvedAttention(
        name=name,
        function=injected_bias(flash_attention, share, move),
        description={"implementation": name, "engine": "auto"},
    )


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
    clean = with_bias(0.0)
    courses = {}
    for arm, (share, move, nudge_ulps) in ARMS.items():
        there = with_bias(share, move)
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


def first_notice(ratios: Mapping[int, Mapping[int, float]], level: float = 0.9) -> int | None:
    """Return the first step from which `LOOKS` looks in a row tell, None if there is none.

    `ratios`, by step and seed, are gap over meaningless gap, NaN where that is 0. A look tells if
    the interval over its seeds lies above 1. ValueError for a negative ratio.
    """
    told: list[int] = []
    for step in sorted(ratios):
        known = not any(math.isnan(ratio) for ratio in ratios[step].values())
        tells = known and paired_interval(ratios[step], level).low > 1
        told = [*told, step] if tells else []
        if len(told) == LOOKS:
            return told[0]
    return None


def when_noticed(rows: Rows, arm: str, signal: str) -> str:
    """Return `noticed` in words."""
    step = noticed(rows, arm, signal)
    return "never" if step is None else f"from step {step}"


def training_controls(rows: Rows) -> list[StatedTest]:
    """State what an instrument that sees a bias must see; these are controls."""
    biased = [row for row in rows if row["arm"] == "biased"]
    start = [row for row in biased if row["step"] == 0]
    alarms = [row["elsewhere"] for row in rows]
    alarms += [row["bias"] for row in rows if row["arm"] != "biased"]
    return [
        mean_within(
            f"{SHARE} ULP in a layer: bias_ulp measures it at step 0",
            {row["seed"]: row["bias_ulp"] for row in start},
            unit="ULP",
            above=0.75 * SHARE,
            below=1.25 * SHARE,
        ),
        mean_within(
            "its error over fa2's, both against FP64, is below the 2 that kernel suites allow",
            {row["seed"]: row["error_ratio"] for row in start},
            unit="x",
            below=2,
        ),
        every(
            f"there |bias_ulp| is above {STANDARD_ERRORS:g} standard errors at every look",
            [row["bias"] * STANDARD_ERRORS for row in biased],
            unit="s.e.",
            above=STANDARD_ERRORS,
        ),
        every(
            "in no other layer, and in no other arm, is it at any look",
            [ratio * STANDARD_ERRORS for ratio in alarms],
            unit="s.e.",
            below=STANDARD_ERRORS,
        ),
        equal(
            "of as large an error with no bias no signal tells",
            [float(noticed(rows, "coin", signal) is not None) for signal in SIGNALS],
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
