"""The loss of a row is the one that was meant, however a scaler's result was put together."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

from tests.stability.recorder.test_loss_targets import data, seen

Losses = Callable[[torch.amp.GradScaler, torch.Tensor], torch.Tensor]


def losses_of(
    folder: Path, scaled: Losses, made: Callable[..., Any] = torch.amp.GradScaler
) -> tuple[list[float | None], list[float], list[str]]:
    """Return the losses of a record, those that were meant, and the record's notes."""
    meant: list[float] = []
    inputs, labels = data()
    scales: list[float] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = made("cpu", init_scale=1024.0, growth_interval=2)
        for _ in range(5):
            loss = F.cross_entropy(model(inputs), labels)
            meant.append(loss.item())
            scaled(scaler, loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())

    found = seen(folder, train)
    assert scales != [1024.0], "it changes on the way"
    return [update.loss for update in found.updates], meant, list(found.notes)


def _divided_in_place(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    scaled = scaler.scale(loss)
    scaled /= 4
    return scaled


def _divided_after(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    scaled = scaler.scale(loss)
    loss /= 4  # as for a log: what is back-propagated has been computed
    return scaled


@pytest.mark.parametrize(
    ("scaled", "factor"),
    [
        (lambda scaler, loss: scaler.scale(loss), 1),
        (lambda scaler, loss: scaler.scale(loss) / 4, 1 / 4),
        (_divided_in_place, 1 / 4),
        (_divided_after, 1),
        (lambda scaler, loss: scaler.scale(loss) * 0.5 / torch.tensor(2.0), 1 / 4),
        (lambda scaler, loss: (scaler.scale(loss) + scaler.scale(2 * loss)) / 2, 1.5),
        (lambda scaler, loss: sum(scaler.scale([loss, loss])), 2),
        (lambda scaler, loss: torch.stack([scaler.scale(loss), scaler.scale(loss)]).mean(), 1),
    ],
    ids=["alone", "divided", "in place", "after", "multiplied", "sum", "list", "stacked"],
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


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, over which FSDP's scaler asks for infinities."""
    store: Any = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _own(*args: Any, **settings: Any) -> Any:
    """Return a scaler of a class that is made while it is recorded."""

    class Own(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            if self._scale is None:
                super().scale(torch.ones(()))
            return outputs * self._scale

    return Own(*args, **settings)


@pytest.mark.parametrize("made", [ShardedGradScaler, _own])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_scaler_that_scales_by_itself_is_seen(
    made: Callable[..., Any], parts: int, alone: None, tmp_path: Path
) -> None:
    before = ShardedGradScaler.scale
    found, meant, notes = losses_of(tmp_path, lambda scaler, x: scaler.scale(x) / parts, made)
    assert found == pytest.approx([loss / parts for loss in meant], rel=1e-6)
    assert not any("scaler" in note for note in notes)
    assert ShardedGradScaler.scale is before


def test_a_scaler_whose_factor_is_not_known_makes_no_loss_of_a_part(tmp_path: Path) -> None:
    class Fixed(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            super().scale(torch.ones(()))
            kept, self._scale = self._scale, None
            self.kept = kept
            return outputs * kept

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._scale = self.kept
            return super().step(optimizer, *args, **kwargs)

    found, _, notes = losses_of(tmp_path, lambda scaler, x: scaler.scale(x) / 4, Fixed)
    assert found == [None] * 5
    assert any("the loss that a loss scaler has scaled" in note for note in notes)
