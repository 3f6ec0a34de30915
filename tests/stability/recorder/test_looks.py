"""What is looked at of a training, and that nothing else is touched, and nothing left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from stability.probe.executed import Executed, unwitnessed
from stability.recorder.inside.hooks import install
from stability.recorder.inside.looks import Looks, is_looked_at
from stability.recorder.inside.module_names import names_of_modules
from stability.recorder.inside.names import state_of
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training

COMPILED = "torch.compile was called, and what a compiled graph multiplies is not seen"


class Watched:
    """A small model, trained under the recorder's hooks, and looked at."""

    def __init__(self, folder: Path, due: Callable[[int], bool]) -> None:
        torch.manual_seed(0)
        self.training = Training(Spool(str(folder), 0), due=lambda step: False, keeps_state=False)
        self.uninstall = install(self.training)
        self.looks = Looks(self.training, Executed, due)
        self.looks.begin()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def end(self) -> None:
        self.training.when_update_ends(self.training.step + 1)
        self.looks.end()
        self.uninstall()

    @property
    def seen(self) -> set[tuple[str, str, str]]:
        return {(row[0], row[1], row[2]) for row in self.looks.rows}


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where tests before these may have called torch.compile."""
    monkeypatch.setattr(eval_frame, "cached_backends", {})


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path, is_looked_at)
    yield found
    found.looks.end()
    found.uninstall()
    assert_untouched()


UNTOUCHED = torch.autograd.backward, torch.compile, functional.scaled_dot_product_attention


def assert_untouched() -> None:
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks
    assert (
        torch.autograd.backward,
        torch.compile,
        functional.scaled_dot_product_attention,
    ) == UNTOUCHED
    assert not _get_current_dispatch_mode_stack()


ALL = {("linear", str(i), during) for i in (0, 2) for during in ("forward", "backward")}


def test_the_first_two_updates_are_looked_at_then_a_few_and_the_last() -> None:
    assert [u for u in range(150) if is_looked_at(u, 140)] == [0, 1, 4, 9, 19, 49, 99, 139]


def test_between_looks_no_hook_is_left(watched: Watched) -> None:
    optimizer = watched.optimizer()
    for update in range(4):
        loss = watched.model(torch.ones(5, 3)).sum()
        assert bool(modules._global_forward_pre_hooks) == (update < 2)
        assert bool(_get_current_dispatch_mode_stack()) == (update < 2)
        loss.backward()
        assert not _get_current_dispatch_mode_stack()
        optimizer.step()
    watched.end()
    assert watched.looks.steps == [0, 1]
    assert watched.seen == ALL
    assert watched.looks.unproven == ""


def test_each_of_two_losses_is_looked_at(watched: Watched) -> None:
    other = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*watched.model.parameters(), *other.parameters()], lr=0.1)
    for _ in range(2):
        one, two = watched.model(torch.ones(5, 3)), other(torch.ones(5, 4))
        one.sum().backward()
        two.sum().backward()
        optimizer.step()
    watched.end()
    assert {(part, during) for part, _, during in watched.seen} == {
        ("linear", "forward"),
        ("linear", "backward"),
    }
    assert ("linear", "Linear", "backward") in watched.seen


def test_a_call_before_there_is_an_optimizer_is_not_looked_at(watched: Watched) -> None:
    watched.model(torch.ones(1, 3))
    assert not _get_current_dispatch_mode_stack()
    optimizer = watched.optimizer()
    watched.model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    watched.end()
    assert watched.looks.steps == [0]
    assert watched.seen == ALL


def test_a_step_that_is_given_a_closure_is_looked_at_inside(watched: Watched) -> None:
    optimizer = torch.optim.LBFGS(watched.model.parameters(), max_iter=3, history_size=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = watched.model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    watched.end()
    assert watched.seen >= ALL
    assert ("optimizer", "", "update") in watched.seen, "LBFGS multiplies vectors"
    assert not {row for row in watched.seen if row[0] == "unowned"}


class Counting(TorchDispatchMode):
    """A script's own mode."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_scripts_own_hides_an_update_and_that_is_said(watched: Watched) -> None:
    optimizer = watched.optimizer()
    for _ in range(2):
        with Counting() as own:
            watched.model(torch.ones(5, 3)).sum().backward()
        assert own.count > 0
        optimizer.step()
    watched.end()
    assert watched.looks.steps == []
    assert "the script has a dispatch mode of its own on" in watched.looks.unproven


