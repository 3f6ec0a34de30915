"""Labels that only the loss sees belong to the batch, in any layout; what is no label is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, Update, read_spool

TARGET = "target of NllLoss"


def seen(folder: Path, train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Spooled:
    """Return what is recorded of `train`, which gets a classifier and its optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(
        Spool(str(folder), 0),
        due=lambda step: False,
        begin=lambda state: {
            "init": "",
            "rank": 0,
            "world": 1,
            "script": "",
            "environment": {},
            "modules": {},
        },
    )
    uninstall = install(training)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        training.end("exit")
    finally:
        uninstall()
    return read_spool(folder)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return six samples and their classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, generator=generator)
    return inputs, torch.randint(0, 4, (6,), generator=generator)


def one_update(
    folder: Path,
    labels: torch.Tensor,
    loss_of: Callable[..., torch.Tensor] = F.cross_entropy,
    micro: int = 1,
    order: slice | list[int] = slice(None),
) -> Update:
    """Return what is recorded of one update on `data` with these labels."""
    inputs, _ = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        xs, ys = inputs[order].chunk(micro), labels[order].chunk(micro)
        for x, y in zip(xs, ys, strict=True):
            (loss_of(model(x), y) / micro).backward()
        optimizer.step()

    return seen(folder, train).updates[0]


@pytest.mark.parametrize(
    "loss_of", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"]
)
def test_other_labels_on_the_same_inputs_are_seen(loss_of, tmp_path: Path) -> None:
    _, labels = data()
    other = labels.clone()
    other[4] = (other[4] + 1) % 4
    first = one_update(tmp_path / "a", labels, loss_of)
    second = one_update(tmp_path / "b", other, loss_of)
    assert first.batch == second.batch, "the inputs are the same"
    assert first.labels.keys() == second.labels.keys() == {TARGET}
    assert first.labels != second.labels


def test_the_same_labels_on_other_samples_are_seen(tmp_path: Path) -> None:
    _, labels = data()
    assert labels[0] != labels[-1]
    first = one_update(tmp_path / "a", labels)
    turned = one_update(tmp_path / "b", labels.flip(0))
    assert first.batch == turned.batch
    assert first.labels != turned.labels, "the same labels, as a sum"


def test_labels_are_the_same_in_any_order_and_any_micro_batches(tmp_path: Path) -> None:
    _, labels = data()
    whole = one_update(tmp_path / "a", labels)
    assert one_update(tmp_path / "b", labels, micro=3).labels == whole.labels
    assert one_update(tmp_path / "c", labels, order=[5, 3, 1, 0, 2, 4]).labels == whole.labels


def test_labels_of_losses_that_are_added_up_go_with_their_own_inputs(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pairs = zip(inputs.chunk(2), labels.chunk(2), strict=True)
        losses = [F.cross_entropy(model(x), y) for x, y in pairs]
        (sum(losses, torch.zeros(())) / 2).backward()
        optimizer.step()

    assert (
        seen(tmp_path / "a", train).updates[0].labels == one_update(tmp_path / "b", labels).labels
    )


def test_what_is_only_evaluated_has_no_labels(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(inputs), labels).backward()
        F.cross_entropy(model(inputs), labels.flip(0))
        with torch.no_grad():
            F.cross_entropy(model(inputs), labels.flip(0))
        optimizer.step()

    assert (
        seen(tmp_path / "a", train).updates[0].labels == one_update(tmp_path / "b", labels).labels
    )


def test_what_the_model_itself_is_given_is_no_label_of_the_loss(tmp_path: Path) -> None:
    inputs, labels = data()

    class WithLoss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.inner(x), labels)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        WithLoss(model)(inputs, labels=labels).backward()
        optimizer.step()

    update = seen(tmp_path, train).updates[0]
    assert not update.labels
    assert update.inputs.keys() == {"argument 0", "labels"}


class Doubled(torch.autograd.Function):
    """A loss of somebody's own."""

    @staticmethod
    def forward(ctx, x, y):
        return x.sum() * 2 + y.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(6, 4) * 2, None


@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (
            lambda out, y: F.mse_loss(out, F.one_hot(y, 4).float()),
            "the target of MseLoss, in floating point",
        ),
        (
            lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
            "the index by which a loss gathers",
        ),
        (lambda out, y: Doubled.apply(out, y), "what Doubled was given, after the model"),
    ],
    ids=["floating point", "by hand", "own function"],
)
def test_what_is_not_hashed_of_a_loss_is_told(loss_of, said: str, tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    found = seen(tmp_path, train)
    assert not found.updates[0].labels
    assert any(each.startswith(said) for each in found.left_out), found.left_out


def test_a_closure_that_is_called_again_counts_once(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, _: torch.optim.Optimizer) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            losses.append(float(loss.detach()))
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(losses) > 1
        expected.append(losses[0])

    expected: list[float] = []
    update = seen(tmp_path / "a", train).updates[0]
    assert update.loss == expected[0], "that of the first call, no sum"
    assert update.samples == 6
    assert update.labels == one_update(tmp_path / "b", labels).labels
