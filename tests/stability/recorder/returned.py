"""A model whose result is made as a test says, and what is kept of a loss's gradient there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.recorder.inside.evaluations import returned_loss
from stability.recorder.inside.hooks import install
from stability.recorder.inside.returned_gradient import ReturnedGradient
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training

LATEST: list[ReturnedGradient] = []
"""What was kept of each pass."""
BEGUN = {"init": "", "buffers": [], "rank": 0, "world": 1, "script": "", "environment": {}}


class Model(nn.Module):
    """A trunk with two heads; `of` makes its result of the trunk's and the heads'."""

    def __init__(self, of: Callable[["Model", Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 11, bias=False), nn.Linear(8, 11)
        self.of = of
        self.extra: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Return what `of` makes."""
        hidden = torch.tanh(self.trunk(self.embed(x)))
        self.labels = y
        return self.of(self, hidden, self.first(hidden), self.second(hidden))


@dataclass
class Output:
    """What a model of Hugging Face's returns."""

    logits: Tensor
    loss: Tensor | None = None


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def logits(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return first


def both(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, second


def with_loss(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Output:
    assert model.labels is not None
    return Output(first, entropy(first, model.labels))


def nested(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, hidden


def kept_of(
    folder: Path,
    of: Callable[..., Any],
    train: Callable[[Model, Tensor, Tensor], object],
) -> tuple[ReturnedGradient, dict[str, Tensor], dict[str, Tensor]]:
    """Return what was kept of the last of `train`'s passes, and the gradients by each way.

    The second are those of the script's backward, the third those of the model called once more.
    """
    training = Training(
        Spool(str(folder), 0),
        due=lambda step: False,
        begin=lambda state: {**BEGUN, "modules": {}},
    )
    torch.manual_seed(0)
    model = Model(of)
    calls: list[tuple[Any, Any, ReturnedGradient]] = []

    class Keeping:
        """Keeps the gradient of each pass."""

        def called(self, _: nn.Module, args: Any, kwargs: Any, result: Any, begin: int) -> None:
            """Tell of a pass."""
            loss = returned_loss(result)
            weights = {id(x) for x in model.parameters()}
            kept = ReturnedGradient(
                *(training.models, result, begin, loss),
                is_weight=lambda x: id(x) in weights,
                entered=lambda _: None,
            )
            calls.append((args, kwargs, kept))
            LATEST.append(calls[-1][-1])

        def step(self) -> None:
            """Leave updates alone."""

        def end(self) -> None:
            """Leave the end alone."""

    training.look = lambda _: Keeping()
    uninstall = install(training)
    try:
        torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, 11, (3, 6))
        train(model, x[:, :-1], x[:, 1:])
        own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        args, kwargs, kept = calls[-1]
    finally:
        uninstall()
    again: dict[str, Tensor] = {}
    if not kept.lacks:
        model.zero_grad()
        kept.applied_to(model(*args, **kwargs)).backward()
        again = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return kept, own, again


def plain(model: Model, x: Tensor, y: Tensor) -> None:
    entropy(model(x), y).backward()
