"""Where several optimizers step, an update's loss is that of one, or it is said to be a sum."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stability.recorder.inside import training as training_of_process
from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, read_spool


def recorded(
    folder: Path, train: Callable[[], None], due: Callable[[int], bool] = lambda step: False
) -> Spooled:
    """Return what is recorded of `train`, whose state is kept after the updates that are `due`."""
    begun = {"init": "", "buffers": [], "rank": 0, "world": 1, "script": "", "environment": {}}
    begun["modules"] = {}
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


class Sharp(torch.optim.Optimizer):
    """As SAM: steps the optimizer inside of it at weights that it has moved."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor]) -> None:  # pyright: ignore
        """Move up the gradient, compute it there, go back, and step."""
        weights = [x for group in self.param_groups for x in group["params"]]
        with torch.enable_grad():
            closure()
        before = [x.clone() for x in weights]
        for x in weights:
            x += 0.05 * x.grad / x.grad.norm()
        with torch.enable_grad():
            closure()
        for x, old in zip(weights, before, strict=True):
            x.copy_(old)
        self.inner.step()


def test_a_step_inside_of_another_is_no_update_of_its_own(tmp_path: Path) -> None:
    printed: list[list[float]] = []

    def train() -> None:
        model = nn.Linear(3, 2)
        optimizer = Sharp(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            x = torch.randn(5, 3)
            printed.append([])

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                model.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                printed[-1].append(loss.item())
                return loss

            optimizer.step(closure)

    found = recorded(tmp_path, train)
    assert [update.step for update in found.updates] == [1, 2, 3, 4]
    assert [update.loss for update in found.updates] == pytest.approx([x[0] for x in printed])
    assert all(len(x) == 2 for x in printed)
    assert len({update.batch for update in found.updates}) == 4


def test_weights_are_hashed_and_copied_where_they_are_kept_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    original = training_of_process.copied

    def counted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copied.append(1)
        return original(state)

    monkeypatch.setattr(training_of_process, "copied", counted)
    monkeypatch.setattr(training_of_process, "hash_state", lambda _: pytest.fail("one rank"))

    def train() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = recorded(tmp_path, train, due=lambda step: step == 4)
    assert sorted(found.states) == [0, 4, 10]
    assert len(copied) == 2, "after the fourth update and the last"


def test_an_update_that_a_loss_scaler_left_out_is_told(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            factor = float("inf") if step == 2 else 1.0
            scaler.scale(factor * model(torch.randn(5, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    found = recorded(tmp_path, train)
    assert [update.step for update in found.updates] == [1, 2, 3, 4]
    assert "the loss scaler left out 1 of 4 updates: 3" in found.notes