def test_a_mode_that_is_left_inside_a_look_stays_the_scripts(watched: Watched) -> None:
    optimizer = watched.optimizer()
    loss = watched.model(torch.ones(5, 3)).sum()
    with Counting() as own:
        loss.backward()  # the look ends here, under the script's mode
        assert _get_current_dispatch_mode_stack() == [own]
        before = own.count
        torch.ones(2).add(1)
        assert own.count > before
    assert not _get_current_dispatch_mode_stack()
    optimizer.step()
    watched.end()
    assert watched.seen == ALL


def test_compiling_ends_the_looks_at_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = watched.optimizer()
    watched.model(torch.ones(5, 3)).sum()
    torch.compile(watched.model, backend="eager")
    assert not modules._global_forward_hooks
    assert not _get_current_dispatch_mode_stack()
    optimizer.step()
    watched.end()
    assert watched.looks.unproven == COMPILED
    torch._dynamo.reset()


def test_what_was_compiled_before_is_not_looked_at(tmp_path: Path) -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")
    found = Watched(tmp_path, is_looked_at)
    found.end()
    torch._dynamo.reset()
    assert found.looks.unproven == COMPILED
    assert_untouched()


def test_a_look_that_fails_harms_no_training(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(Executed, "enter", fail)
    optimizer = watched.optimizer()
    watched.model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    watched.end()
    assert watched.training.steps == 1
    assert watched.looks.unproven == "a look failed: OSError: no such thing"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*self.qkv(x)[None].chunk(3, -1))


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_what_attention_multiplies_is_the_attentions(watched: Watched, backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    watched.model = nn.Sequential(Attends(), nn.Linear(4, 2))
    optimizer = watched.optimizer()
    with sdpa_kernel(getattr(SDPBackend, backend)):
        watched.model(torch.ones(2, 5, 4)).sum().backward()
    optimizer.step()
    watched.end()
    assert {(name, during) for part, name, during in watched.seen if part == "attention"} == {
        ("0.qkv", "forward"),
        ("0.qkv", "backward"),
    }
    assert {name for part, name, _ in watched.seen if part == "linear"} == {"0.qkv", "1"}


def test_another_threads_modules_are_not_mixed_in(watched: Watched) -> None:
    optimizer, other = watched.optimizer(), nn.Linear(2, 2)
    loss = watched.model(torch.ones(5, 3)).sum()
    thread = threading.Thread(target=lambda: other(torch.ones(1, 2)))
    thread.start()
    thread.join()
    loss.backward()
    optimizer.step()
    watched.end()
    assert watched.seen == ALL


def test_what_an_instrument_computes_is_not_seen(watched: Watched) -> None:
    optimizer = watched.optimizer()
    loss = watched.model(torch.ones(5, 3)).sum()
    with unwitnessed():
        assert not _get_current_dispatch_mode_stack()
        torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)
    loss.backward()
    optimizer.step()
    watched.end()
    assert {dtype for row in watched.looks.rows for dtype in row[4]} == {"float32"}


def test_a_module_is_called_as_its_weights_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    state, _ = state_of(model)
    names = names_of_modules(nn.Sequential(model), state)
    assert names[id(model)] == ""
    assert names[id(model[0])] == "0"
    assert names[id(model[1])] == names[id(model[1][1])] == "1.1"
    assert names[id(model[1][0])] == "", "it holds no weight"
