"""How the recorder gets into processes: beside another `sitecustomize`, and into no helper's."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.stability.recorder.recording import Recording, bits_of, words

FOREIGN = {
    "one that marks": "print('foreign', flush=True)\n",
    "one that imports torch": "import torch\nprint('foreign', torch.__name__, flush=True)\n",
    "one that fails": "print('foreign', flush=True)\nraise RuntimeError('no such licence')\n",
    # as tracers do: they take themselves off the path, and import whoever comes next
    "one that chains": (
        "import os, sys\nprint('foreign', flush=True)\n"
        "here = os.path.dirname(__file__)\n"
        "sys.path = [path for path in sys.path if path != here]\n"
        "del sys.modules['sitecustomize']\nimport sitecustomize\n"
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, marks=pytest.mark.slow if x == "one that fails" else pytest.mark.long)
        for x in FOREIGN
    ],
)
def test_a_foreign_sitecustomize_is_executed_and_the_training_is_recorded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path / "runs", words("plain.py"))
    assert study.record("baseline") == 0
    alone = bits_of(capsys.readouterr().out)
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FOREIGN[kind], encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    assert study.record("rerun") == 0
    said = capsys.readouterr().out
    assert len(re.findall("^foreign", said, flags=re.MULTILINE)) == 1, said
    assert ("no such licence" in said) == (kind == "one that fails"), "Python's own words"
    assert bits_of(said) == alone
    # the same seeds, steps and batches, seen as before
    assert "rerun, seed 0: finished after 12 updates, 5 weights of Sequential" in said
    assert set(study.drift("rerun").values()) == {0.0}
    assert study.batches("rerun") == study.batches("baseline")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_leave_no_record_and_the_batches_are_the_same(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("loads.py"))
    assert study.record("baseline") == 0
    assert study.record("workers", "--workers", "2", "--start", start, options=TWO_FLAGS) == 0
    assert "workers, seed 0: finished after 4 updates, 4 weights" in capsys.readouterr().out
    assert study.batches("workers") == study.batches("baseline")
    assert len(study.batches("baseline")) == 4
    assert set(study.drift("workers").values()) == {0.0}


TWO_FLAGS = ("--change", "flags")

LOOKS_FIRST = """
from importlib.util import find_spec

assert find_spec("torch") and find_spec("torch").loader
import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
"""
"""As what imports transformers before torch does: that asks whether there is one."""


@pytest.mark.slow
def test_a_script_that_looks_for_torch_before_it_imports_it_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "looks_first.py"
    script.write_text(LOOKS_FIRST, encoding="utf-8")
    study = Recording(tmp_path / "runs", [sys.executable, str(script)])
    code = study.record("baseline")
    assert (code, capsys.readouterr().out.splitlines()[0]) == (
        0,
        "baseline, seed 0: finished after 3 updates, 2 weights of Linear",
    )
