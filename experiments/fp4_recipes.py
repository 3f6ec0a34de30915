"""Which ingredients of NVIDIA's NVFP4 recipe carry its accuracy: in a gradient, and in a training.

Claim: linear layers train in NVFP4 with a loss near FP8's if gradients are rounded stochastically,
    operands of wgrad rotated, weights scaled in squares and the last layers in BF16; each is needed
Source: arXiv 2509.25149, sections 3 and 4
Published: the loss of 12 billion weights stays within 1 to 1.5 % of FP8's over 10 trillion tokens
    with all four; figures for single ingredients exist as images of loss curves only
Varies: the recipe: all four ingredients, each left out in turn, MXFP8, BF16 autocast; the seed
Measured: at the weights after a short BF16 training, over batches of their own: the error of the
    whole gradient against FP64's, relative, and the share of it that is the same at all batches.
    After a training by each recipe: how far the weights are from BF16's, relative, and the loss on
    text that nobody trained on
Refuted if: a recipe without an ingredient errs no more, and trains to no larger loss
Sizes: cpu: 0.2 M weights, 36 steps, 8 batches, 5 seeds; gpu: 14 M weights, 1000 steps;
    quick: 11,000 weights, 4 steps, 3 batches

    stability experiment fp4_recipes [--size cpu|gpu]
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import AdamW

from experiments.kit.plots import draw_dots
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed, mean, over
from experiments.kit.stated_tests import StatedTest, mean_within, ratio_within
from stability.config.schema import AttentionConfig, DataConfig, ModelConfig
from stability.data.datamodule import batch_indices, cut_blocks, held_out_indices
from stability.data.sources import load_texts
from stability.data.tokenizers import load_tokenizer
from stability.model.decoder import build_decoder
from stability.model.initial_weights import initialise
from stability.model.lightning_module import next_token_loss
from stability.probe.attention_registry import resolve_attention
from stability.probe.rounding_keys import RoundingKeys
from stability.report.paper.style import new_figure
from stability.study.model_gradients import ModelGradients

RECIPES = {
    "all four": "recipe:nvfp4",
    "no stochastic rounding": "recipe:nvfp4_nearest",
    "no rotation": "recipe:nvfp4_no_rotation",
    "no squares": "recipe:nvfp4_1d_weights",
    "no layer in BF16": "bf16-mixed, blocks.*=recipe:nvfp4",
    "MXFP8": "recipe:mxfp8",
}
"""The precision of each recipe."""
WHOLE, NEAREST, UNROTATED, IN_ROWS, EVERY_LAYER, MXFP8 = RECIPES
LEFT_OUT = (NEAREST, UNROTATED, IN_ROWS, EVERY_LAYER)
BF16, EXACT = "bf16-mixed", "64-true"
EXPLANATION = """The model is small and the training short: a loss that each ingredient moves by
less than seeds scatter it is no proof against it at 12 billion weights, and of the gradient one
batch's error says nothing of what adds up over a training"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The model, steps of each training, sequences of a batch, batches of a gradient, seeds."""

    model: ModelConfig
    steps: int
    batch_size: int = 8
    looks: int
    seeds: int = 5
    device: str = "cpu"


SIZES = {
    "quick": Settings(
        model=ModelConfig(depth=2, width=16, heads=1, context=16, vocab_size=256), steps=4, looks=3
    ),
    "cpu": Settings(
        model=ModelConfig(depth=4, width=64, heads=2, context=64, vocab_size=256),
        steps=36,
        looks=8,
    ),
    "gpu": Settings(
        model=ModelConfig(depth=8, width=384, heads=6, context=256, vocab_size=256),
        steps=1000,
        batch_size=32,
        looks=20,
        device="cuda",
    ),
}


def measure(settings: Settings) -> Findings:
    """Train and look at each seed; a batch has a number, whoever trains on it."""
    tokens = load_tokenizer("bytes").encode(load_texts(DataConfig()))
    blocks = cut_blocks(tokens, settings.model.context).long()
    rows = [row for seed in range(settings.seeds) for row in _of_seed(settings, blocks, seed)]
    return Findings(
        measured=_in_words(rows),
        published=_published(rows),
        controls=_controls(rows),
        rows=rows,
        explain=lambda: EXPLANATION.replace("\n", " "),
    )


