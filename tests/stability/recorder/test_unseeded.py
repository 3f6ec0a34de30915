"""Scripts that are no function of their seed: the rerun tells, and its drift is the floor."""

import re
import sys
from pathlib import Path

import pytest

from stability.analysis.pair_contract import prove_pair
from tests.stability.recorder.recording import Recording, code_of

SCRIPT = """
import os, random, sys
import torch
from torch import nn
from torch.nn import functional as F

seed = int(sys.argv[sys.argv.index("--seed") + 1])
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.1")))
data = torch.Generator().manual_seed(seed)
true = random.SystemRandom()
unseeded = torch.Generator().manual_seed(true.getrandbits(32))


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, inputs, labels):
        return F.cross_entropy(self.inner(inputs), labels)


whole = Takes()
for _ in range(10):
    x = torch.randn(8, 3, generator=unseeded if "--loader" in sys.argv else data)
    y = torch.randint(0, 4, (8,), generator=unseeded if "--labels" in sys.argv else data)
    if "--apart" in sys.argv:
        loss = F.cross_entropy(model(x), y)
    else:
        loss = whole(x, labels=y)
    if "--noise" in sys.argv:
        loss = loss * (1 + int.from_bytes(os.urandom(2), "big") / 2**20)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def study_of(folder: Path, *flags: str) -> Recording:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return Recording(folder / "runs", [sys.executable, str(path), *flags])


@pytest.mark.slow
def test_a_training_with_unseeded_noise_is_named_and_its_rerun_is_the_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, "--noise")
    assert study.record("baseline") == 0
    capsys.readouterr()
    assert study.record("rerun") == 0
    said = " ".join(capsys.readouterr().out.split())
    drift = list(study.drift("rerun").values())[-1]
    assert f"the script is not deterministic: its rerun drifts by {drift:.1e}" in said
    assert "; the first update that differs is 1, in its loss, " in said
    assert "drifts below that mean nothing" in said
    assert study.record("nudge", options=("--nudge", "1")) == 0
    assert study.record("lr", options=("--env", "LR=0.5")) == 0

    capsys.readouterr()
    assert code_of("show", str(study.folder)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "A/A is not zero here: rerun drifts by up to" in shown
    assert "the training is not deterministic" in shown
    proof = prove_pair(study.paths("baseline"), study.paths("rerun"))
    assert "the training is not deterministic" in proof.sentence
    assert code_of("report", str(study.folder)) == 0
    assert "training is not deterministic" in (study.folder / "report.html").read_text()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--loader",), "`inputs`|`argument 0`"),
        (("--labels",), "`labels`"),
        (("--labels", "--apart"), "`target of NllLoss`"),
    ],
    ids=["inputs", "labels", "labels of the loss"],
)
def test_an_unseeded_loader_is_refused_with_the_step_and_the_input(
    flags: tuple[str, ...], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, *flags)
    assert study.record("baseline") == 0
    capsys.readouterr()
    assert study.record("rerun") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"rerun: batch 1 differs from the baseline's in ({where})[:,]", said), said
    assert "the script does not draw its batches by its seed" in said
    assert study.manifest("rerun").state == "failed"
