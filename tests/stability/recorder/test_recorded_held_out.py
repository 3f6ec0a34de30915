"""The held-out loss of a recorded training: found in what it evaluates, told, or said to lack."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stability.analysis.held_out_losses import of_other_data
from stability.analysis.outcome_evidence import outcome_evidence
from stability.analysis.study_records import read_study
from stability.config.study import PolicyConfig
from stability.recorder.held_out import HeldOut, read_held_out
from stability.recorder.inside.batch_hash import hash_batch
from stability.recorder.inside.evaluations import Evaluations
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.records.metric_log import read_metrics
from stability.records.metric_names import EVAL_LOSS
from tests.sampling import others_long
from tests.stability.recorder.recording import (
    Calling,
    Recording,
    bits_of,
    code_of,
    run_alone,
    words,
)


def held_out(study: Recording, arm: str = "baseline") -> dict[int, float]:
    """Return the held-out loss on record by step."""
    found = read_metrics(study.paths(arm).metrics).get(EVAL_LOSS)
    return dict(zip(found.steps, found.values, strict=True)) if found else {}


def printed(text: str) -> dict[int, tuple[float, float]]:
    """Return what the script has printed: by step, the loss on its training and held-out text."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("evaluated")]
    return {int(step): (float(own), float(other)) for step, own, other in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    others_long(["functional", "by name", "module", "tuple", "mapping"], slow=["functional"]),
)
def test_what_is_never_trained_on_is_held_out_and_no_bit_changes(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--kind", kind))
    alone = run_alone([*study.command, "--seed", "0"])
    assert study.record("baseline") == 0
    said = capsys.readouterr().out
    assert bits_of(said) == alone
    assert held_out(study) == pytest.approx({k: v for k, (_, v) in printed(said).items()}, rel=1e-6)
    assert list(held_out(study)) == [4, 8, 12]
    assert "held out: 11 samples that the script evaluates at 3 steps" in said
    assert "10 of 13 losses are of samples it trains on, and left out" in said


@pytest.mark.long
def test_other_held_out_data_are_said_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py"))
    assert study.record("baseline") == 0
    assert study.record("same", "--lr", "0.02") == 0
    assert study.record("other", "--text", "2") == 0
    hashes = {arm: study.manifest(arm).hashes["held_out"] for arm in ("baseline", "same", "other")}
    assert hashes["same"] == hashes["baseline"] != hashes["other"]
    recorded = read_study(study.folder)
    arms = {arm.name: of_other_data(recorded, arm) for arm in recorded.candidates}
    assert arms == {"same": [], "other": [0]}
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    proof = capsys.readouterr().out
    assert "held-out losses of the same data (both are there, of other data)" in proof
    other = next(arm for arm in recorded.candidates if arm.name == "other")
    evidence = outcome_evidence(recorded, other, PolicyConfig())
    assert evidence.state == "not measured"
    assert "held-out losses of other are of other data than the baseline's" in evidence.sentence


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--crops"], "the script evaluates other samples at each step, so what of it is held out"),
        (["--kind", "by hand"], "the script evaluates its model, but no loss of that was seen"),
        (
            ["--evaluate-every", "99"],
            "no held-out loss: no call of the model in evaluation mode (`model.eval()`) and "
            "without gradients was seen; name a function",
        ),
    ],
)
def test_what_can_not_be_told_is_said_and_not_used(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", *flags))
    assert study.record("baseline") == 0
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert not held_out(study)
    assert "held_out" not in study.manifest("baseline").hashes


@pytest.mark.long
@pytest.mark.slow
def test_all_that_is_evaluated_is_held_out_where_the_user_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--crops"))
    assert study.record("baseline", options=("--held-out", "all")) == 0
    found = printed(capsys.readouterr().out)
    assert held_out(study) == pytest.approx({k: sum(v) / 2 for k, v in found.items()}, rel=1e-6)
    assert study.record("rerun") == 0, "the other arms do as the first run"
    assert held_out(study, "rerun") == held_out(study)
    assert study.record("none", options=("--held-out", "none")) == 2
    assert "held_out must be that of the study's first run, 'all', got 'none'" in (
        re.sub(r"\s+", " ", capsys.readouterr().err)
    )


@pytest.mark.slow
def test_a_function_is_called_at_the_snapshots_and_changes_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--evaluate-every", "99", "--bf16"))
    alone = run_alone([*study.command, "--seed", "0"])
    options = ("--held-out", "evaluates:of_held_out", "--check-observer", "true")
    assert study.record("baseline", options=options) == 0
    assert set(re.findall(r"weights (\w{64})", capsys.readouterr().out)) == {alone}
    assert list(held_out(study)) == [0, 1, 2, 5, 10, 12]
    assert study.record("nudge", options=("--nudge", "1")) == 0
    assert (
        study.manifest("nudge").hashes["held_out"] == study.manifest("baseline").hashes["held_out"]
    )
    other = Recording(tmp_path / "other", words("evaluates.py", "--evaluate-every", "1", "--bf16"))
    assert other.record("baseline") == 0
    # the same weights on the same text, by the script itself: equal but for the order of the sum
    found = held_out(other)
    assert held_out(study)[12] == pytest.approx(found[12], rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "return model.head.weight",
            "must return one number, the mean loss, got Parameter of shape",
        ),
        ("model.head.weight.mul_(2); return 1.0", "must change no weight or buffer of the model"),
    ],
)
def test_a_function_that_is_no_held_out_loss_is_refused(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (tmp_path / "mine.py").write_text(f"def loss(model):\n    {body}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    study = Recording(tmp_path / "runs", words("evaluates.py"))
    assert study.record("baseline", options=("--held-out", "mine:loss")) == 1
    captured = capfd.readouterr()
    assert sentence in re.sub(r"\s+", " ", captured.out + captured.err)
    assert study.record("baseline", options=("--held-out", "mine:nothing")) == 1
    captured = capfd.readouterr()
    said = "held_out: mine:nothing must be a function that the script's process can import"
    assert said in re.sub(r"\s+", " ", captured.out + captured.err)


LOCAL = """
import sys, torch
def loss(model):
    return model(torch.ones(1, 3)).square().mean()
def main():
    torch.manual_seed(int(sys.argv[sys.argv.index("--seed") + 1]))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("last", loss(model).item())
if __name__ == "__main__": main()
"""


def test_the_loss_of_the_last_update_is_that_of_a_model_whose_function_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local.py").write_text(LOCAL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    study = Recording(tmp_path / "runs", [sys.executable, "local.py"])
    assert study.record("baseline", options=("--held-out", "local:loss")) == 0
    (last,) = re.findall(r"^last (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert list(held_out(study)) == [0, 1, 2, 5, 6]
    assert held_out(study)[6] == pytest.approx(float(last), rel=1e-6)


def test_a_name_that_is_no_function_is_refused_before_the_command_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py"))
    assert study.record("baseline", options=("--held-out", "mine.loss")) == 2
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "held_out must be MODULE:FUNCTION, all or none, got 'mine.loss'" in said
    assert not study.folder.exists()


@pytest.mark.long
def test_two_ranks_are_evaluated_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Recording(tmp_path, words("evaluates.py", ranks=2))
    alone = run_alone([*study.command, "--seed", "0"])
    assert study.record("baseline") == 0
    said = capsys.readouterr().out
    assert bits_of(said) == alone
    options = ("--held-out", "evaluates:of_held_out")
    told = Recording(tmp_path / "told", words("evaluates.py", ranks=2))
    assert told.record("baseline", options=options) == 0
    assert bits_of(capsys.readouterr().out) == alone
    # all 11 samples on each rank, where the script has 6 of them on one and 5 on the other
    assert held_out(told)[12] == pytest.approx(held_out(study)[12], rel=1e-6)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (["a"], "no held-out loss: for 1 of 2 losses whether the samples were trained on can't be"),
        (["b"], "held out: 4 samples that the script evaluates at 2 steps; 1 of 2 losses are left"),
        (["a", "b"], "1 of 2 losses are of samples it trains on, and left out"),
    ],
)
def test_losses_whose_samples_have_no_key_are_said_to_be_untold(
    kept: list[str], said: str, tmp_path: Path
) -> None:
    # the first four were trained on
    keys = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    found = _read({x: keys[x] for x in kept}, [1, 2, 3, 4], tmp_path, sizes={"a": 4, "b": 4})
    assert said in " ".join(found.notes)
    assert found.losses == ({1: 1.0, 2: 1.0} if "b" in kept else {})


@pytest.mark.parametrize(
    ("evaluated", "said"),
    [
        (
            {"a": range(3_994)},
            "no held-out loss: 14 of the 3,994 samples that the script evaluates at every "
            "evaluation were trained on, at least one in each of its losses",
        ),
        (
            {"a": range(14)},
            "no held-out loss: all that the script evaluates at every evaluation was trained on; ",
        ),
        (
            {"a": range(2_000), "b": range(2_000, 3_994)},
            "held out: 1,994 samples that the script evaluates at 2 steps; 1 of 2 losses are left "
            "out: it trains on 14 of their 2,000 samples",
        ),
    ],
    ids=["some", "all", "some-of-one-loss"],
)
def test_the_share_that_was_trained_on_is_said_as_it_was_measured(
    evaluated: dict[str, range], said: str, tmp_path: Path
) -> None:
    keys = {name: list(each) for name, each in evaluated.items()}
    found = _read(keys, list(range(14)), tmp_path, sizes={k: len(v) for k, v in keys.items()})
    assert found.notes[0].startswith(said)


def test_who_has_no_held_out_loss_is_told_where_to_name_one_and_how_it_is_called(
    tmp_path: Path,
) -> None:
    (note,) = _read({"a": [1]}, [1], tmp_path, sizes={"a": 1}).notes
    assert "called with the model alone: `held_out: MODULE:FUNCTION` in the base of the" in note
    assert "`--held-out MODULE:FUNCTION` of `stability record`" in note


def _read(
    keys: Mapping[str, list[int]], trained: list[int], folder: Path, *, sizes: Mapping[str, int]
) -> HeldOut:
    """Return what is made of losses of `sizes`, evaluated twice, and of their samples' keys."""
    told = {
        "evaluated": {name: {"x": torch.tensor(each)} for name, each in keys.items()},
        "trained": {"x": torch.tensor(trained)},
        "times": {"x": 2 * len(trained)},
    }
    torch.save(told, folder / "keys.pt")
    calls = [{"hash": name, "samples": size, "loss": 1.0} for name, size in sizes.items()]
    lines = [
        {"kind": "evaluated", "step": 1, "calls": calls},
        {"kind": "evaluated", "step": 2, "calls": calls},
        {"kind": "keys", "file": "keys.pt"},
        {"kind": "end"},
    ]
    return read_held_out([lines], folder, 2)


GIVES = """
import argparse, torch
from torch.nn import functional as F
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--kind")
asked = flags.parse_args()
torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None):
        return self.head(input_ids if attention_mask is None else input_ids * attention_mask)

def inputs(x, *, trains):
    has_mask = trains or asked.kind != "masked in training"
    mask = {"attention_mask": ones[:len(x)]} if has_mask else {}
    if asked.kind == "noisy" and trains:
        x = x + 0.01 * torch.randn(x.shape)
    name = "input_ids" if asked.kind != "of another name" or trains else None
    return ([], {"input_ids": x, **mask}) if name else ([x], mask)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y, ones = torch.randn(12, 8), torch.arange(12) % 3, torch.ones(12, 8)
other = torch.randn(5, 8)
for step in range(8):
    rows = torch.arange(step * 4, step * 4 + 4) % 12
    args, kwargs = inputs(x[rows], trains=True)
    F.cross_entropy(model(*args, **kwargs), y[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        model.eval()
        with torch.no_grad():
            for these in (x, other):
                args, kwargs = inputs(these, trains=False)
                F.cross_entropy(model(*args, **kwargs), y[: len(these)])
        model.train()
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        # Hugging Face's words: by name the mask comes first, and it is the same of all samples
        (
            "masked",
            "held out: 5 samples that the script evaluates at 4 steps; 1 of 2 losses are of",
        ),
        ("masked in training", "held out: 5 samples that the script evaluates at 4 steps; 1 of 2"),
        (
            "of another name",
            "no held-out loss: for 2 of 2 losses whether the samples were trained on",
        ),
        ("noisy", "whether held-out ones were trained on in others, as with noise or in another"),
    ],
)
def test_a_sample_is_known_by_the_input_that_tells_samples_apart(
    kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(GIVES, encoding="utf-8")
    study = Recording(tmp_path / "runs", [sys.executable, str(script), "--kind", kind])
    assert study.record("baseline") == 0
    told = capsys.readouterr().out
    assert said in told
    assert ("twice in the same bits" in told) == (kind == "noisy")


def _left_by(folder: Path, rank: int, trained: list[int], evaluated: list[int]) -> list[Any]:
    """Return the lines of a rank that has trained on samples and evaluated others, twice."""
    spool, seen = Spool(str(folder), rank), Evaluations()

    def key(sample: int) -> torch.Tensor:
        return hash_batch([torch.full((1, 3), float(sample))])[2][0]  # pyright: ignore

    lines = []
    for step in (1, 2):
        for sample in trained:
            seen.trained_on([("x", key(sample))])
        for sample in evaluated:
            seen.model_called(step, [torch.full((1, 3), float(sample))], ["x"])
            seen.model_returned(torch.tensor(float(sample)))
        seen.end()
        lines += [line for line in seen.take_lines() if line["calls"]]
    keys = seen.keys()
    kept = [{"kind": "keys", "file": spool.keep("evaluated", keys)}] if keys else []
    return [*lines, *kept, {"kind": "end"}]


def test_what_a_rank_trains_on_that_evaluates_nothing_is_not_held_out(tmp_path: Path) -> None:
    ranks = [_left_by(tmp_path, 0, [1], [1, 2, 3]), _left_by(tmp_path, 1, [2], [])]
    assert read_held_out(ranks, tmp_path, 2).losses == {1: 3.0, 2: 3.0}
    ranks = [_left_by(tmp_path, 0, [], [1, 2, 3]), _left_by(tmp_path, 1, [1, 2], [])]
    found = read_held_out(ranks, tmp_path, 2)
    assert found.losses == {1: 3.0, 2: 3.0}
    assert not any("twice in the same bits" in note for note in found.notes)


def test_of_one_evaluation_nobody_can_tell_what_is_held_out(tmp_path: Path) -> None:
    calls = [{"hash": "a", "samples": 4, "loss": 1.0}]
    lines = [{"kind": "evaluated", "step": 2, "calls": calls}, {"kind": "end"}]
    found = read_held_out([lines], tmp_path, 2)
    assert not found.losses
    assert "the script evaluates once" in found.notes[0]


def test_a_held_out_loss_of_no_samples_counts_as_one_of_them(tmp_path: Path) -> None:
    training = Training(Spool(str(tmp_path), 0))
    training.told_held_out(0.5, [torch.ones(4, 3)[:0]])
    (line,) = training._measured
    assert read_held_out([[line]], tmp_path, 2).losses == {0: 0.5}


CALLS = """
import argparse, torch, stability
from torch.nn import functional as F
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--lr", type=float, default=0.1)
asked = flags.parse_args()
torch.manual_seed(asked.seed)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr)
x, y = torch.randn(20, 3), torch.randn(20, 1)
with stability.record(model, optimizer) as recorder:
    for step in range(6):
        recorder.batch(x[:10], y[:10])
        loss = F.mse_loss(model(x[:10]), y[:10])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)
        with torch.no_grad():
            told = F.mse_loss(model(x[10:]), y[10:])
            recorder.held_out(told, x[10:], y[10:])