def _of_seed(settings: Settings, blocks: Tensor, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each recipe at one seed."""
    held_out = held_out_indices(len(blocks), 0.02)
    trained = blocks[~torch.isin(torch.arange(len(blocks)), held_out)]
    unseen = blocks[held_out[: 4 * settings.batch_size]].to(settings.device)

    def batch(number: int) -> Tensor:
        chosen = batch_indices(seed, number, settings.batch_size, len(trained))
        return trained[chosen].to(settings.device)

    start = _Training(settings, BF16, seed)
    start.train(batch, settings.steps)
    plain, loss = start.weights, start.loss(unseen)
    way = _flat(plain)
    looks = [batch(settings.steps + number) for number in range(settings.looks)]
    exact = [
        _flat(_gradients(settings, EXACT, seed).of(plain, x, "candidate", False)) for x in looks
    ]
    for name, precision in RECIPES.items():
        training = _Training(settings, precision, seed)
        training.train(batch, settings.steps)
        yield {
            "recipe": name,
            "seed": seed,
            **_gradient_error(settings, precision, seed, plain, looks, exact),
            "distance": ((_flat(training.weights) - way).norm() / way.norm()).item(),
            "excess": training.loss(unseen) - loss,
            "bf16_loss": loss,
        }


class _Training:
    """A model and its optimizer, whose gradients are those of a run in `precision`."""

    def __init__(self, settings: Settings, precision: str, seed: int) -> None:
        model = build_decoder(settings.model, _attentions(settings), seed=seed)
        initialise(model, seed, settings.model)
        self._gradients = _gradients(settings, precision, seed)
        self.weights = dict(model.to(settings.device).named_parameters())
        self._model = model

    def train(self, batch: Any, steps: int) -> None:
        """Make as many updates by AdamW, with a warm-up over the first fifth."""
        optimizer = AdamW(self.weights.values(), lr=1e-3, weight_decay=0.1)
        rate = [min(1.0, (step + 1) / max(1, steps // 5)) for step in range(steps + 1)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate.__getitem__)
        for step in range(steps):
            assert self._gradients.keys is not None
            self._gradients.keys.step, self._gradients.keys.call = step, 0
            found = self._gradients.of(self.weights, batch(step), "candidate", False)
            for name, weight in self.weights.items():
                weight.grad = found[name]
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def loss(self, batch: Tensor) -> float:
        """Return the loss of the weights, computed in FP32 whatever they were trained in."""
        return next_token_loss(self._model(batch[:, :-1]), batch).item()


def _attentions(settings: Settings) -> list[Any]:
    config = AttentionConfig(implementation="sdpa")
    device = torch.device(settings.device)
    return [resolve_attention(config, device).function] * settings.model.depth


def _gradients(settings: Settings, precision: str, seed: int) -> ModelGradients:
    attention = _attentions(settings)
    return ModelGradients(
        config=settings.model,
        precision=precision,
        candidate=attention,
        baseline=attention,
        changed=[False] * len(attention),
        keys=RoundingKeys(seed=seed),
    )


def _gradient_error(
    settings: Settings,
    precision: str,
    seed: int,
    weights: Mapping[str, Tensor],
    looks: list[Tensor],
    exact: list[Tensor],
) -> dict[str, float]:
    """Return the error over the gradient's norm, and the share that is the same at all looks."""
    gradients = _gradients(settings, precision, seed)
    assert gradients.keys is not None
    errors = []
    for number, (batch, wanted) in enumerate(zip(looks, exact, strict=True)):
        gradients.keys.step, gradients.keys.call = settings.steps + number, 0
        errors.append(_flat(gradients.of(weights, batch, "candidate", False)) - wanted)
    squares = sum(error.square().sum().item() for error in errors)
    # the mean product of two looks' errors, over the mean square
    pairs = sum(errors, torch.zeros_like(errors[0])).square().sum().item() - squares
    norms = sum(wanted.square().sum().item() for wanted in exact)
    return {
        "error": (squares / norms) ** 0.5,
        "coherent": pairs / (len(errors) - 1) / squares,
    }


def _flat(gradient: Mapping[str, Tensor]) -> Tensor:
    """Return the gradient of all weights, FP64, flat."""
    return torch.cat([value.double().flatten() for value in gradient.values()])


def _more(rows: Rows, figure: str, recipe: str, times: float = 1) -> BySeed:
    one, two = (by_seed(rows, figure, recipe=name) for name in (recipe, WHOLE))
    return {seed: times * (one[seed] - two[seed]) for seed in one}


def _scatter(rows: Rows, recipe: str) -> BySeed:
    """Return by seed the part of the error that is another at each batch."""
    error, coherent = (by_seed(rows, figure, recipe=recipe) for figure in ("error", "coherent"))
    return {seed: error[seed] * max(0.0, 1 - coherent[seed]) ** 0.5 for seed in error}


def _published(rows: Rows) -> list[StatedTest]:
    """State that all four come near a wider format, and that each is needed, by loss and error."""
    excess = over(*(by_seed(rows, name, recipe=WHOLE) for name in ("excess", "bf16_loss")))
    percent = {seed: 100 * value for seed, value in excess.items()}
    said = f"{WHOLE}: the held-out loss is within 1.5 % of BF16's"
    near = mean_within(said, percent, unit="%", above=-1.5, below=1.5)
    needed = [
        mean_within(
            f"{name}: the held-out loss is larger than with {WHOLE}",
            _more(rows, "excess", name),
            unit="nats",
            above=0,
        )
        for name in LEFT_OUT
    ]
    # not of stochastic rounding, which scatters each gradient, and is meant for what adds up
    error = {name: by_seed(rows, "error", recipe=name) for name in RECIPES}
    further = [
        ratio_within(
            f"{x}: the gradient errs further than with {WHOLE}", error[x], error[WHOLE], above=1
        )
        for x in (UNROTATED, IN_ROWS, EVERY_LAYER)
    ]
    return [near, *needed, *further]


def _controls(rows: Rows) -> list[StatedTest]:
    """State what rounding itself implies of a gradient's error."""
    error = {name: by_seed(rows, "error", recipe=name) for name in RECIPES}
    return [
        ratio_within(
            "MXFP8: the gradient errs less than half as far as in NVFP4",
            error[MXFP8],
            error[WHOLE],
            below=0.5,
        ),
        ratio_within(
            f"{NEAREST}: less of the error is another at each batch, as nothing is drawn",
            _scatter(rows, NEAREST),
            _scatter(rows, WHOLE),
            below=1,
        ),
        mean_within(
            f"{NEAREST}: a larger share of the error is the same at all batches",
            _more(rows, "coherent", NEAREST, 100),
            unit="%",
            above=0,
        ),
    ]


def _in_words(rows: Rows) -> str:
    return "; ".join(
        f"{name}: the gradient errs by {mean(rows, 'error', recipe=name):.1%}, of which "
        f"{mean(rows, 'coherent', recipe=name):.1%} is the same at all batches, weights end "
        f"{mean(rows, 'distance', recipe=name):.1%} from BF16's, held-out loss "
        f"{mean(rows, 'excess', recipe=name):+.4f} nats"
        for name in RECIPES
    )


def draw(rows: Rows) -> Figure:
    """Draw the gradient's error, its share that stays, and the distance from BF16, by recipe."""
    figure = new_figure("column", 3.6)
    panels = figure.subplots(1, 3, sharey=True)
    titles = {"error": "gradient's\nerror", "coherent": "of it the\nsame", "distance": "distance\n"}
    for axes, (value, title) in zip(panels, titles.items(), strict=True):
        seeds = {name: by_seed(rows, value, recipe=name).values() for name in RECIPES}
        draw_dots(axes, {title: {name: [100 * x for x in found] for name, found in seeds.items()}})
        axes.set_xlabel(f"{title} (%)")
        axes.locator_params(axis="x", nbins=3)
    return figure
