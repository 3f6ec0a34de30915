"""What a script computes with its data before, between and beside models is of the batch too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.recorder.inside import made_of
from stability.recorder.spooled import Spooled
from tests.stability.recorder.test_several_losses import recorded

Train = Callable[[float], None]


def drawn(seed: int, *shape: int) -> Tensor:
    """Return a tensor of data."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(loss: Tensor, *models: nn.Module) -> None:
    """Train models by one update."""
    weights = [x for model in models for x in model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    loss.backward()
    optimizer.step()


def labelled(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(6) % 4)


def both(folder: Path, train: Train) -> tuple[Spooled, Spooled]:
    """Return what is recorded of a training and of one on other data."""
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    first = recorded(folder / "a", lambda: train(0.0))
    return first, recorded(folder / "b", lambda: train(1.0))


def batches(found: Spooled) -> list[str | None]:
    return [update.batch for update in found.updates]


def collocated(above: float) -> None:
    model = nn.Linear(2, 1)
    x, t = (drawn(1, 5, 1) + above).requires_grad_(), drawn(2, 5, 1).requires_grad_()
    inside, boundary = model(torch.cat([x, t], 1)), model(drawn(3, 4, 2))
    step(inside.square().mean() + boundary.square().mean(), model)


def mixed_in_leaf(above: float) -> None:
    encoder, model = nn.Linear(3, 2), nn.Linear(4, 4)
    t = (drawn(2, 6, 2) + above).requires_grad_()
    step(labelled(model(torch.cat([encoder(drawn(1, 6, 3)), t], 1))), encoder, model)


def evaluated_in_the_loss(above: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1))
    loss = labelled(model(drawn(1, 6, 3)))
    model.eval()
    loss = loss + model(drawn(2, 6, 3) + above).square().mean()
    model.train()
    step(loss, model)


def evaluated_before_another_model(above: float) -> None:
    encoder, model = nn.Linear(3, 3), nn.Linear(3, 4)
    loss = labelled(encoder(drawn(1, 6, 3)) @ torch.ones(3, 4))
    encoder.eval()
    step(loss + labelled(model(encoder(drawn(2, 6, 3) + above))), encoder, model)


@pytest.mark.parametrize(
    "train",
    [collocated, mixed_in_leaf, evaluated_in_the_loss, evaluated_before_another_model],
)
def test_other_data_are_another_batch(train: Train, tmp_path: Path) -> None:
    first, other = both(tmp_path / "pair", train)
    assert batches(first) == batches(recorded(tmp_path, lambda: train(0.0)))
    assert batches(first) != batches(other)
    assert not first.doubts


def test_points_that_no_model_made_are_not_said_to_be_a_models(tmp_path: Path) -> None:
    found = recorded(tmp_path, lambda: collocated(0.0))
    assert not any("made" in note for note in found.notes)
    assert found.updates[0].samples == 5 + 4


def between(mix: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """Return a training of two models, the first one's result mixed with other data."""

    def train() -> None:
        encoder, model = nn.Linear(3, 4), nn.Linear(4, 4)
        mixed = mix(encoder(drawn(1, 6, 3)), drawn(2, 6, 4))
        step(labelled(model(mixed)), encoder, model)

    return train


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        (lambda h, w: h * w, "Mul"),
        (lambda h, w: h + w, "Add"),
        (lambda h, w: (h @ w.T)[:, :4], "Mm"),
        (lambda h, w: torch.where(w > 0, h, -h), "Where"),
        (lambda h, w: h[w[:, 0].argsort()], "Index"),
    ],
)
def test_what_comes_in_between_two_models_is_told(
    mix: Callable[[Tensor, Tensor], Tensor], named: str, tmp_path: Path
) -> None:
    found = recorded(tmp_path, between(mix))
    said = f"the same argument 0 of Linear: what {named} was given on the way has no hash"
    assert said in found.doubts


