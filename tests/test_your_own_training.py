"""docs/your_own_training.md, as its reader goes through it: every command, file and key is real.

Of docs/script_proof.md, which says what of such a script is proven, what it shows as printed.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from stability.cli.main import main
from stability.config.command_study import CommandConfig, expand_commands, load_command_study
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import EVAL_LOSS
from stability.records.paths import RunPaths
from tests.pages import blocks_for

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your_own_training.md").read_text()


def blocks_in(
    language: str, test: str, having: str = "", page: str = "docs/your_own_training.md"
) -> list[str]:
    """Return the blocks of a page in a language that a test of this file goes through."""
    test = f"test_your_own_training.py::{test}"
    return [x for _, x in blocks_for(test, page, language, having=having)]


COMMANDS = [
    line
    for block in blocks_in("sh", "test_every_command_runs_in_the_order_of_the_page")
    for line in block.splitlines()
]
STUDIES = blocks_in("yaml", "test_the_studies_of_the_page_are_the_examples")
(LOOP,) = blocks_in("python", "test_the_lines_that_tell_of_a_loop_record_it", "recorder")
(LOSS,) = blocks_in("python", "test_the_held_out_function_is_called_by_a_recording", "def loss")
SCRIPT = ROOT / "tests" / "stability" / "recorder" / "scripts" / "resumes.py"
"""A script of the reader's: it takes all that the page gives to `train.py`."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: a script, a checkpoint of it, and two series of older ones."""
    shutil.copy(SCRIPT, tmp_path / "train.py")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for series in ("fp32", "bf16"):
        (tmp_path / "checkpoints" / series).mkdir(parents=True)
        for step in (0, 10):
            torch.manual_seed(step)
            state = nn.Linear(3, 2).state_dict()
            torch.save(state, tmp_path / "checkpoints" / series / f"step-{step}.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return tmp_path


def code_of(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_every_command_is_stabilitys() -> None:
    assert len(COMMANDS) >= 9
    assert all(command.startswith("stability ") for command in COMMANDS)


@pytest.mark.slow
def test_every_command_runs_in_the_order_of_the_page(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = [sys.executable, "train.py", "--steps", "2", "--save", "ckpt.pt"]
    subprocess.run(saved, check=True, capture_output=True)
    for command in COMMANDS:
        words = shlex.split(re.sub("--steps 100", "--steps 6", command))[1:]
        if "--steps 200" in command:  # the first command in another way: beside it, not after it
            words = shlex.split(command.replace("--steps 200", "--steps 3"))[1:]
            words[1:1] = ["--out", "elsewhere"]
        assert code_of(words) == 0, (command, capsys.readouterr())
        if "--study mine --arm bf16" in command:
            assert "bf16, seed 0: finished after 6 updates" in capsys.readouterr().out
    assert (
        read_manifest(RunPaths.for_run(place / "elsewhere" / "mine", "baseline", 0).manifest).step
        == 3
    )
    assert (place / "study.yaml").exists()
    assert list((place / "runs" / "mine" / "forks").iterdir())
    assert (place / "runs" / "old").is_dir()


def test_the_studies_of_the_page_are_the_examples() -> None:
    shown = [yaml.safe_load(block) for block in STUDIES]
    files = [ROOT / "examples" / name for name in ("study.yaml", "verdict.yaml")]
    assert shown == [yaml.safe_load(path.read_text()) for path in files]
    arms = {each.name: each for each in expand_commands(load_command_study(files[1]))}
    assert {name: arms[name].role for name in ("fa2", "broken", "reference")} == {
        "fa2": "candidate",
        "broken": "broken",
        "reference": "reference",
    }
    assert arms["broken"].config.attention == "flash:fa2+out_gain_1pct"


def test_every_key_of_a_base_is_in_the_table() -> None:
    table = PAGE.split("The base of a command has these keys:")[1].split("\n\n")[1]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    named |= set(re.findall(r"`setup` is a command", table) and ["setup"])
    assert named == {field.name for field in fields(CommandConfig)}


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """What the page leaves to its reader."""
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_the_lines_that_tell_of_a_loop_record_it(place: Path) -> None:
    assert LOOP.count("...  # forward, backward, optimizer.step()") == 1
    loader = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    # the page's arm comes after a baseline
    for text in (LOOP.replace('"bf16"', '"baseline"'), LOOP):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known = {
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "update": partial(update, model, optimizer),
        }
        told = text.replace("...  # forward", "loss = update(x, y)  # ")
        exec(compile(told, "page", "exec"), known)
    for arm in ("baseline", "bf16"):
        assert read_manifest(RunPaths.for_run(place / "runs" / "mine", arm, 0).manifest).step == 3


LANGUAGE_MODEL = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randint(16, (4, 6))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_held_out_function_is_called_by_a_recording(place: Path) -> None:
    """Of a script that returns logits, as the page has it; what it is called with is the page's."""
    (place / "losses.py").write_text(LOSS)
    (place / "train.py").write_text(LANGUAGE_MODEL)
    torch.save(torch.randint(16, (3, 9)), place / "held_out.pt")
    words = ["record", "--study", "mine", "--arm", "baseline", "--held-out", "losses:loss", "--"]
    assert code_of([*words, sys.executable, "train.py"]) == 0
    found = read_metrics(RunPaths.for_run(place / "runs" / "mine", "baseline", 0).metrics)
    assert [*found[EVAL_LOSS].steps] == [0, 1, 2]
    assert all(abs(value - math.log(16)) < 1 for value in found[EVAL_LOSS].values)


MESSAGES = re.findall(r"^\| `([^`]{15,})` \|", PAGE.split("| a message |")[1], flags=re.MULTILINE)
FILLED_IN = re.compile(
    r"\d+|\.\.\.|in \.\.\.|init_weights|the script evaluates (?=other)"
    r"|(?<=a call has )a mask|MODULE.*|module:.*|(?<=argument )lr|run\.sh|MY_LR"
)
"""What of a message is put in where it is said."""


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_table_is_one_that_is_said(message: str) -> None:
    sources = " ".join(path.read_text() for path in sorted((ROOT / "stability").rglob("*.py")))
    said = re.sub(r'"\s*f?"', "", sources)
    parts = [part.strip() for part in FILLED_IN.split(message) if len(part) > 8]
    assert parts
    assert [part for part in parts if part not in said] == []


PRINTED = {
    "held out: 11 samples that the script evaluates at 3 steps": "test_recorded_held_out.py",
    "nothing else that was seen; linear products: ": "test_forgeries.py",
    ": finished after ": "test_startup.py",
}
"""What is shown without a language, also on docs/script_proof.md, and the test that sees it."""
SHOWN = [
    block
    for page in ("docs/your_own_training.md", "docs/script_proof.md")
    for block in blocks_in(
        "", "test_what_is_printed_on_the_pages_is_held_somewhere", "|".join(PRINTED), page
    )
]


def test_what_is_printed_on_the_pages_is_held_somewhere() -> None:
    """But for the ladder, which test_readme holds."""
    assert len(SHOWN) == len(PRINTED)
    for said, file in PRINTED.items():
        assert any(said in block for block in SHOWN)
        assert said in (ROOT / "tests" / "stability" / "recorder" / file).read_text()


def test_every_verb_on_the_page_exists(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = {text.split()[1] for text in re.findall(r"`(stability \w[^`]*)`", PAGE)}
    verbs |= {command.split()[1] for command in COMMANDS}
    for verb in sorted(verbs - {"stability"}):
        assert code_of([verb, "--help"]) == 0, verb
        assert capsys.readouterr().out
