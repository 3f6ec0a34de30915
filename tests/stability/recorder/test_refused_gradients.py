"""What a gradient at a model's result would leave out is said, and no bit of a training changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.recorder.inside import loss_targets
from stability.recorder.inside.returned_gradient import ReturnedGradient
from tests.stability.recorder.returned import (
    LATEST,
    Model,
    entropy,
    kept_of,
    logits,
    nested,
    plain,
    with_loss,
)


def _keeps(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    model.extra = second
    return first


def _written_view(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    found = second.view(3, 5, 11)
    found[..., 10] = -3.0
    return found


def _hooked(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    out = first + second
    out.register_hook(lambda gradient: gradient * 2)
    return out


def _both_ends(model: Model, x: Tensor, y: Tensor) -> None:
    first, _, third = model(x)
    (first.square().mean() + third.square().mean()).backward()


def _one_part_is_kept(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    one, model.extra, *_ = (first * second).unbind(1)
    return one


def _of_both_parts(model: Model, x: Tensor, y: Tensor) -> None:
    one = model(x)
    assert model.extra is not None
    (one.square().mean() + model.extra.square().mean()).backward()


def _tied(model: Model, x: Tensor, y: Tensor) -> None:
    F.linear(model(x), model.second.weight.T).square().mean().backward()


def _decayed(model: Model, x: Tensor, y: Tensor) -> None:
    (entropy(model(x), y) + model.trunk.weight.square().sum()).backward()


def _of_what_is_kept(model: Model, x: Tensor, y: Tensor) -> None:
    loss = entropy(model(x), y)
    assert model.extra is not None
    (loss + model.extra.square().mean()).backward()


def _set_by_hand(model: Model, x: Tensor, y: Tensor) -> None:
    weights = [model.trunk.weight, model.first.weight]
    gradients = torch.autograd.grad(entropy(model(x), y), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def _penalized(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    summed = logits.logsumexp(-1).sum()
    (inner,) = torch.autograd.grad(summed, [model.trunk.bias], create_graph=True)
    (entropy(logits, y) + inner.square().sum()).backward()


def _given(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.backward(torch.ones_like(logits))


class _Held:
    """A container that is no tuple, mapping or dataclass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def _of_held(model: Model, x: Tensor, y: Tensor) -> None:
    entropy(model(x).x, y).backward()


def _given_beside_a_loss(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x, y).logits
    logits.backward(torch.ones_like(logits))


def _sparse_then_dense(model: Model, x: Tensor, y: Tensor) -> None:
    table = model(x)
    first = torch.zeros(11, 1, dtype=torch.long)
    torch.gather(table, 1, first, sparse_grad=True).sum().backward(retain_graph=True)
    table.square().sum().backward()


def _judged(model: Model, x: Tensor, y: Tensor) -> None:
    judge = nn.Linear(11, 1).requires_grad_(False)
    judge(model(x)).mean().backward()


def _into_a_view(model: Model, x: Tensor, y: Tensor) -> None:
    entropy(model(x).mul_(2), y).backward()


UNRETURNED = "something that was not returned is a part of the loss"
OTHERWISE = (
    "a result got a gradient by a way that was not seen, as through another model or by one that "
    "backward() was given"
)
WEIGHT = "a weight is by itself a part of the loss"


@pytest.mark.parametrize(
    ("of", "train", "why"),
    [
        (_keeps, _of_what_is_kept, UNRETURNED),
        (logits, _penalized, UNRETURNED),
        (lambda model, hidden, first, second: second.view_as(first), _into_a_view, UNRETURNED),
        (
            nested,
            lambda model, x, y: sum(each.square().sum() for each in model(x)).backward(),
            "two results are parts of the loss, one of them made of the other",
        ),
        (
            lambda model, hidden, first, second: (hidden, hidden + 1, model.second(hidden + 1)),
            _both_ends,
            "two results are parts of the loss, one of them made of the other",
        ),
        (_one_part_is_kept, _of_both_parts, UNRETURNED),
        (logits, _tied, WEIGHT),
        (logits, _decayed, WEIGHT),
        (with_loss, _given_beside_a_loss, OTHERWISE),
        (
            lambda model, hidden, first, second: _Held(first),
            _of_held,
            "no tensor with a gradient was found in what was returned, a _Held",
        ),
        (
            lambda model, hidden, first, second: model.embed.weight * 1,
            _sparse_then_dense,
            "its gradient could not be kept: add(sparse, dense) is not supported. Use add(dense, "
            "sparse) instead.",
        ),
        (_written_view, plain, "a result is a view that was written into"),
        (_hooked, plain, "a result has hooks of the model's own, which may change its gradient"),
        (logits, _set_by_hand, "no loss's backward() was seen to go through what was returned"),
        (logits, _given, OTHERWISE),
        (logits, _judged, OTHERWISE),
    ],
)
def test_what_it_would_leave_out_is_said(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object], why: str
) -> None:
    kept, own, _ = kept_of(tmp_path, of, train)
    assert own
    assert kept.lacks == why
    with pytest.raises(ValueError, match=why.partition("(")[0]):
        kept.applied_to(torch.zeros(3, 5, 11))


