"""The gradient of a script's loss at what its model returned gives the script's own gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stability.recorder.inside.evaluations import returned_loss
from stability.recorder.inside.hooks import install
from stability.recorder.inside.returned_gradient import ReturnedGradient, keep_gradient
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training

BEGUN = {"init": "", "buffers": [], "rank": 0, "world": 1, "script": "", "environment": {}}


class Model(nn.Module):
    """A trunk with two heads; `of` makes its result of the trunk's and the heads'."""

    def __init__(self, of: Callable[["Model", Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 11, bias=False), nn.Linear(8, 11)
        self.of = of
        self.extra: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Return what `of` makes."""
        hidden = torch.tanh(self.trunk(self.embed(x)))
        self.labels = y
        return self.of(self, hidden, self.first(hidden), self.second(hidden))


@dataclass
class Output:
    """What a model of Hugging Face's returns."""

    logits: Tensor
    loss: Tensor | None = None


class _Doubled(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0].mul_(grads[0])


class _Writes(torch.autograd.Function):
    """Triples, and writes into the gradient that it is given, as a careless kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].mul_(3)


def _entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _logits(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return first


def _both(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, second


def _with_loss(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Output:
    assert model.labels is not None
    return Output(first, _entropy(first, model.labels))


def _checkpointed(use_reentrant: bool) -> Callable[..., Any]:
    def of(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
        return first + checkpoint(model.second, hidden + 1, use_reentrant=use_reentrant)

    return of


def _keeps(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    model.extra = second
    return first


def _nested(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, hidden


def _written(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
    return _Writes.apply(first)


def _hooked(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    out = first + second
    out.register_hook(lambda gradient: gradient * 2)
    return out


def _kept(
    folder: Path,
    of: Callable[..., Any],
    train: Callable[[Model, Tensor, Tensor], object],
) -> tuple[ReturnedGradient, dict[str, Tensor], dict[str, Tensor]]:
    """Return what was kept of the last of `train`'s passes, and the gradients by each way.

    The second are those of the script's backward, the third those of the model called once more.
    """
    training = Training(
        Spool(str(folder), 0),
        due=lambda step: False,
        begin=lambda state: {**BEGUN, "modules": {}},
    )
    torch.manual_seed(0)
    model = Model(of)
    calls: list[tuple[Any, Any, ReturnedGradient]] = []

    class Keeping:
        """Keeps the gradient of each pass."""

        def called(self, _: nn.Module, args: Any, kwargs: Any, result: Any, begin: int) -> None:
            """Tell of a pass."""
            loss = returned_loss(result)
            calls.append((args, kwargs, keep_gradient(training.models, result, begin, loss)))

        def step(self) -> None:
            """Leave updates alone."""

        def end(self) -> None:
            """Leave the end alone."""

    training.look = lambda _: Keeping()
    uninstall = install(training)
    try:
        torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, 11, (3, 6))
        train(model, x[:, :-1], x[:, 1:])
        own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        args, kwargs, kept = calls[-1]
        again: dict[str, Tensor] = {}
        if not kept.lacks:
            with training.apart():
                model.zero_grad()
                kept.applied_to(model(*args, **kwargs)).backward()
            again = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finally:
        uninstall()
    return kept, own, again


def _plain(model: Model, x: Tensor, y: Tensor) -> None:
    _entropy(model(x), y).backward()


def _in_place(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.div_(2)
    logits[:, 0] = 0
    _entropy(logits, y).backward()


def _shifted(model: Model, x: Tensor, y: Tensor) -> None:
    (1024 * _entropy(model(x)[:, 1:].float(), y[:, :-1])).backward()


def _twice(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    (_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()).backward()


def _two_results(model: Model, x: Tensor, y: Tensor) -> None:
    first, second = model(x)
    (_entropy(first, y) + F.mse_loss(second, first.detach())).backward()


def _one_of_two(model: Model, x: Tensor, y: Tensor) -> None:
    _entropy(model(x)[1], y).backward()


def _two_backwards(model: Model, x: Tensor, y: Tensor) -> None:
    first, second = model(x)
    _entropy(first, y).backward(retain_graph=True)
    _entropy(second, y).backward()


def _two_losses(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    _entropy(logits, y).backward(retain_graph=True)
    logits.square().mean().backward()


def _doubling_hook(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.register_hook(lambda gradient: gradient * 2)
    _entropy(logits, y).backward()


def _asking_for_gradients(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    loss = _entropy(logits, y)
    torch.autograd.grad(loss, [model.trunk.weight], retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(logits.sum(), [model.trunk.weight])


def _fused(model: Model, x: Tensor, y: Tensor) -> None:
    _Doubled.apply(model(x)).backward()


def _own_loss(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x, y).logits
    F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1).backward()


def _two_batches(model: Model, x: Tensor, y: Tensor) -> None:
    _entropy(model(x[:1]), y[:1]).backward()
    model.zero_grad()
    _entropy(model(x[1:]), y[1:]).backward()


def _by_key(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> dict[str, Any]:
    return {"logits": first, "aux": [second, None]}


def _of_keys(model: Model, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (_entropy(out["logits"], y) + out["aux"][0].square().mean()).backward()


def _parts(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
    return (first * second).unbind(1)


def _of_parts(model: Model, x: Tensor, y: Tensor) -> None:
    _, _, third, fourth, _ = model(x)
    (third * fourth).sum().backward()


@pytest.mark.parametrize(
    ("of", "train"),
    [
        (_logits, _plain),
        (_logits, _in_place),
        (_logits, _shifted),
        (_logits, _twice),
        (_logits, _two_batches),
        (_logits, _doubling_hook),
        (_logits, _asking_for_gradients),
        (_logits, _fused),
        (_written, _plain),
        (_both, _two_results),
        (_both, _one_of_two),
        (_nested, lambda model, x, y: _entropy(model(x)[0], y).backward()),
        (_nested, lambda model, x, y: model(x)[1].square().sum().backward()),
        (_by_key, _of_keys),
        (_parts, _of_parts),
        (_with_loss, _own_loss),
        (_checkpointed(False), _plain),
        (_checkpointed(True), _plain),
    ],
)
def test_under_it_the_model_has_the_scripts_own_gradients_to_the_bit(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object]
) -> None:
    kept, own, again = _kept(tmp_path, of, train)
    assert kept.lacks == ""
    assert not kept.is_of_loss
    assert own.keys() == again.keys()
    assert any(gradient.any() for gradient in own.values())
    for name, gradient in own.items():
        assert torch.equal(gradient, again[name]), name


@pytest.mark.parametrize(("of", "train"), [(_both, _two_backwards), (_logits, _two_losses)])
def test_two_losses_that_are_back_propagated_one_by_one_are_added_up(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object]
) -> None:
    kept, own, again = _kept(tmp_path, of, train)
    assert kept.lacks == ""
    for name, gradient in own.items():  # added up in another order
        torch.testing.assert_close(gradient, again[name], rtol=1e-5, atol=1e-7)


def test_a_loss_that_the_model_returned_and_nothing_else_is_known_as_such(tmp_path: Path) -> None:
    def train(model: Model, x: Tensor, y: Tensor) -> None:
        (model(x, y).loss / 3).backward()

    kept, _, _ = _kept(tmp_path, _with_loss, train)
    assert kept.is_of_loss
    assert kept.gradients == {}, "a gradient of logits takes memory, and nobody needs it"


def _of_what_is_kept(model: Model, x: Tensor, y: Tensor) -> None:
    loss = _entropy(model(x), y)
    assert model.extra is not None
    (loss + model.extra.square().mean()).backward()


def _set_by_hand(model: Model, x: Tensor, y: Tensor) -> None:
    weights = [model.trunk.weight, model.first.weight]
    gradients = torch.autograd.grad(_entropy(model(x), y), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def _penalized(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    summed = logits.logsumexp(-1).sum()
    (inner,) = torch.autograd.grad(summed, [model.trunk.bias], create_graph=True)
    (_entropy(logits, y) + inner.square().sum()).backward()


def _given(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.backward(torch.ones_like(logits))


def _judged(model: Model, x: Tensor, y: Tensor) -> None:
    judge = nn.Linear(11, 1).requires_grad_(False)
    judge(model(x)).mean().backward()


def _into_a_view(model: Model, x: Tensor, y: Tensor) -> None:
    _entropy(model(x).mul_(2), y).backward()


UNRETURNED = "something that was not returned is a part of the loss"
OTHERWISE = "a result got a gradient by a way that was not seen, as through another model"


@pytest.mark.parametrize(
    ("of", "train", "why"),
    [
        (_keeps, _of_what_is_kept, UNRETURNED),
        (_logits, _penalized, UNRETURNED),
        (lambda model, hidden, first, second: second.view_as(first), _into_a_view, UNRETURNED),
        (
            _nested,
            lambda model, x, y: sum(each.square().sum() for each in model(x)).backward(),
            "two results are parts of the loss, one of them made of the other",
        ),
        (_hooked, _plain, "a result has hooks of the model's own, which may change its gradient"),
        (_logits, _set_by_hand, "no loss's backward() was seen to go through what was returned"),
        (_logits, _given, OTHERWISE),
        (_logits, _judged, OTHERWISE),
    ],
)
def test_what_it_would_leave_out_is_said(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object], why: str
) -> None:
    kept, own, _ = _kept(tmp_path, of, train)
    assert own
    assert kept.lacks == why
    with pytest.raises(ValueError, match=why.partition("(")[0]):
        kept.applied_to(torch.zeros(3, 5, 11))


def test_a_result_of_another_shape_is_refused(tmp_path: Path) -> None:
    kept, _, _ = _kept(tmp_path, _logits, _plain)
    with pytest.raises(ValueError, match="called once more, the model returns tensors of other"):
        kept.applied_to(torch.zeros(3, 4, 11))
