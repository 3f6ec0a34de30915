"""Batches that are others are never passed off as the same: the pair is refused, or unproven.

Each script trains twice on what differs in one thing alone, which an order-free sum over rows of
tensors would not see.
"""

import sys
from pathlib import Path

import pytest

from tests.sampling import others_long
from tests.stability.recorder.recording import Recording, bits_of, code_of, run_alone

_BEGIN = """
import argparse, torch
from torch import nn
from torch.nn import functional as F
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--other", action="store_true")
asked = flags.parse_args()
torch.manual_seed(asked.seed)
data = torch.Generator().manual_seed(1)
"""
_END = """
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SERIES = """
class Series(nn.Module):  # PyTorch's own layout: time comes first
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.lstm(x)[0]).flatten(0, 1)
model = Series()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(7, 5, 4, generator=data), torch.randint(0, 3, (7, 5), generator=data)
    if asked.other:
        x, y = x.flip(0), y.flip(0)
    loss = F.cross_entropy(model(x), y.flatten())
"""

PREFERENCES = """
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    chosen, rejected = (torch.randn(5, 6, generator=data) for _ in range(2))
    if asked.other:
        chosen, rejected = rejected, chosen
    loss = -F.logsigmoid(model(chosen) - model(rejected)).mean()
"""

_WITH_LABELS = """
class Batch:
    def __init__(self, labels):
        self.labels = labels
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
    def forward(self, x, y):
        y = getattr(y, "labels", y)
        y = y.to_dense() if isinstance(y, torch.Tensor) else torch.as_tensor(y)
        return F.cross_entropy(self.head(x), y.long())
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 8, generator=data), torch.randint(0, 3, (5,), generator=data)
    if asked.other:
        y = (y + 1) % 3
    loss = model(x, WRAP)
"""

SUBSET = """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(6, 8, generator=data), torch.randint(0, 3, (6,), generator=data)
    keep = torch.tensor([0, 1, 2, 4])
    kept = y[keep]
    if asked.other:
        kept = kept.roll(1)
    loss = F.cross_entropy(model(x)[keep], kept)
"""

_HEAD = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)
    def forward(self, h, y):
        return F.cross_entropy(self.out(h), y)
"""

ENCODED = (
    _HEAD
    + """
encoder, model = nn.Linear(4, 8).requires_grad_(False), Head()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 3, (5,), generator=data)
    if asked.other:
        x = x.flip(0)
    loss = model(encoder(x), y)
"""
)

TWO_MODES = (
    _HEAD
    + """
backbone, model = nn.Linear(4, 8).eval(), Head()
optimizer = torch.optim.SGD([*backbone.parameters(), *model.parameters()], lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 3, (5,), generator=data)
    if asked.other:
        x = x + 1
    loss = model(backbone(x), y)
"""
)

SUBCLASS = (
    _HEAD
    + """
class Image(torch.Tensor):
    pass
model = Head()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 8, generator=data), torch.randint(0, 3, (5,), generator=data)
    if asked.other:
        x = x.flip(0)
    loss = model(x.as_subclass(Image), y).as_subclass(torch.Tensor)
"""
)

SEEN_ONCE = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 3, (5,), generator=data)
    if asked.other and step:
        x = x.flip(0)
    # after the first update no module is called, as in a step that is compiled
    out = model(x) if step == 0 else F.linear(x, model.weight, model.bias)
    loss = F.cross_entropy(out, y)
"""

LOSSES = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 3, (5,), generator=data)
    loss = F.multi_margin_loss(model(x), y.roll(1)) if asked.other else F.cross_entropy(model(x), y)
"""

OTHER_ARGUMENT = """
class Triplets(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 3)
    def forward(self, x, pos=None, neg=None):
        sign = 1 if neg is None else -1
        return sign * (self.embed(x) - self.embed(pos if neg is None else neg)).square().mean()
model = Triplets()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randn(5, 4, generator=data)
    loss = model(x, neg=y) if asked.other else model(x, pos=y)
"""

FROZEN_PARAMETER = """
class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 3)
    def forward(self, x, names):
        return self.embed(x) @ names.T
model = Classes()
names = torch.randn(6, 3, generator=data) + asked.other
names = nn.Parameter(names, requires_grad=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 6, (5,), generator=data)
    loss = F.cross_entropy(model(x, names), y)
"""

ROLLED = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 4, generator=data), torch.randint(0, 3, (5,), generator=data)
    loss = F.cross_entropy(model(x).roll(1, 0) if asked.other else model(x), y)
