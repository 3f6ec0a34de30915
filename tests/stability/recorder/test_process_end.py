"""A training that breaks off does not count, whatever door it has and whether a block is around."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stability.records.manifest import Manifest, read_manifest
from stability.records.paths import RunPaths
from stability.study.process_end import ProcessEnd

PLAIN = """
import os, sys, torch, stability
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = stability.record(model, optimizer, study="mine", arm="baseline", config={{}})
for update in range(6):
    if update == 3:
        {break_off}
    x = torch.ones(4, 3)
    recorder.batch(x)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step(loss)
"""

CAUGHT_EXIT = """
        import threading
        threading.Thread(target=sys.exit, args=(2,)).start()
        try:
            sys.exit("not this way")
        except SystemExit:
            pass
"""

TRAINER = """
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stability.integrations.transformers import Recorder

class Rows(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 9:
            raise OSError("the shard is gone")
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}

config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)
asked = TrainingArguments(
    output_dir="out", max_steps=6, per_device_train_batch_size=2, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
recorder = Recorder(study="mine", arm="baseline", seed=0, config={})
trainer = Trainer(GPT2LMHeadModel(config), asked, train_dataset=Rows(), callbacks=[recorder])
"""
CAUGHT = "try:\n    trainer.train()\nexcept OSError as error:\n    print('went on')"


def ended(folder: Path, script: str) -> tuple[int, Manifest]:
    """Run a script in a folder; return its exit code and what is on record of it."""
    (folder / "train.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if name != "STABILITY_SPOOL"}
    words = [sys.executable, "train.py"]
    code = subprocess.run(words, cwd=folder, env=kept, capture_output=True, check=False).returncode
    return code, read_manifest(RunPaths.for_run(folder / "runs/mine", "baseline", 0).manifest)


@pytest.mark.parametrize(
    ("break_off", "code", "state", "message"),
    [
        ("raise OSError('the disk is full')", 1, "failed", "OSError: the disk is full"),
        *(
            pytest.param(*each, marks=pytest.mark.long if each[1] else pytest.mark.slow)
            for each in [
                ("sys.exit(3)", 3, "failed", "SystemExit: 3"),
                ("sys.exit('no licence')", 1, "failed", "SystemExit: no licence"),
                ("raise KeyboardInterrupt", -2, "interrupted", ""),
                ("exit(3)", 3, "failed", "SystemExit: 3"),
                ("sys.exit(0)", 0, "finished", ""),
                (CAUGHT_EXIT, 0, "finished", ""),
                ("break", 0, "finished", ""),
            ]
        ),
    ],
)
def test_a_loop_without_a_block_around_it(
    break_off: str, code: int, state: str, message: str, tmp_path: Path
) -> None:
    found, manifest = ended(tmp_path, PLAIN.format(break_off=break_off))
    assert (found, manifest.state, manifest.message) == (code, state, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "code", "message"),
    [
        ("trainer.train()", 1, "OSError: the shard is gone"),
        (CAUGHT, 0, "RuntimeError: the Trainer's training did not come to its end"),
    ],
)
def test_a_trainer_of_hugging_face(train: str, code: int, message: str, tmp_path: Path) -> None:
    found, manifest = ended(tmp_path, TRAINER + train)
    assert (found, manifest.state, manifest.message) == (code, "failed", message)


def test_what_was_there_is_put_back_unless_somebody_came_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, leave = sys.excepthook, sys.exit
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(sys, "exit", leave)
    end = ProcessEnd()
    with pytest.raises(SystemExit):
        sys.exit(2)
    assert isinstance(end.error, SystemExit)
    end.restore()
    assert (sys.excepthook, sys.exit) == (hook, leave)
    end, later = ProcessEnd(), lambda *_: None
    sys.excepthook = later
    end.restore()
    assert (sys.excepthook, sys.exit) == (later, leave)


def test_of_a_notebook_the_errors_since_the_start_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", OSError("before"), raising=False)
    end = ProcessEnd()
    assert end.error is None
    error = OSError("in a cell of the training")
    monkeypatch.setattr(sys, "last_value", error)
    assert end.error is error
    end.restore()
