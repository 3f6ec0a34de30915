"""Labels that only the loss sees belong to the batch, in any layout; what is no label is told."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.recorder.inside import loss_targets
from stability.recorder.inside.hooks import install
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, Update, read_spool
from stability.records import metric_names
from tests.sampling import others_long
from tests.stability.recorder.recording import Recording, code_of

TARGET = "target of NllLoss"


def seen(folder: Path, train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Spooled:
    """Return what is recorded of `train`, which gets a classifier and its optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(
        Spool(str(folder), 0),
        due=lambda step: False,
        begin=lambda state: {
            "init": "",
            "buffers": [],
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


def test_of_smoothed_labels_nothing_is_left_unknown(tmp_path: Path) -> None:
    inputs, labels = data()
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for each in (labels, labels.flip(0)):
            smoothed(model(inputs), each).backward()
            optimizer.step()

    found = seen(tmp_path, train)
    assert not found.untold
    first, second = (update.labels for update in found.updates)
    assert first.keys() == second.keys() == {TARGET, "mask of MaskedFill"}
    assert all(first[name] != second[name] for name in first)


def test_a_mask_of_predictions_stays_unknown(tmp_path: Path) -> None:
    inputs, _ = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        log_p = model(inputs).log_softmax(-1)
        log_p.masked_fill(log_p == log_p.max(), 0).sum().backward()
        optimizer.step()

    assert any("MaskedFill" in each for each in seen(tmp_path, train).untold)


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
        (lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(), "what Gather was given"),
        (lambda out, y: -out.log_softmax(1)[range(6), y].mean(), "what Index was given"),
        (lambda out, y: (out - F.one_hot(y, 4)).square().mean(), "what Sub was given"),
        (lambda out, y: (out * F.one_hot(y, 4)).sum() / 3, "what Mul was given"),
        (lambda out, y: (out.log_softmax(1) @ y.float()[:4]).mean(), "what Mv was given"),
        (lambda out, y: Doubled.apply(out, y), "what Doubled was given"),
    ],
    ids=["gathered", "indexed", "difference", "product", "matrix product", "own function"],
)
def test_what_is_not_hashed_of_a_loss_is_told(loss_of, said: str, tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    found = seen(tmp_path, train)
    assert not found.updates[0].labels
    assert any(each.startswith(said) for each in found.untold), found.untold
    assert any("that labels are alike can't be checked: what" in note for note in found.notes)


def test_a_target_in_floating_point_has_a_name_that_says_so(tmp_path: Path) -> None:
    _, labels = data()
    losses = [lambda out, y: F.mse_loss(out, F.one_hot(y, 4).float())] * 2
    losses.append(lambda out, y: F.mse_loss(out, F.one_hot(y, 4).float() + 1))
    found = [one_update(tmp_path / str(i), labels, loss) for i, loss in enumerate(losses)]
    assert found[0].labels == found[1].labels != found[2].labels
    assert [*found[0].labels] == [f"target of MseLoss{loss_targets.IN_FLOATING_POINT}"]
    assert metric_names.IN_FLOATING_POINT == loss_targets.IN_FLOATING_POINT
    assert metric_names.AS_NUMBERS == loss_targets.AS_NUMBERS


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, y: F.cross_entropy(out / 2.0, y) / 3,
        lambda out, y: F.cross_entropy(out[:, :4].float().contiguous(), y) * 0.5 + 1.0,
        lambda out, y: nn.CrossEntropyLoss(weight=torch.ones(4))(out, y),
        lambda out, y: F.cross_entropy(out, y) + 1e-4 * out.logsumexp(1).square().mean(),
    ],
    ids=["divided", "scaled", "weighed", "z-loss"],
)
def test_a_number_and_a_view_are_nothing_that_a_loss_is_given(loss_of, tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    found = seen(tmp_path, train)
    assert found.updates[0].labels
    assert not found.untold


OTHER_TARGETS = """
import argparse, torch
from torch.nn import functional as F
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--by-hand", action="store_true")
flags.add_argument("--above", type=float, default=0.0)
asked = flags.parse_args()
torch.manual_seed(asked.seed)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(20, 3), torch.randn(20, 2)
for step in range(3):
    out, target = model(x), y + asked.above
    ((out - target).square().mean() if asked.by_hand else F.mse_loss(out, target)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "by_hand", others_long([False, True], slow=[False]), ids=["mse_loss", "by hand"]
)
def test_no_pair_holds_whose_targets_may_be_others(
    by_hand: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OTHER_TARGETS, encoding="utf-8")
    command = [sys.executable, str(script), *(["--by-hand"] if by_hand else [])]
    study = Recording(tmp_path, command)
    assert study.record("baseline") == 0
    assert study.record("rerun") == 0
    assert code_of("verify", str(study.folder)) == int(by_hand)
    assert study.record("above", "--above", "1.0") == 0
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "above/seed-0 unproven" in said
    seen = "the same labels (what Sub was given" if by_hand else "those of batch 1 in `target of"
    assert seen in said


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
