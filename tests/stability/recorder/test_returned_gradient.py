"""The gradient of a script's loss at what its model returned gives the script's own gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.stability.recorder.returned import (
    Model,
    both,
    entropy,
    kept_of,
    logits,
    nested,
    plain,
    with_loss,
)


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


def _checkpointed(use_reentrant: bool) -> Callable[..., Any]:
    def of(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
        return first + checkpoint(model.second, hidden + 1, use_reentrant=use_reentrant)

    return of


def _written(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
    return _Writes.apply(first)


def _in_place(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.div_(2)
    logits[:, 0] = 0
    entropy(logits, y).backward()


def _shifted(model: Model, x: Tensor, y: Tensor) -> None:
    (1024 * entropy(model(x)[:, 1:].float(), y[:, :-1])).backward()


def _twice(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    (entropy(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()).backward()


def _two_results(model: Model, x: Tensor, y: Tensor) -> None:
    first, second = model(x)
    (entropy(first, y) + F.mse_loss(second, first.detach())).backward()


def _one_of_two(model: Model, x: Tensor, y: Tensor) -> None:
    entropy(model(x)[1], y).backward()


def _two_backwards(model: Model, x: Tensor, y: Tensor) -> None:
    first, second = model(x)
    entropy(first, y).backward(retain_graph=True)
    entropy(second, y).backward()


def _pair(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    loss, extra = torch.stack([first.square().mean(), second.square().mean()]).unbind()
    return {"loss": loss, "extra": extra}


def loss_and_extra(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
    return {"loss": first.square().mean(), "extra": second.square().mean()}


def _loss_then_extra(model: Model, x: Tensor, y: Tensor) -> None:
    out = model(x)
    out["loss"].backward(retain_graph=True)
    out["extra"].backward()


def _complex(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.complex(first, second)


def _of_complex(model: Model, x: Tensor, y: Tensor) -> None:
    found = model(x)
    (found.abs().square().mean() + (found * (1 + 2j)).real.sin().mean()).backward()


def _two_losses(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    entropy(logits, y).backward(retain_graph=True)
    logits.square().mean().backward()


def _doubling_hook(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    logits.register_hook(lambda gradient: gradient * 2)
    entropy(logits, y).backward()


def _asking_for_gradients(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    loss = entropy(logits, y)
    torch.autograd.grad(loss, [model.trunk.weight], retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(logits.sum(), [model.trunk.weight])


def _fused(model: Model, x: Tensor, y: Tensor) -> None:
    _Doubled.apply(model(x)).backward()


def _own_loss(model: Model, x: Tensor, y: Tensor) -> None:
    logits = model(x, y).logits
    F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1).backward()


def _two_batches(model: Model, x: Tensor, y: Tensor) -> None:
    entropy(model(x[:1]), y[:1]).backward()
    model.zero_grad()
    entropy(model(x[1:]), y[1:]).backward()


def _one_of_pair(model: Model, x: Tensor, y: Tensor) -> None:
    first, others = model(x)
    (entropy(first, y) + others["again"].square().mean()).backward()


def _by_key(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> dict[str, Any]:
    return {"logits": first, "aux": [second, None]}


def _of_keys(model: Model, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (entropy(out["logits"], y) + out["aux"][0].square().mean()).backward()


def _parts(model: Model, hidden: Tensor, first: Tensor, second: Tensor) -> Any:
    return (first * second).unbind(1)


def _of_parts(model: Model, x: Tensor, y: Tensor) -> None:
    _, _, third, fourth, _ = model(x)
    (third * fourth).sum().backward()


@pytest.mark.parametrize(
    ("of", "train"),
    [
        (logits, plain),
        (logits, _in_place),
        (logits, _shifted),
        (logits, _twice),
        (logits, _two_batches),
        (logits, _doubling_hook),
        (logits, _asking_for_gradients),
        (logits, _fused),
        (_written, plain),
        (lambda model, hidden, first, second: (first, {"again": first}), _one_of_pair),
        (both, _two_results),
        (both, _one_of_two),
        (nested, lambda model, x, y: entropy(model(x)[0], y).backward()),
        (nested, lambda model, x, y: model(x)[1].square().sum().backward()),
        (_by_key, _of_keys),
        (_parts, _of_parts),
        (with_loss, _own_loss),
        (_pair, lambda model, x, y: sum(model(x).values()).backward()),
        (_pair, lambda model, x, y: model(x)["extra"].backward()),
        (_complex, _of_complex),
        (_checkpointed(False), plain),
        (_checkpointed(True), plain),
    ],
)
def test_under_it_the_model_has_the_scripts_own_gradients_to_the_bit(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object]
) -> None:
    kept, own, again = kept_of(tmp_path, of, train)
    assert kept.lacks == ""
    assert not kept.is_of_loss
    assert own.keys() == again.keys()
    assert any(gradient.any() for gradient in own.values())
    for name, gradient in own.items():
        assert torch.equal(gradient, again[name]), name


@pytest.mark.parametrize(
    ("of", "train"),
    [(both, _two_backwards), (logits, _two_losses), (loss_and_extra, _loss_then_extra)],
)
def test_two_losses_that_are_back_propagated_one_by_one_are_added_up(
    tmp_path: Path, of: Callable[..., Any], train: Callable[..., object]
) -> None:
    kept, own, again = kept_of(tmp_path, of, train)
    assert kept.lacks == ""
    for name, gradient in own.items():  # added up in another order
        torch.testing.assert_close(gradient, again[name], rtol=1e-5, atol=1e-7)


def test_a_loss_that_the_model_returned_and_nothing_else_is_known_as_such(tmp_path: Path) -> None:
    def train(model: Model, x: Tensor, y: Tensor) -> None:
        (model(x, y).loss / 3).backward()

    kept, _, _ = kept_of(tmp_path, with_loss, train)
    assert kept.is_of_loss
    assert kept.nbytes == 4, "a gradient of logits takes memory, and nobody needs it"
