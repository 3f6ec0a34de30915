"""The names of the weights that an optimizer was given."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from stability.recorder.inside.names import (
    copies_of,
    frozen_beside,
    masters_of,
    named_masters,
    named_state,
    optimized,
    unwrapped,
)


class Named(nn.Module):
    """A root with a buffer that a checkpoint holds, one that it doesn't, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("table", torch.ones(2), persistent=False)


NAMES = {
    *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight"),
    *("body.1.running_mean", "body.1.running_var"),
}


def test_the_outermost_owner_names_weights_and_kept_buffers() -> None:
    model = Named()
    state, owners = named_state(model.body.parameters())  # an optimizer of a part
    assert set(state) == NAMES
    assert owners == ["Named"]
    assert state["head.weight"] is model.head.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_what_wraps_a_model_is_in_no_name() -> None:
    model = Named()
    compiled = torch.compile(model)
    state, owners = named_state(compiled.parameters())
    assert set(state) == NAMES
    assert owners == ["Named"]
    assert unwrapped(compiled) is model

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    wrapper = Wrapper()
    assert set(named_state(wrapper.parameters())[0]) == NAMES
    assert unwrapped(wrapper) is model


def test_a_copy_of_the_weights_names_nothing() -> None:
    model = Named()
    average = copy.deepcopy(model)
    state, owners = named_state(model.parameters())
    assert owners == ["Named"]
    assert all(x is not y for x in state.values() for y in average.parameters())


def test_models_without_a_common_owner_are_told_apart() -> None:
    first, second, other = nn.Linear(2, 2), nn.Linear(2, 3), Named()
    weights = [*first.parameters(), *second.parameters(), *other.parameters()]
    state, owners = named_state(weights)
    assert sorted(owners) == ["Linear", "Linear", "Named"]
    assert {name.partition(".")[0] for name in state} == {"Linear_0", "Linear_1", "Named"}
    assert len({id(x) for x in state.values()}) == 2 + 2 + len(NAMES)


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert set(named_state(model.parameters())[0]) == {"0.weight"}


@pytest.fixture
def _one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_what_wraps_a_part_of_a_model_for_several_ranks_is_in_no_name() -> None:
    model = Named()
    bare = told(model)
    assert bare == (sorted(NAMES), ["Named"], {"Named.scale"})
    whole = nn.parallel.DistributedDataParallel(model)
    assert told(model) == bare
    del whole
    model.body = nn.parallel.DistributedDataParallel(model.body)  # type: ignore[assignment]
    assert told(model) == bare


def told(model: nn.Module) -> tuple[list[str], list[str], set[str]]:
    """Return the names of a model's state, of its class and of what in it is frozen."""
    state, owners = named_state(model.parameters())
    return sorted(state), owners, set(frozen_beside(state))


def test_a_weight_of_no_module_is_named_by_its_place() -> None:
    free = nn.Parameter(torch.zeros(2))
    model = nn.Linear(2, 2)
    state, owners = named_state([*model.parameters(), free])
    assert set(state) == {"weight", "bias", "unowned_2"}
    assert owners == ["Linear"]


_count = gc.get_freeze_count
"""As it is in a user's process, before the tests' own freezing replaces it (`conftest`)."""


@pytest.fixture
def _freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test freeze, and leave frozen what was."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", _count)
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_freezes")
def test_modules_that_a_script_has_frozen_for_the_collector_are_found() -> None:
    model = Named()
    gc.freeze()  # as scripts do once all is set up: no search by the collector sees what is there
    state = dict(model.body.named_parameters())
    assert set(frozen_beside(state)) == {"Named.scale"}
    gc.freeze()
    state, owners = named_state(model.body.parameters())
    assert (set(state), owners) == (NAMES, ["Named"])


@pytest.mark.usefixtures("_freezes")
def test_of_a_model_that_is_frozen_in_part_all_is_found() -> None:
    model = Named()
    gc.freeze()
    model.head = nn.Linear(4, 2, bias=False)  # it alone trains, and was made later
    state, owners = named_state(model.head.parameters())
    assert (set(state), owners) == (NAMES, ["Named"])


@pytest.mark.usefixtures("_freezes")
def test_masters_of_an_optimizer_that_is_frozen_are_found() -> None:
    masters = [torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    gc.freeze()
    assert set(masters_of(named_masters(optimizer.param_groups[0]["params"]))) == {"unowned_0"}


def test_an_optimizer_may_be_a_module() -> None:
    class Both(nn.Module, torch.optim.SGD):
        def __init__(self, masters: list[torch.Tensor]) -> None:
            nn.Module.__init__(self)
            torch.optim.SGD.__init__(self, masters, lr=0.1)

    masters = [torch.ones(2, requires_grad=True)]
    optimizer = Both(masters)
    assert {id(x) for group in optimizer.param_groups for x in group["params"]} <= optimized()


def test_a_nudge_finds_an_average_that_begins_with_the_same_bits() -> None:
    model = Named()
    average = copy.deepcopy(model)
    other = Named()
    with torch.no_grad():
        other.head.weight.add_(1)
    assert copies_of("head.weight", model.head.weight) == [average.head.weight]


class Lazy:
    """Proxies as of transformers wake up when they are asked for their class."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("a proxy was asked for its class")


def test_objects_that_are_no_modules_are_left_alone() -> None:
    lazy = Lazy()
    assert any(x is lazy for x in gc.get_objects()) or gc.is_tracked(lazy)
    model = nn.Linear(2, 2)
    assert set(named_state(model.parameters())[0]) == {"weight", "bias"}


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_module_half_made_is_passed_over(fails: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            if fails == "after":
                super().__init__()
            kept.append(self)
            raise RuntimeError

    kept: list[nn.Module] = []
    with pytest.raises(RuntimeError):
        Broken()
    model = nn.Linear(2, 2)
    assert named_state(model.parameters())[1] == ["Linear"]
