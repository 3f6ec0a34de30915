"""An average beside several models, or under a name of its own, begins where its model does."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stability.recorder.inside.given_start import give_start
from stability.recorder.inside.names import named_state
from stability.recorder.inside.nudge import nudge_weights
from stability.recorder.inside.prefixed_copies import prefixed_copies


class Generator(nn.Sequential):
    """One of two models."""


class Critic(nn.Sequential):
    """The other one."""


class Averaged(nn.Module):
    """Holds a model and its average, as ema-pytorch does."""

    def __init__(self, model: nn.Module, *, frozen: bool) -> None:
        super().__init__()
        self.online_model, self.ema_model = model, copy.deepcopy(model)
        self.ema_model.requires_grad_(not frozen)


Made = tuple[list[nn.Module], nn.Module, nn.Module, object]
"""The models that train, one of them, its average, and what else must stay."""


def layers() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)]


def beside() -> Made:
    models = Generator(*layers()), Critic(*layers())
    return [*models], models[0], copy.deepcopy(models[0]), None


def averaged_model() -> Made:
    models = Generator(*layers()), Critic(*layers())
    average = torch.optim.swa_utils.AveragedModel(models[1])
    return [*models], models[1], average.module, average


def of_one_class() -> Made:
    models = Generator(*layers()), Generator(*layers())
    return [*models], models[1], copy.deepcopy(models[1]), None


def inside() -> Made:
    both = Averaged(Generator(*layers()), frozen=True)
    return [both.online_model], both.online_model, both.ema_model, both


def inside_and_thawed() -> Made:
    both = Averaged(Generator(*layers()), frozen=False)
    return [both.online_model], both.online_model, both.ema_model, both


@pytest.mark.parametrize(
    "made",
    [
        inside,
        *(
            pytest.param(made, marks=pytest.mark.slow)
            for made in (beside, averaged_model, of_one_class, inside_and_thawed)
        ),
    ],
)
@pytest.mark.parametrize("how", ["nudged", pytest.param("given", marks=pytest.mark.long)])
def test_an_average_begins_where_its_model_does(made: Callable[[], Made], how: str) -> None:
    models, model, average, _rest = made()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    stranger = Generator(*layers())  # its constants are the same, and no weight of it is
    norms = [x.clone() for x in stranger.parameters()]
    before = [x.clone() for x in model.parameters()]
    state, _ = named_state(x for each in models for x in each.parameters())
    if how == "nudged":
        nudge_weights(state, 2, 0, 0)
    else:
        trained = {id(x) for each in models for x in each.parameters()}
        given = {name: torch.randn(x.shape) for name, x in state.items()}
        thawed = {name for name, x in state.items() if id(x) not in trained}
        given |= {x: given[x.replace("ema_model", "online_model")] for x in thawed}
        give_start(state, given)
    pairs = zip(model.parameters(), average.parameters(), before, strict=True)
    for weight, copied, was in pairs:
        assert not weight.equal(was)
        assert weight.equal(copied)
    assert all(x.equal(was) for x, was in zip(stranger.parameters(), norms, strict=True))
    assert len(optimizers) == len(models)


def test_two_models_that_train_are_no_copies_of_one_another() -> None:
    first = Generator(*layers())
    second = copy.deepcopy(first)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    state, _ = named_state(optimizer.param_groups[0]["params"])
    assert prefixed_copies(state) == {}


def test_constants_alone_are_no_copy() -> None:
    model, other = Generator(nn.Linear(3, 4), nn.LayerNorm(4)), nn.LayerNorm(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, _ = named_state(optimizer.param_groups[0]["params"])
    assert prefixed_copies(state) == {}
    assert all(other.weight == 1)
