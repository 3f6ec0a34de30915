"""What a loss is given beside the model's result is hashed or doubted, and so are set gradients."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.recorder.inside import loss_targets
from stability.recorder.inside.gradients import GIVEN, UNBACKED
from stability.recorder.inside.saved_hooks import SavedHooks
from stability.recorder.spooled import Spooled
from tests.stability.recorder.test_loss_targets import data, seen

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FLOATS = (torch.arange(24).reshape(6, 4) % 5).float()


def trained(folder: Path, loss_of: LossOf) -> Spooled:
    """Return what is recorded of one update on `data` with this loss."""
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    return seen(folder, train)


@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (lambda z, y: torch.where(y > 1, z.sum(1), -z.sum(1)).exp().mean(), "Where"),
        (lambda z, y: torch.dot(z.flatten(), FLOATS.flatten()), "Dot"),
        (lambda z, y: torch.dist(z, FLOATS), "Dist"),
        (lambda z, y: (z.mean() - FLOATS.mean()).square(), "Sub"),
    ],
    ids=["condition", "dot", "distance", "difference of numbers"],
)
def test_what_a_loss_is_given_and_nobody_hashes_is_told(
    loss_of: LossOf, said: str, tmp_path: Path
) -> None:
    assert f"what {said} was given beside the model's result" in trained(tmp_path, loss_of).untold


def weighted(name: str, by: torch.Tensor) -> LossOf:
    """Return a loss whose samples, classes or whole are weighted by a tensor."""
    target = (FLOATS > 2).float()
    losses: dict[str, LossOf] = {
        "bce": lambda z, y: F.binary_cross_entropy(z.sigmoid(), target, weight=by),
        "logits": lambda z, y: F.binary_cross_entropy_with_logits(z, target, weight=by),
        "positive": lambda z, y: F.binary_cross_entropy_with_logits(z, target, pos_weight=by),
        "classes": lambda z, y: F.cross_entropy(z, y, weight=by),
        "times": lambda z, y: F.cross_entropy(z, y) * by.sum(),
        "over": lambda z, y: F.cross_entropy(z, y, reduction="sum") / by.sum().long(),
    }
    return losses[name]


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("bce", FLOATS + 1),
        ("logits", FLOATS + 1),
        ("positive", FLOATS[0] + 1),
        ("classes", FLOATS[0] + 1),
        ("times", torch.ones(3)),
        ("over", torch.ones(3)),
    ],
)
def test_other_weights_and_factors_are_other_labels(
    name: str, by: torch.Tensor, tmp_path: Path
) -> None:
    first, again, other = (
        trained(tmp_path / str(i), weighted(name, value))
        for i, value in enumerate((by, by, by + 1))
    )
    assert not first.untold
    assert not first.doubts
    assert first.updates[0].labels == again.updates[0].labels
    changed = [
        key
        for key, value in first.updates[0].labels.items()
        if other.updates[0].labels[key] != value
    ]
    assert len(changed) == 1
    assert changed[0].endswith(loss_targets.IN_FLOATING_POINT)


def test_weights_of_classes_are_the_same_in_any_micro_batches(tmp_path: Path) -> None:
    inputs, labels = data()

    def train_in(micro: int) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for x, y in zip(inputs.chunk(micro), labels.chunk(micro), strict=True):
                (F.cross_entropy(model(x), y, weight=FLOATS[0] + 1) / micro).backward()
            optimizer.step()

        return train

    whole, parts = (seen(tmp_path / str(n), train_in(n)).updates[0].labels for n in (1, 3))
    assert whole == parts
    assert len(whole) == 2


def test_a_scaled_loss_and_numbers_of_python_are_given_nothing(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu")
        z = model(inputs)
        loss = F.cross_entropy(z[:, :4], labels) / 3 + 0.5 + 1e-4 * z.select(1, 0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    found = seen(tmp_path, train)
    assert not found.untold
    assert not found.doubts
    assert [*found.updates[0].labels] == [f"indices{loss_targets.AS_NUMBERS}", "target of NllLoss"]


def by_index(z: torch.Tensor, labels: list[int]) -> torch.Tensor:
    rows = z.log_softmax(-1)
    return -sum((rows[i, label] for i, label in enumerate(labels)), start=torch.tensor(0.0))


def by_slice(z: torch.Tensor, labels: list[int]) -> torch.Tensor:
    rows = z.log_softmax(-1)
    return -sum((rows[i, label : label + 1].sum() for i, label in enumerate(labels)), start=ZERO)


def by_part(z: torch.Tensor, labels: list[int]) -> torch.Tensor:
    rows = z.log_softmax(-1)
    parts = rows.unbind(-1), rows.split(1, dim=-1), rows.split([2, 1, 1], dim=-1)
    chosen = (parts[i % 3][min(label, 2)].reshape(-1)[i] for i, label in enumerate(labels))
    return -sum(chosen, start=ZERO)


def by_roll(z: torch.Tensor, labels: list[int]) -> torch.Tensor:
    return -z.log_softmax(-1).roll(labels, [1] * len(labels))[:, 0].sum()


ZERO = torch.tensor(0.0)


@pytest.mark.parametrize("loss_of", [by_index, by_slice, by_part, by_roll])
def test_labels_as_numbers_of_python_are_other_labels(
    loss_of: Callable[[torch.Tensor, list[int]], torch.Tensor], tmp_path: Path
) -> None:
    _, labels = data()
    known = labels.clamp(max=2).tolist()
    other = [(label + (place == 3)) % 3 for place, label in enumerate(known)]
    name = f"indices{loss_targets.AS_NUMBERS}"
    first, again, changed = (
        trained(tmp_path / str(place), lambda z, _, given=given: loss_of(z, given))
        for place, given in enumerate((known, known, other))
    )
    assert not first.untold
    assert first.updates[0].labels == again.updates[0].labels
    assert first.updates[0].labels[name] != changed.updates[0].labels[name]


def test_what_is_written_into_a_part_of_a_result_is_told(tmp_path: Path) -> None:
    def masked(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = z * 1.0
        rows[:, :3].masked_fill_((y > 2)[:, None], -9.0)
        return rows.logsumexp(-1).mean()

    assert "what CopySlices was given beside the model's result" in trained(tmp_path, masked).untold


def test_an_edge_of_the_graph_is_back_propagated_and_told(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = F.cross_entropy(model(inputs), labels)
        edge = torch.autograd.graph.get_gradient_edge(loss)
        torch.autograd.backward(edge)
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(model(inputs).sum())])
        optimizer.step()

    assert GIVEN in seen(tmp_path, train).doubts


def test_labels_behind_hundreds_of_operators_are_seen(tmp_path: Path) -> None:
    def loss_with(other: int) -> LossOf:
        return lambda z, y: sum(
            (F.cross_entropy(z, (y + (other if i == 0 else 0)) % 4) for i in range(300)),
            torch.zeros(()),
        )

    first, second = (trained(tmp_path / str(other), loss_with(other)) for other in (0, 1))
    assert not first.untold
    assert first.updates[0].labels != second.updates[0].labels


def test_that_a_loss_has_too_many_operators_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_targets, "_MOST_NODES", 8)

    found = trained(tmp_path, lambda z, y: sum((z[i, 0].exp() for i in range(6)), z[0, 1]))
    assert "what a loss of more than 8 operators was given" in found.untold


def by_grad(model: nn.Module, loss: torch.Tensor) -> None:
    """Set the gradients by hand."""
    weights = list(model.parameters())
    for x, gradient in zip(weights, torch.autograd.grad(loss.mean(), weights), strict=True):
        x.grad = gradient


@pytest.mark.parametrize(
    ("back_propagate", "said"),
    [
        (by_grad, UNBACKED),
        (lambda model, loss: loss.backward(torch.ones(6)), GIVEN),
        (lambda model, loss: torch.autograd.backward([loss], grad_tensors=[torch.ones(6)]), GIVEN),
        (lambda model, loss: loss.mean().backward(torch.tensor(2.0)), GIVEN),
    ],
    ids=["grad", "vector", "grad_tensors", "factor"],
)
def test_gradients_of_no_scalar_loss_are_a_doubt(
    back_propagate: Callable[[nn.Module, torch.Tensor], None], said: str, tmp_path: Path
) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        back_propagate(model, F.cross_entropy(model(inputs), labels, reduction="none"))
        optimizer.step()

    found = seen(tmp_path, train)
    assert found.doubts == [said]
    assert said.startswith("labels can't be checked: ")
    assert f"unproven: {said}" in found.notes


def test_one_backward_pass_for_two_optimizers_and_a_step_that_moves_nothing_are_no_doubt(
    tmp_path: Path,
) -> None:
    inputs, labels = data()

    def train(model: nn.Module, first: torch.optim.Optimizer) -> None:
        second = torch.optim.SGD(model[1].parameters(), lr=0.1)  # type: ignore[index]
        first.param_groups[0]["params"] = list(model[0].parameters())  # type: ignore[index]
        for _ in range(2):
            F.cross_entropy(model(inputs), labels).backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        first.step()

    assert not seen(tmp_path, train).doubts


@pytest.mark.parametrize(
    "part",
    [
        lambda z: z[:, :-1],
        lambda z: z[:, -3:],
        lambda z: z.roll(-1, 1),
        lambda z: F.pad(z, (-1, 0)),
        lambda z: torch.stack([z[:, -1], z[:, -2], z[:, 0], z[:, 1]], 1),
    ],
)
def test_indices_below_zero_are_read(
    part: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    first, again = (
        trained(tmp_path / str(i), lambda z, y: F.cross_entropy(part(z), y.clamp(max=2)))
        for i in range(2)
    )
    assert not first.untold
    assert first.updates[0].labels == again.updates[0].labels
    assert f"indices{loss_targets.AS_NUMBERS}" in first.updates[0].labels


def heads(z: torch.Tensor, y: list[torch.Tensor]) -> None:
    (F.cross_entropy(z[:, :2], y[0]) + F.cross_entropy(z[:, 2:], y[1])).backward()


def heads_apart(z: torch.Tensor, y: list[torch.Tensor]) -> None:
    F.cross_entropy(z[:, :2], y[0]).backward(retain_graph=True)
    F.cross_entropy(z[:, 2:], y[1]).backward()


@pytest.mark.parametrize("backward", [heads, heads_apart])
def test_labels_of_two_heads_that_change_places_are_others(
    backward: Callable[[torch.Tensor, list[torch.Tensor]], None], tmp_path: Path
) -> None:
    inputs, _ = data()
    labels = [torch.arange(6) % 2, torch.arange(6) // 3]
    found = []
    for place, given in enumerate((labels, labels, labels[::-1])):

        def train(
            model: nn.Module,
            optimizer: torch.optim.Optimizer,
            given: list[torch.Tensor] = given,
        ) -> None:
            backward(model(inputs), given)
            optimizer.step()

        found.append(seen(tmp_path / str(place), train).updates[0].labels["target of NllLoss"])
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("is_trial", [False, True])
def test_labels_belong_to_the_call_that_their_loss_is_made_of(
    is_trial: bool, tmp_path: Path
) -> None:
    inputs, labels = data()
    first, second = inputs[:3], inputs[3:]
    found = []
    for place, shift in enumerate((0, 0, 1)):

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, shift: int = shift) -> None:
            outs = [model(first), model(second)]
            if is_trial:  # another call comes before the loss, and is no part of it
                model.eval()
                model(second).detach()
                model.train()
            aims = [labels[:3], (labels[:3] + 1) % 4]
            aims = aims[::-1] if shift else aims
            sum(
                (F.cross_entropy(out, y) for out, y in zip(outs, aims, strict=True)), start=ZERO
            ).backward()
            optimizer.step()

        found.append(seen(tmp_path / str(place), train).updates[0].labels["target of NllLoss"])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_labels_of_a_loss_after_another_optimizers_step_are_seen(tmp_path: Path) -> None:
    inputs, labels = data()
    found = []
    for place, shift in enumerate((0, 0, 1)):

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, shift: int = shift) -> None:
            torch.manual_seed(1)
            other = nn.Linear(3, 4)
            second = torch.optim.SGD(other.parameters(), lr=0.1)
            for _ in range(2):
                losses = F.cross_entropy(model(inputs), labels), other(inputs)
                losses[0].backward()
                optimizer.step()
                F.cross_entropy(losses[1], (labels + shift) % 4).backward()
                second.step()

        recorded = seen(tmp_path / str(place), train)
        assert not recorded.untold
        found.append([update.labels for update in recorded.updates])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_what_is_saved_through_hooks_of_the_scripts_own_is_not_asked_for(tmp_path: Path) -> None:
    inputs, labels = data()
    asked: list[int] = []

    def taken(x: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        return x

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        out = model(inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, taken):
            loss = F.cross_entropy(out, labels)
        assert not asked
        before = len(asked)
        loss.backward()
        assert len(asked) - before <= 4, "each tensor is unpacked once, by autograd itself"
        optimizer.step()

    found = seen(tmp_path, train)
    expected = len(asked)
    asked.clear()
    model = nn.Linear(3, 4)
    out = model(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, taken):
        loss = F.cross_entropy(out, labels)
    loss.backward()
    assert len(asked) == expected
    assert "what NllLoss was given, under hooks for saved tensors" in found.untold


def test_a_graph_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    inputs, labels = data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = torch.ones((), requires_grad=True)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        (weight * loss).backward(inputs=[weight])
        optimizer.step()

    assert "what NllLoss was given, which is gone" in seen(tmp_path, train).untold


def test_what_lies_between_models_under_the_scripts_hooks_is_not_asked_for(tmp_path: Path) -> None:
    inputs, labels = data()
    asked: list[int] = []

    def taken(x: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        return x

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first = nn.Linear(3, 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, taken):
            between = first(inputs) * FLOATS[:, :3]
        out = model(between)
        assert not asked
        F.cross_entropy(out, labels).backward()
        optimizer.step()

    found = seen(tmp_path, train)
    assert any("what Mul was given on the way has no hash" in each for each in found.doubts)


def test_hooks_inside_of_others_and_after_them_are_told_apart() -> None:
    hooks = SavedHooks()
    undone = hooks.install()
    x = torch.ones(2, requires_grad=True)

    def saving() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    try:
        made = [x.exp()]
        with saving():
            made.append(x.exp())
            with saving():
                made.append(x.exp())
            made.append(x.exp())
        made.append(x.exp())
        with saving():
            made.append(x.exp())
            found = [hooks.are_on(node_of(y)) for y in made]
    finally:
        for undo in undone:
            undo()
    assert found == [False, True, True, True, False, True]
    assert [hooks.are_on(node_of(y)) for y in made] == found


def node_of(x: torch.Tensor) -> int:
    assert x.grad_fn is not None
    return x.grad_fn._sequence_nr()