@pytest.mark.parametrize(
    "mix",
    [
        lambda h, w: h,
        lambda h, w: 2 * h.relu() / 3,
        lambda h, w: h[:, 0].unsqueeze(1).expand(6, 4),
        lambda h, w: h.max(1, keepdim=True)[0].expand(6, 4),
        lambda h, w: torch.cat([h, h * h.sigmoid()], 1)[:, :4],
    ],
)
def test_a_models_result_alone_raises_no_doubt(
    mix: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    found = recorded(tmp_path, between(mix))
    assert not found.doubts
    assert not found.untold
    said = "not part of the batches' hash: argument 0 of Linear, which a model made"
    assert said in found.notes


def test_what_a_frozen_model_is_given_that_needs_a_gradient_is_hashed(tmp_path: Path) -> None:
    def train(other: int) -> Callable[[], None]:
        def run() -> None:
            class Frozen(nn.Linear):
                pass

            torch.manual_seed(0)
            frozen, model = Frozen(3, 4).requires_grad_(False), nn.Linear(4, 4)
            x = drawn(1 + other, 6, 3).requires_grad_()
            step(labelled(model(frozen(x).relu())), model)

        return run

    found = []
    for place, other in enumerate((0, 0, 1)):
        (tmp_path / str(place)).mkdir()
        found.append(recorded(tmp_path / str(place), train(other)))
    assert not found[0].doubts
    assert found[0].updates[0].batch == found[1].updates[0].batch != found[2].updates[0].batch
    assert list(found[0].start_parts["models"]) == ["Frozen"]


def test_weights_that_are_mixed_with_data_are_told(tmp_path: Path) -> None:
    def train() -> None:
        model, scale = nn.Linear(3, 4), nn.Parameter(torch.ones(3))
        step(labelled(model(drawn(1, 6, 3) * scale)), model)

    found = recorded(tmp_path, train)
    assert "the same argument 0 of Linear: what Mul was given on the way has no hash" in (
        found.doubts
    )
    assert "not part of the batches' hash: argument 0 of Linear, which weights made" in found.notes


def test_a_long_way_to_an_input_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_of, "_MOST_NODES", 1)
    found = recorded(tmp_path, lambda: collocated(0.0))
    said = "the same argument 0 of Linear: it is made of too much to be looked at"
    assert said in found.doubts


def test_what_a_loss_is_given_before_the_first_model_is_told(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(3, 4)
        beside = F.linear(drawn(2, 6, 3), model.weight).square().mean()
        step(beside + labelled(model(drawn(1, 6, 3))), model)

    assert "what Mm was given beside the model's result" in recorded(tmp_path, train).untold


def test_a_result_of_before_the_last_step_ends_a_loss(tmp_path: Path) -> None:
    def train() -> None:
        generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, generator)]
        made = generator(drawn(1, 6, 3))
        critic(made.detach()).mean().backward()
        optimizers[0].step()
        (critic(made).mean() + F.mse_loss(made, drawn(2, 6, 4))).backward()
        optimizers[1].step()

    found = recorded(tmp_path, train)
    assert not found.doubts
    assert not found.untold


def validated(how: Callable[[nn.Module, Tensor], object]) -> Train:
    """Return a training that evaluates between its pass and its step, with gradients."""

    def train(above: float) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1))
        loss = labelled(model(drawn(1, 6, 3)))
        model.eval()
        how(model, drawn(2, 6, 3) + above)
        model.train()
        step(loss, model)

    return train


@pytest.mark.parametrize(
    "how",
    [
        lambda model, x: labelled(model(x)).item(),
        lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x),
    ],
    ids=["a loss", "a gradient for the input"],
)
def test_what_is_evaluated_with_gradients_is_no_part_of_a_batch(
    how: Callable[[nn.Module, Tensor], object], tmp_path: Path
) -> None:
    first, other = both(tmp_path, validated(how))
    assert batches(first) == batches(other)
    assert first.updates[0].samples == 6
    assert not first.doubts
