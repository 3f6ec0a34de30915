"""Weights that first train after the start are in no snapshot, and what they do is unproven."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stability.recorder.inside.later_weights import later_names
from tests.stability.recorder.recording import Recording, code_of
from tests.stability.recorder.test_several_losses import recorded

Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def thaw(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)


def add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[2].parameters())})


def replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1].weight = nn.Parameter(torch.zeros(2, 4))
    optimizer.param_groups[0]["params"][2] = model[1].weight


def nothing(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    pass


def changing(change: Change) -> Callable[[], None]:
    """Return a training whose first layer is frozen, and that is changed on the way."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)  # which never steps
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize(
    ("change", "count", "names"),
    [(thaw, 2, "0.bias, 0.weight"), (add, 2, "2.bias, 2.weight"), (replace, 1, "1.weight")],
)
def test_weights_that_train_later_are_named(
    change: Change, count: int, names: str, tmp_path: Path
) -> None:
    found = recorded(tmp_path, changing(change), due=lambda step: step == 3)
    assert found.doubts == [
        f"the {count} weights that first train, or take another's place, after the first update "
        f"({names}): they are in no snapshot"
    ]
    assert f"unproven: {found.doubts[0]}" in found.notes


def test_weights_that_never_train_are_no_doubt(tmp_path: Path) -> None:
    assert recorded(tmp_path, changing(nothing)).doubts == []


def test_a_weight_that_was_frozen_again_is_known_by_its_optimizers_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.weight.requires_grad_(False)
    assert {*later_names([optimizer], {"bias": model.bias}).values()} == {"Linear.weight"}
    weight = model.weight
    del model
    assert {*later_names([optimizer], {}).values()} == {"one of shape (2, 3)", "one of shape (2,)"}
    assert weight.shape == (2, 3)


THAWS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        model[0].requires_grad_(True)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_pair_that_thaws_a_layer_is_unproven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(THAWS, encoding="utf-8")
    study = Recording(tmp_path, [sys.executable, str(script)])
    assert study.record("baseline") == 0
    assert study.record("rerun") == 0
    capsys.readouterr()
    assert code_of("verify", str(study.folder), "--json") != 0
    said = json.dumps(json.loads(capsys.readouterr().out))
    assert "2 weights that first train, or take another's place, after the first update" in said
