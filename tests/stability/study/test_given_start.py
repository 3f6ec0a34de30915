"""An arm whose code makes other start weights is given the baseline's, and that is said."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stability.analysis.pair_contract import prove_pair
from stability.recorder.inside.given_start import StartRefused, give_start, was_set_anew
from stability.recorder.inside.names import named_state
from stability.recorder.inside.taken_start import TakenStart
from stability.records.snapshots import snapshot_dtypes, write_snapshot
from tests.stability.recorder.recording import Recording, words

SAME = ("--same-start", "true")

MAKES_OTHERS = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
if "--other" in sys.argv:
    torch.rand(7)  # other random numbers, as another order of modules draws
width = 5 if "--wide" in sys.argv else 4
model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
if "--double" in sys.argv:
    model.double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(1)
if "--anew" in sys.argv:
    model(torch.ones(2, 3))
    nn.init.ones_(model[0].weight)
for _ in range(4):
    x, y = torch.randn(6, 3, generator=data), torch.randint(0, 2, (6,), generator=data)
    F.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("an update was made")
"""


def study_of(folder: Path) -> Recording:
    path = folder / "train.py"
    path.write_text(MAKES_OTHERS)
    return Recording(folder / "runs", [sys.executable, str(path)])


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_weights_buffers_and_an_averages_copies_are_given() -> None:
    other, own = model(), model()
    other.get_buffer("1.running_mean").fill_(3.0)
    average = AveragedModel(own)
    state, _ = named_state(own.parameters())
    given = {name: x.detach().clone() for name, x in named_state(other.parameters())[0].items()}
    give_start(state, given)
    assert all(state[name].equal(x) for name, x in given.items())
    assert own.get_buffer("1.running_mean").tolist() == [3.0] * 4
    copies = dict(average.module.named_parameters())
    assert all(copies[name].equal(given[name]) for name in copies)
    assert was_set_anew(state, given) is None
    own.get_buffer("1.running_mean").zero_()
    assert was_set_anew(state, given) is None, "a forward pass moves buffers"
    with torch.no_grad():
        own.get_parameter("2.bias")[0].add_(1)
    assert was_set_anew(state, given) == "2.bias"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": torch.ones(2, 3)}, "the baseline has no bias"),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "c": torch.ones(1)},
            "this run has no c",
        ),
        (
            {"weight": torch.ones(2, 4), "bias": torch.ones(2)},
            "weight must have the baseline's shape (2, 4), has (2, 3)",
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2).double()},
            "bias must be the baseline's torch.float64, is torch.float32",
        ),
    ],
    ids=["a name too many", "a name too few", "another shape", "another dtype"],
)
def test_what_can_not_be_given_is_refused_and_nothing_is_changed(
    given: dict[str, torch.Tensor], said: str
) -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    with pytest.raises(StartRefused) as refused:
        give_start(dict(layer.named_parameters()), given)
    assert said in refused.value.why
    assert layer.weight.equal(before)


@pytest.mark.slow
def test_an_arm_that_makes_other_weights_is_a_pair_once_it_is_given_the_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path)
    assert study.record("baseline") == 0
    assert study.record("other", "--other") == 1
    assert "hashes.init_weights must be the baseline's" in capsys.readouterr().out
    assert study.record("other", "--other", options=SAME) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "start: given, the baseline's weights; the script had made others" in said
    assert set(study.drift("other").values()) == {0.0}, "only its start was another"
    assert study.manifest("other").resolved["start"] == "given"
    proof = prove_pair(study.paths("baseline"), study.paths("other"))
    assert any(line.sentence.startswith("start: given") for line in proof.lines)
    assert proof.breach is None

    assert study.record("nudge", options=(*SAME, "--nudge", "1")) == 0
    assert 0 < study.drift("nudge")[0] < 1e-6, "the nudge goes on top"


@pytest.mark.slow
def test_a_given_start_that_the_script_undoes_or_can_not_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path)
    assert study.record("baseline") == 0
    capsys.readouterr()
    assert study.record("anew", "--anew", options=SAME) == 1
    assert "same_start had no effect: 0.weight was set anew" in capsys.readouterr().out
    assert study.record("wide", "--wide", options=SAME) == 1
    said = capsys.readouterr().out
    assert re.search(r"same_start: 0\.bias must have the baseline's shape \(4,\), has \(5,\)", said)
    assert study.manifest("wide").state == "failed"


@pytest.mark.slow
def test_an_arm_of_another_dtype_is_refused_before_its_first_update_and_both_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(tmp_path)
    assert study.record("baseline") == 0
    capsys.readouterr()
    assert study.record("double", "--double") == 1
    said = " ".join(capsys.readouterr().out.split())
    wanted = "start weights must have the baseline's dtypes, 0.weight is float64 and not float32"
    assert wanted in said
    assert "an update was made" not in said
    assert study.manifest("double").state == "failed"
    assert study.record("declared", "--double", options=("--may-change", "init,batches")) == 0

    # where nothing was told to the training: a door that a script opens itself
    monkeypatch.setattr("stability.study.foreign.start_variables", lambda run, folder: {})
    capsys.readouterr()
    assert study.record("later", "--double") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "an update was made" in said
    assert f"pair contract: later, seed 0: {wanted}" in said


def test_dtypes_are_held_against_the_baselines_at_the_first_step_and_not_before() -> None:
    """A script may cast its weights after a trial pass."""
    own = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(own.parameters())
    state = dict(own.named_parameters())
    for is_cast in (True, False):
        begun = {"init": "", "baseline_dtypes": dict.fromkeys(state, "float32")}
        start = TakenStart(dict(state), begun, [optimizer], lambda: None)
        assert "baseline_dtypes" not in begun
        if is_cast:
            own.float()
            start.step_begins([optimizer])
            own.double()
            continue
        with pytest.raises(StartRefused) as refused:
            start.step_begins([optimizer])
        assert refused.value.why.startswith(
            "start weights must have the baseline's dtypes, weight is float64 and not float32, and "
            "1 more; let the arm compute"
        )


def test_the_dtypes_of_a_snapshot_are_those_of_its_weights(tmp_path: Path) -> None:
    kinds = {"d": torch.float64, "f": torch.float32, "h": torch.float16, "b": torch.bfloat16}
    path = tmp_path / "step-00000000.safetensors"
    assert snapshot_dtypes(path) == {}
    state = {name: torch.ones(2, dtype=kind) for name, kind in kinds.items()}
    write_snapshot(path, {**state, "seen": torch.tensor(3)})
    assert snapshot_dtypes(path) == {name: str(x.dtype)[6:] for name, x in state.items()}
    path.write_bytes(path.read_bytes()[:5])
    assert snapshot_dtypes(path) == {}


def test_a_start_can_not_be_both_the_baselines_and_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path)
    assert study.record("other", options=(*SAME, "--may-change", "init")) == 2
    assert "same_start must not be given with --may_change init" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_start_is_given_to_every_rank(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path / "runs", words("ranks.py", "--layout", layout, ranks=2))
    assert study.record("baseline") == 0
    assert study.record("other", "--other-start") == 1
    assert "hashes.init_weights must be the baseline's" in capsys.readouterr().out
    assert study.record("other", "--other-start", options=SAME) == 0
    assert study.manifest("other").resolved["start"] == "given"
    assert set(study.drift("other").values()) == {0.0}, "only its start was another"
