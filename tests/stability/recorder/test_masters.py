"""FP32 masters of a model in BF16 are nudged, and given a start, together with the model."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stability.recorder.inside.given_start import give_start, was_set_anew
from stability.recorder.inside.names import named_state
from stability.recorder.inside.nudge import nudge_weights
from tests.stability.recorder.recording import Calling, Recording, words

ONE_IN_BF16 = 2**16
"""Units in the last place of FP32."""


def trained() -> tuple[nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.LayerNorm(8)).bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    return model, masters, torch.optim.SGD(masters, lr=0.1)


def assert_rounded(model: nn.Module, masters: list[torch.Tensor]) -> None:
    for master, weight in zip(masters, model.parameters(), strict=True):
        assert weight.equal(master.bfloat16())


@pytest.mark.slow
def test_a_model_begins_where_its_nudged_masters_do() -> None:
    model, masters, _optimizer = trained()
    before = [x.clone() for x in masters]
    nudge_weights(named_state(masters)[0], 3 * ONE_IN_BF16, 0, 0)
    assert all(bool((x != was).all()) for x, was in zip(masters, before, strict=True))
    assert_rounded(model, masters)


def test_a_model_begins_where_its_given_masters_do() -> None:
    model, masters, _optimizer = trained()
    state, _ = named_state(masters)
    given = {name: torch.randn(x.shape) for name, x in state.items()}
    give_start(state, given)
    assert all(state[name].equal(x) for name, x in given.items())
    assert_rounded(model, masters)
    assert was_set_anew(state, given) is None
    masters[0].add_(1)
    assert was_set_anew(state, given) == "unowned_0"


@pytest.mark.long
def test_masters_of_a_command_are_nudged_and_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("masters.py"))
    assert study.record("baseline") == 0
    assert "6 weights of no module" in " ".join(capsys.readouterr().out.split())
    assert study.record("nudge", options=("--nudge", "1")) == 0
    assert study.drift("nudge")[1] > 0
    options = ("--nudge", str(3 * ONE_IN_BF16))
    assert study.record("far", options=options) == 0
    assert study.losses("far")[0] != study.losses("baseline")[0], "the first forward sees it"
    assert study.record("other", "--other-start", options=("--same_start", "true")) == 0
    assert study.losses("other") == study.losses("baseline")


@pytest.mark.long
def test_masters_that_a_call_is_told_of_are_nudged(tmp_path: Path) -> None:
    study = Calling(tmp_path, words("masters.py"))
    assert study.record("baseline") == 0
    assert study.record("nudge", options=("--nudge", "1")) == 0
    assert study.drift("nudge")[1] > 0