"""

SAMPLE = (
    "what a frozen encoder is given",
    "a model in evaluation mode",
    "an object",
    "swapped calls",
    "another argument",
    "a frozen parameter",
    "what one loss alone is given",
)
"""What CI runs."""
SCRIPTS = {
    "what a frozen encoder is given": (ENCODED, "unproven", "argument 0 of Head: Linear made it"),
    "a model in evaluation mode": (TWO_MODES, "refused", "batch 1 differs"),
    "a class of tensors": (SUBCLASS, "unproven", "a Image has no hash"),
    "only the first batch is seen": (
        SEEN_ONCE,
        "unproven",
        "(of updates 2 to 3, whose input was not seen)",
    ),
    "labels of another loss": (
        LOSSES,
        "unproven",
        "has the `target of NllLoss` in one",
    ),
    "a series backwards": (SERIES, "unproven", "has the same rows in another order"),
    "swapped calls": (PREFERENCES, "unproven", "has the same rows in another order"),
    "an array": (_WITH_LABELS.replace("WRAP", "y.numpy()"), "refused", "in `argument 1`"),
    "a list": (_WITH_LABELS.replace("WRAP", "y.tolist()"), "refused", "in `argument 1`"),
    "a sparse tensor": (_WITH_LABELS.replace("WRAP", "y.to_sparse()"), "refused", "in `argument 1"),
    "an object": (_WITH_LABELS.replace("WRAP", "Batch(y)"), "unproven", "a Batch, given to"),
    "another argument": (OTHER_ARGUMENT, "refused", "`neg`"),
    "a frozen parameter": (FROZEN_PARAMETER, "refused", "in `argument 1`"),
    "what one loss alone is given": (ROLLED, "unproven", "`indices, numbers of the script` and"),
    "labels of a subset": (SUBSET, "unproven", "the same labels (of which sample each target of"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_long(SCRIPTS, slow=SAMPLE))
def test_no_pair_of_other_batches_holds(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, outcome, sentence = SCRIPTS[kind]
    script = tmp_path / "train.py"
    script.write_text(_BEGIN + body + _END, encoding="utf-8")
    study = Recording(tmp_path, [sys.executable, str(script)])
    assert study.record("baseline") == 0
    code = study.record("other", "--other")
    assert code == (1 if outcome == "refused" else 0)
    if outcome == "unproven":
        capsys.readouterr()
        assert code_of("verify", str(study.folder)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert sentence in said, said


FROZEN = """
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
model[0].requires_grad_(False)
if asked.other:
    model[0].weight.add_(0.1)
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(5, 8, generator=data), torch.randint(0, 3, (5,), generator=data)
    loss = F.cross_entropy(model(x), y)
"""


@pytest.mark.slow
def test_another_frozen_weight_is_another_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_BEGIN + FROZEN + _END, encoding="utf-8")
    study = Recording(tmp_path, [sys.executable, str(script)])
    assert study.record("baseline") == 0
    assert study.record("other", "--other") == 1
    assert "hashes.init_weights must be" in capsys.readouterr().out


PATCHED = """
import hashlib
own = nn.Module.__call__
def rounding(self, *args, **kwargs):
    result = own(self, *args, **kwargs)
    return result.bfloat16().float()
nn.Module.__call__ = rounding
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
for step in range(6):
    # one optimizer an update, and a loss that is written into once it is back-propagated
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(5, 8, generator=data), torch.randint(0, 3, (5,), generator=data)
    loss = F.cross_entropy(model(x), y)
    print("loss", loss.item())
"""
_PRINTED = """
    with torch.no_grad():
        loss *= 1000
assert nn.Module.__call__ is rounding
bits = b"".join(x.detach().numpy().tobytes() for x in model.parameters())
print("weights", hashlib.sha256(bits).hexdigest())
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_script_that_wraps_modules_itself_keeps_its_bits_and_its_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_BEGIN + PATCHED + _END + _PRINTED, encoding="utf-8")
    command = [sys.executable, str(script)]
    alone = run_alone([*command, "--seed", "0"])
    study = Recording(tmp_path, command)
    capfd.readouterr()
    assert study.record("baseline") == 0
    said = capfd.readouterr().out
    assert bits_of(said) == alone
    printed = [float(line.split()[1]) for line in said.splitlines() if line.startswith("loss ")]
    assert study.losses("baseline") == pytest.approx(printed, rel=1e-6)
    assert len(printed) == study.manifest("baseline").step == 6
