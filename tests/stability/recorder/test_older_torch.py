"""What dynamo does to the steps of torch's optimizers, and what the recorder makes of it."""

import pytest
import torch

from stability.recorder.inside.older_torch import restore_step_hooks


def _hooks_called(monkeypatch: pytest.MonkeyPatch, *, has_hooks: bool) -> int:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RAdam([weight])
    step = torch.optim.RAdam.step
    disabled = torch.compiler.disable(step if has_hooks else step.__wrapped__)
    disabled.hooked = True
    monkeypatch.setattr(torch.optim.RAdam, "step", disabled)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    restore_step_hooks([optimizer])
    weight.grad = torch.ones(2)
    optimizer.step()
    return len(called)


def test_a_step_whose_hooks_were_taken_away_has_them_again(monkeypatch) -> None:
    assert _hooks_called(monkeypatch, has_hooks=False) == 1


def test_a_step_that_is_left_out_of_graphs_calls_a_users_hooks_once(monkeypatch) -> None:
    # as dynamo leaves out LBFGS, RAdam and SparseAdam once anything is compiled
    assert _hooks_called(monkeypatch, has_hooks=True) == 1
