"""A causal mask that one attention alone makes is no weight, and running statistics are no mask."""

import sys
from pathlib import Path

import pytest

from stability.records.run_files import read_run_snapshot
from tests.stability.recorder.recording import Recording, code_of

SCRIPT = """
import argparse, torch
from torch import nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--attention", default="fused")
flags.add_argument("--other-start", action="store_true")
asked = flags.parse_args()
torch.manual_seed(asked.seed)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        if asked.attention != "fused":
            self.register_buffer("bias", torch.ones(6, 6).tril())
        if asked.attention == "open":
            self.bias[0, 1] = 1

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if asked.attention == "fused":
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        if asked.attention == "moving":
            self.bias[5, 5] += 1
        scores = (q @ k.mT) * 8**-0.5
        return self.out(scores.masked_fill(self.bias == 0, -torch.inf).softmax(-1) @ v)

if asked.other_start:
    torch.rand(3)
model = nn.Sequential(
    nn.Embedding(7, 8), Attention(), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, 7)
)
torch.manual_seed(asked.seed + 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    tokens = torch.randint(0, 7, (4, 7))
    F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def of(folder: Path, attention: str) -> Recording:
    """Return a study whose baseline has an attention, and record that."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    study = Recording(folder / "runs", [sys.executable, str(folder / "train.py")])
    assert study.record("baseline", "--attention", attention) == 0
    return study


def proof(study: Recording, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return what `verify` says of a study."""
    capsys.readouterr()
    code = code_of("verify", str(study.folder), "--all")
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "attentions", [("masked", "fused"), pytest.param(("fused", "masked"), marks=pytest.mark.long)]
)
def test_a_mask_of_one_attention_alone_is_no_weight(
    attentions: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = of(tmp_path / "study", attentions[0])
    own = ("--attention", attentions[0])
    other = ("--attention", attentions[1])
    assert study.record("rerun", *own) == 0
    assert study.record("nudge", *own, options=("--nudge", "1")) == 0
    assert study.record("other", *other, options=("--check-observer", "true")) == 0
    given = (*own, "--other-start")
    assert study.record("given", *given, options=("--same-start", "true")) == 0
    assert proof(study, capsys)[0] == 0
    assert study.drift("rerun")[4] == 0
    assert 0 < study.drift("other")[4] < 1e-3
    names = set(read_run_snapshot(study.paths("other"), 4))
    assert names == set(read_run_snapshot(study.paths("baseline"), 0))
    assert {"3.running_mean", "3.running_var"} <= names
    assert "1.bias" not in names
    assert study.manifest("other").observer["equal"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "doubt"),
    [
        ("open", "the same buffers at the start (1.bias: not the same on both sides"),
        pytest.param(
            "moving",
            "the drift of 1.bias, which moves here and is a constant in the baseline",
            marks=pytest.mark.long,
        ),
    ],
)
def test_another_mask_and_one_that_moves_are_unproven(
    attention: str, doubt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = of(tmp_path / "study", "masked")
    checked = ("--check-observer", "true")
    assert study.record("other", "--attention", attention, options=checked) == 0
    code, said = proof(study, capsys)
    assert code == 1
    assert f"other/seed-0: unproven: not on record: {doubt}" in said
