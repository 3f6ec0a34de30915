"""Models beside the one that trains, frozen or with optimizers of their own, keep their labels."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.stability.recorder.test_loss_targets import data, seen


def test_labels_of_a_frozen_model_that_gradients_go_through_are_its_batch(tmp_path: Path) -> None:
    inputs, labels = data()
    found = []
    for place, (shift, scale) in enumerate(((0, 1.0), (0, 1.0), (1, 1.0), (0, 2.0))):

        def train(
            model: nn.Module,
            optimizer: torch.optim.Optimizer,
            shift: int = shift,
            scale: float = scale,
        ) -> None:
            torch.manual_seed(1)
            judge = Judge().requires_grad_(False)
            with torch.no_grad():
                judge.layer.weight.mul_(scale)
            judge(model(inputs), (labels + shift) % 4).backward()
            optimizer.step()

        found.append(seen(tmp_path / str(place), train))
    first, again, other, judged = found
    assert first.updates[0].batch == again.updates[0].batch != other.updates[0].batch
    assert first.start_parts["models"] == again.start_parts["models"] != {}
    assert judged.updates[0].batch == first.updates[0].batch
    assert judged.start_parts["models"] != first.start_parts["models"]


class Judge(nn.Module):
    """A model that trains no more, and is told labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.layer(x), labels)


def test_a_model_that_rests_for_a_while_is_no_frozen_one(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        critic = Judge()
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        critic.requires_grad_(False)
        critic(model(inputs), labels).backward()
        optimizer.step()
        critic.requires_grad_(True)
        critic(model(inputs).detach(), labels).backward()
        other.step()

    found = seen(tmp_path, train)
    assert found.start_parts["models"] == {}
    assert not any("first called after an update" in each for each in found.doubts)


def test_two_frozen_models_of_one_class_are_told_apart(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        judges = [Judge().requires_grad_(False) for _ in range(3)]
        for judge in judges:
            judge(model(inputs), labels).backward()
        optimizer.step()
        Judge().requires_grad_(False)(model(inputs), labels).backward()
        optimizer.step()

    found = seen(tmp_path, train)
    assert list(found.start_parts["models"]) == ["Judge", "Judge_2", "Judge_3"]
    assert len(set(found.start_parts["models"].values())) == 3
    assert "the same weights of Judge, which was first called after an update" in found.doubts


@pytest.mark.parametrize("is_called_again", [False, True])
def test_labels_of_three_models_that_step_one_after_another_belong_to_their_own(
    is_called_again: bool, tmp_path: Path
) -> None:
    inputs, labels = data()
    found = []
    for place, shift in enumerate((0, 0, 1)):

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, shift: int = shift) -> None:
            torch.manual_seed(1)
            models = [model, nn.Linear(3, 4), nn.Linear(3, 4)]
            others = [torch.optim.SGD(x.parameters(), lr=0.1) for x in models[1:]]
            outs = [x(inputs * (at + 1)) for at, x in enumerate(models)]
            aims = [labels, labels, (labels + shift) % 4]
            for out, y, stepping in zip(outs, aims, [optimizer, *others], strict=True):
                F.cross_entropy(out, y).backward()
                stepping.step()
                if is_called_again:  # a later call is none of theirs
                    models[0](inputs)

        recorded = seen(tmp_path / str(place), train)
        assert not recorded.untold
        found.append([update.labels for update in recorded.updates])
    assert found[0] == found[1]
    assert found[0] != found[2]
