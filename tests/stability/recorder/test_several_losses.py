"""Where several optimizers step, an update's loss is that of one, or it is said to be a sum."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, read_spool


def recorded(
    folder: Path, train: Callable[[], None], due: Callable[[int], bool] = lambda step: False
) -> Spooled:
    """Return what is recorded of `train`, whose state is kept after the updates that are `due`."""
    begun = {"init": "", "rank": 0, "world": 1, "script": "", "environment": {}, "modules": {}}
    training = Training(Spool(str(folder), 0), due=due, begin=lambda state: begun)
    uninstall = install(training)
    try:
        torch.manual_seed(0)
        train()
        training.end("exit")
    finally:
        uninstall()
    return read_spool(folder)


class Generator(nn.Linear):
    """Makes what the other judges."""


class Critic(nn.Linear):
    """Judges."""


def adversaries(critics: int, printed: list[float]) -> Callable[[], None]:
    """Return a training in which a critic steps so many times, then a generator, on own losses."""

    def train() -> None:
        generator, critic = Generator(3, 4), Critic(4, 1)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
        for _ in range(3):
            for _ in range(critics):
                loss = (
                    critic(torch.randn(5, 4)).mean() - critic(generator(torch.randn(5, 3))).mean()
                )
                of_critic.zero_grad()
                loss.backward()
                of_critic.step()
                printed.append(loss.item())
            of_generator.zero_grad()
            (7 + critic(generator(torch.randn(5, 3))).mean()).backward()
            of_generator.step()

    return train


@pytest.mark.parametrize("critics", [1, 3])
def test_an_update_of_adversaries_has_the_loss_of_one(critics: int, tmp_path: Path) -> None:
    printed: list[float] = []
    found = recorded(tmp_path, adversaries(critics, printed))
    # one of the generator alone, at the end, has none
    losses = [update.loss for update in found.updates if update.loss is not None]
    assert losses == pytest.approx(printed, rel=1e-6)
    assert (
        "2 optimizers step on losses of their own: an update's loss is that of the one that begins "
        "with Critic.weight, and not those of Generator.weight"
    ) in found.notes


def by_two(passes: int, printed: list[float]) -> Callable[[], None]:
    """Return a training of one model by two optimizers, in so many passes an update."""

    def train() -> None:
        model = nn.Linear(3, 2)
        optimizers = [torch.optim.SGD([x], lr=0.1) for x in model.parameters()]
        for _ in range(3):
            printed.append(0.0)
            for _ in range(passes):
                loss = model(torch.randn(5, 3)).square().mean() / passes
                loss.backward()
                printed[-1] += loss.item()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return train


@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_of_two_optimizers_is_their_updates(passes: int, tmp_path: Path) -> None:
    printed: list[float] = []
    found = recorded(tmp_path, by_two(passes, printed))
    assert [update.loss for update in found.updates] == pytest.approx(printed, rel=1e-6)
    said = (
        "2 losses are back-propagated before 2 optimizers step, and whose they are can't be told: "
        "an update's loss is their sum"
    )
    assert (said in found.notes) == (passes == 2)
    assert not any("losses of their own" in note for note in found.notes)
