"""What the call asks of a script: four lines of it, and nothing where nothing is recorded."""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stability.recorder.recording import SCRIPTS, Calling

LINES = {
    "import torch\n": "import stability\n",
    "data = torch.Generator()": "recorder = stability.record(model, optimizer)\n",
    "    with torch.autocast": "    recorder.batch(tokens)\n",
    "    optimizer.zero_grad()": "    recorder.step(loss)\n",
}
"""Each line of the call, put before the script's line that begins so."""


@pytest.mark.slow
def test_the_call_takes_at_most_five_lines_of_a_script_and_records_it(tmp_path: Path) -> None:
    source = (SCRIPTS / "plain.py").read_text().splitlines(keepends=True)
    changed = []
    for line in source:
        changed += [added for begin, added in LINES.items() if line.startswith(begin)]
        changed.append(line)
    said = list(difflib.ndiff(source, changed))
    assert len([line for line in said if line.startswith("+ ")]) == len(LINES) <= 5
    assert not [line for line in said if line.startswith("- ")]
    script = tmp_path / "train.py"
    script.write_text("".join(changed))
    study = Calling(tmp_path, [sys.executable, str(script)])
    assert study.record("baseline") == 0
    assert study.manifest("baseline").step == 12
    assert len(study.batches("baseline")) == 12


WATCHED = """
import json, sys, torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
import stability
def places():
    return [id(nn.Module.__call__), id(torch.autograd.backward), len(hooks), torch.initial_seed()]
before, loaded = places(), set(sys.modules)
recorder = stability.record(nn.Linear(2, 2), optional=True)
same = before == places()
print(json.dumps([type(recorder).__name__, same, sorted(set(sys.modules) - loaded)]))
"""


def test_outside_of_a_study_the_call_puts_nothing_in_and_loads_nothing_heavy(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WATCHED]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    kind, is_same, loaded = json.loads(ran.stdout)
    assert kind == "IdleRecorder"
    assert is_same, "something was wrapped"
    heavy = {"stability.study.foreign", "stability.analysis", "lightning", "numpy", "scipy"}
    assert not heavy & set(loaded)
    assert all(name.startswith("stability") for name in loaded), loaded
    assert not list(tmp_path.iterdir())
