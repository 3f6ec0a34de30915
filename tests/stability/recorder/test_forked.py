"""A training in a forked process is recorded, and one that goes on in a fork is refused."""

import sys
from pathlib import Path

import pytest

from tests.sampling import others_long
from tests.stability.recorder.recording import Recording, code_of

_BEGIN = """
import multiprocessing, os, sys, torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1)
def train(steps=4, fails=False):
    for _ in range(steps):
        x, y = torch.randn(5, 8, generator=data), torch.randint(0, 3, (5,), generator=data)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if fails:
        raise RuntimeError("the disk is full")
def in_child(**asked):
    child = multiprocessing.get_context("fork").Process(target=train, kwargs=asked)
    child.start()
    child.join()
"""
FORKS = {
    "multiprocessing": "in_child()",
    "exit": """
if not os.fork():
    train()
    sys.exit(0)
os.wait()
""",
}


def study_of(folder: Path, text: str) -> Recording:
    """Return a study of a script that trains in another process."""
    (folder / "train.py").write_text(_BEGIN + text, encoding="utf-8")
    return Recording(folder / "runs", [sys.executable, str(folder / "train.py")])


@pytest.mark.slow
@pytest.mark.parametrize("how", others_long(FORKS, slow=["exit"]))
def test_a_training_in_a_forked_process_is_recorded(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, FORKS[how])
    assert study.record("baseline") == 0, capsys.readouterr()
    assert study.manifest("baseline").step == 4
    assert study.record("rerun") == 0
    assert set(study.drift("rerun").values()) == {0.0}
    assert code_of("verify", str(study.folder)) == 0


REFUSED = {
    "went on": ("train(40)\nin_child(steps=40)", "forked from one that had trained already"),
    "failed": ("in_child(fails=True)", "training ended in an error after 4 updates"),
    "left": ("if not os.fork():\n    train()\n    os._exit(0)\nos.wait()", "by os._exit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", others_long(REFUSED, slow=["failed"]))
def test_a_forked_training_whose_end_is_not_known_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = REFUSED[what]
    study = study_of(tmp_path, text)
    assert study.record("baseline") == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert study.manifest("baseline").state == "failed"


@pytest.mark.slow
def test_a_fork_that_does_not_train_is_no_part_of_the_training(tmp_path: Path) -> None:
    text = "train(20)\nif not os.fork():\n    model(torch.ones(1, 8))\n    sys.exit(0)\nos.wait()\n"
    study = study_of(tmp_path, text + "train(20)")
    assert study.record("baseline") == 0
    assert study.manifest("baseline").step == 40