def test_what_of_a_long_loss_was_not_looked_at_may_be_made_of_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_targets, "_MOST_NODES", 50)

    def train(model: Model, x: Tensor, y: Tensor) -> None:
        loss = entropy(model(x), y)
        assert model.extra is not None
        far = model.extra.square().mean()
        for _ in range(60):
            far = far + 1
        (far + loss).backward()

    kept, _, _ = kept_of(tmp_path, _keeps, train)
    assert kept.lacks == OTHERWISE


def _sums_three_ways(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> dict[str, Tensor]:
    """Return gradients whose bits depend on the order in which three of them are added up."""

    def of(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        inside = model.second(2 - hidden.flatten(0, 1))
        view = inside.view(-1, 1, 11)
        view[..., 10] = -3.0
        return inside.square().mean() * 1e-2, view, inside

    def train(model: Model, x: Tensor, y: Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(15, 11, generator=generator) for _ in range(2)]
        mean, view, inside = model(x)
        # in this order: the view's node stands between those of two other uses
        one = (inside * weights[0]).sum()
        two = (view.sigmoid() * 0.37).sum()
        three = (inside * weights[1]).sin().sum()
        total = one + two + three + mean
        total.backward()

    if not keeps:
        monkeypatch.setattr(ReturnedGradient, "__init__", lambda self, *_, **__: None)
        monkeypatch.setattr(ReturnedGradient, "lacks", "not asked for")
    return kept_of(folder, of, train)[1]


def test_a_view_that_was_written_into_is_not_asked_for_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would make a new one, and another order of sums: other bits."""
    kept = _sums_three_ways(tmp_path / "kept", monkeypatch, keeps=True)
    alone = _sums_three_ways(tmp_path / "alone", monkeypatch, keeps=False)
    for name, gradient in alone.items():
        assert torch.equal(gradient, kept[name]), name


def test_a_loss_that_is_also_of_other_results_is_not_the_models_own(tmp_path: Path) -> None:
    def train(model: Model, x: Tensor, y: Tensor) -> None:
        found = model(x, y)
        (found.loss + found.logits.square().mean()).backward()

    kept, _, _ = kept_of(tmp_path, with_loss, train)
    assert not kept.is_of_loss
    assert kept.reaches_loss
    assert kept.lacks == "two results are parts of the loss, one of them made of the other"


def test_it_is_applied_in_the_dtype_of_the_result_and_dropped_when_it_is_not_needed(
    tmp_path: Path,
) -> None:
    kept, _, _ = kept_of(tmp_path, logits, plain)
    wide = torch.zeros(3, 5, 11, dtype=torch.float64, requires_grad=True)
    kept.applied_to(wide).backward()
    assert wide.grad is not None
    assert torch.equal(wide.grad, kept.gradients[0].double())
    assert kept.nbytes == 3 * 5 * 11 * 4
    kept.drop()
    assert kept.nbytes == 0


def test_of_several_passes_an_early_one_that_is_dropped_keeps_nothing(tmp_path: Path) -> None:
    early: list[ReturnedGradient] = []

    def train(model: Model, x: Tensor, y: Tensor) -> None:
        loss = entropy(model(x[:1]), y[:1])
        early.append(LATEST[-1])
        early[0].drop()
        (loss + entropy(model(x[1:]), y[1:])).backward()

    kept, _, _ = kept_of(tmp_path, logits, train)
    assert kept.nbytes == 2 * 5 * 11 * 4
    assert early[0].nbytes == 0


def test_a_result_of_another_shape_is_refused(tmp_path: Path) -> None:
    kept, _, _ = kept_of(tmp_path, logits, plain)
    with pytest.raises(ValueError, match="called once more, the model returns tensors of other"):
        kept.applied_to(torch.zeros(3, 4, 11))
