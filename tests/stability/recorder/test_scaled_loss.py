"""The loss of a row is the one that was meant, however a scaler's result was put together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.stability.recorder.test_loss_targets import data, seen

Losses = Callable[[torch.amp.GradScaler, torch.Tensor], torch.Tensor]


def losses_of(folder: Path, scaled: Losses) -> tuple[list[float | None], list[float], list[str]]:
    """Return the losses of a record, those that were meant, and the record's notes."""
    meant: list[float] = []
    inputs, labels = data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            loss = F.cross_entropy(model(inputs), labels)
            meant.append(loss.item())
            scaled(scaler, loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    found = seen(folder, train)
    assert scaler.get_scale() != 1024.0, "it changes on the way"
    return [update.loss for update in found.updates], meant, list(found.notes)


@pytest.mark.parametrize(
    ("scaled", "factor"),
    [
        (lambda scaler, loss: scaler.scale(loss), 1),
        (lambda scaler, loss: scaler.scale(loss) / 4, 1 / 4),
        (lambda scaler, loss: scaler.scale(loss) * 0.5 / torch.tensor(2.0), 1 / 4),
        (lambda scaler, loss: (scaler.scale(loss) + scaler.scale(2 * loss)) / 2, 1.5),
        (lambda scaler, loss: sum(scaler.scale([loss, loss])), 2),
        (lambda scaler, loss: torch.stack([scaler.scale(loss), scaler.scale(loss)]).mean(), 1),
    ],
    ids=["alone", "divided", "multiplied", "sum", "list", "stacked"],
)
def test_a_scaled_loss_is_recorded_as_it_was_meant(
    scaled: Losses, factor: float, tmp_path: Path
) -> None:
    found, meant, notes = losses_of(tmp_path, scaled)
    assert found == pytest.approx([factor * loss for loss in meant], rel=1e-6)
    assert not any("scaler" in note for note in notes)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda scaler, loss: scaler.scale(loss) + loss.square(),
        lambda scaler, loss: scaler.scale(loss).square(),
        lambda scaler, loss: torch.ones(()) / scaler.scale(loss),
    ],
    ids=["in part", "squared", "inverted"],
)
def test_a_loss_that_was_scaled_in_part_is_said_to_be_untold(
    scaled: Losses, tmp_path: Path
) -> None:
    found, _, notes = losses_of(tmp_path, scaled)
    assert found == [None] * 5
    said = "the loss that a loss scaler has scaled (it was back-propagated with something else)"
    assert f"unproven: {said}" in notes


def test_a_loss_that_no_scaler_has_seen_is_itself(tmp_path: Path) -> None:
    def beside(scaler: torch.amp.GradScaler, loss: torch.Tensor) -> torch.Tensor:
        scaler.scale(loss).backward(retain_graph=True)
        return loss / 2

    found, meant, _ = losses_of(tmp_path, beside)
    assert found == pytest.approx([1.5 * loss for loss in meant], rel=1e-6)