print("told", told.item())
"""


@pytest.mark.slow
def test_a_call_that_tells_no_held_out_loss_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Calling(tmp_path, words("calls.py"))
    assert study.record("baseline") == 0
    said = "no held-out loss: none was told by recorder.held_out(loss)"
    assert said in capsys.readouterr().out


TRAINERS = {"lightning_fit.py": [3, 6], "hugging_face.py": [2, 4, 6]}


@pytest.mark.slow
@pytest.mark.parametrize("door", others_long([Recording, Calling], slow=[Recording]))
@pytest.mark.parametrize("script", others_long(TRAINERS, slow=["hugging_face.py"]))
def test_what_a_trainer_evaluates_is_its_held_out_loss(
    script: str, door: type[Recording], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = door(tmp_path, words(script, "--held-out"))
    for arm in ("baseline", "rerun"):  # the second one's end is planned, and it evaluates after it
        assert study.record(arm) == 0
        said = capsys.readouterr().out
        logged = {int(s): float(x) for s, x in re.findall(r"held out (\d+) (\S+)", said)}
        assert list(logged) == TRAINERS[script]
        assert "held out: 5 samples that the script evaluates at" in said, said
        found = held_out(study, arm)
        found.pop(0, None)  # Lightning's trial before the first update
        assert list(found) == TRAINERS[script]
        assert list(found.values()) == pytest.approx(list(logged.values()), rel=1e-5)
    assert (
        study.manifest("rerun").hashes["held_out"] == study.manifest("baseline").hashes["held_out"]
    )


@pytest.mark.slow
def test_the_call_takes_a_held_out_loss_of_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS, encoding="utf-8")
    study = Calling(tmp_path, [sys.executable, str(script)])
    for arm in ("baseline", "rerun"):
        assert study.record(arm) == 0
        told = float(re.findall(r"told (\S+)", capsys.readouterr().out)[0])
        # an arm's planned end comes after what is evaluated of its last update
        assert list(held_out(study, arm)) == [1, 2, 3, 4, 5, 6]
        assert held_out(study, arm)[6] == pytest.approx(told, rel=1e-7)
    hashes = [study.manifest(arm).hashes["held_out"] for arm in ("baseline", "rerun")]
    assert hashes[0] == hashes[1]
