"""A study small enough to train in tests: real text, real arms, a model of some 20,000 weights."""

import fcntl
import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import settings
from torch.nn.modules import module as torch_module

from stability.config.load import load_study
from stability.config.study import StudyConfig
from stability.study.run_study import run_study
from stability.study.train_run import TrainOptions

# no test is timed: a machine that is busy for half a second is no failure
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """What a test leaves on in torch changes what later tests see, far from its cause."""
    yield
    left = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack()
    assert left == (0, 0), f"{left} modes of functions and of dispatch were left on"
    assert not torch_module._has_any_global_hook(), "a hook on all modules was left on"


TINY_ARMS = {
    "baseline": {},
    "flash_all_bf16": {"attention": {"implementation": "flash", "profile": "all_bf16"}},
    "flash_fa2": {"attention": {"implementation": "flash", "profile": "fa2"}},
    "rerun": {},
    "nudge": {"nudge": {"ulps": 1}},
    "fp32": {"precision": "32-true"},
    "init_seed": {"seed": {"init_offset": 1000}},
}


class SilentObserver:
    """Remembers how runs ended and shows nothing."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int, str, str]] = []
        self.losses: list[float | None] = []
        self.planned: list[list[str]] = []
        self.assays: list[tuple[str, int, int, str]] = []
        self.notes: list[str] = []
        self.study_notes: list[str] = []

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Ignore."""

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        """Remember the loss."""
        self.losses.append(loss)

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Remember what was said."""
        self.notes.append(text)

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """Remember it as a note."""
        self.notes.append(text)

    def study_noted(self, text: str) -> None:
        """Remember what is done beside training."""
        self.study_notes.append(text)

    def assays_planned(self, arms: Sequence[str]) -> None:
        """Remember which candidates faults are planted on."""
        self.planned.append(list(arms))

    def assay_advanced(self, arm: str, done: int, most: int, what: str) -> None:
        """Remember how far the planting of faults has come."""
        self.assays.append((arm, done, most, what))

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Remember how it ended."""
        self.ended.append((arm, seed, state, message))


def tiny_content(text: Path) -> dict:
    return {
        "name": "tiny",
        "question": "Does it matter?",
        "base": {
            "model": {"depth": 2, "width": 32, "heads": 2, "context": 32},
            "attention": {"implementation": "baseline"},
            "precision": "bf16-mixed",
            "data": {"source": str(text)},
            "optimizer": {"warmup_steps": 2},
            "train": {
                "steps": 6,
                "batch_size": 4,
                "snapshot_steps": [1, 2, 4],
                "checkpoint_every": 2,
                "accelerator": "cpu",
            },
            "probe": {"every": 2, "shadows": [{"implementation": "flash", "profile": "all_bf16"}]},
        },
        "arms": TINY_ARMS,
        "seeds": [0, 1],
        "yardstick": "fp32",
        "early_step": 2,
    }


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    words = [
        line.strip() for line in Path(random.__file__).read_text().splitlines() if line.strip()
    ]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(words))
    return path


def write_tiny(folder: Path, text: Path, edit: Callable[[dict], None]) -> Path:
    # through YAML and back: `edit` may not reach what two arms share
    content = yaml.safe_load(yaml.safe_dump(tiny_content(text), sort_keys=False))
    edit(content)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def pytest_collection_finish() -> None:
    """Leave out of each collection of garbage, and of each search by it, what was imported.

    The recorder would take that back, and counting so many objects takes it 0.1 s each time.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Give back what was left out, before plugins look for it; remove what passing tests wrote.

    It is gigabytes, which pytest would keep. Not test by test: a module that one of them imported
    from its folder is looked up by later ones.
    """
    gc.unfreeze()
    config = session.config
    if exitstatus == 0 and not hasattr(config, "workerinput") and config.option.basetemp is None:
        folders = config._tmp_path_factory  # pyright: ignore[reportAttributeAccessIssue] pytest's own
        shutil.rmtree(folders.getbasetemp(), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one costly study first: the last ones are shared out among all workers."""
    items.sort(key=lambda item: "sample" not in getattr(item, "fixturenames", ()))


@pytest.fixture
def write_study(tmp_path, text_file) -> Callable[..., Path]:
    """Return a function that writes the tiny study, changed by `edit`, and returns its path."""

    def write(edit: Callable[[dict], None] = lambda content: None) -> Path:
        return write_tiny(tmp_path, text_file, edit)

    return write


def run_quietly(
    study: StudyConfig, out: Path, jobs: int = 1, isolated: bool = False
) -> SilentObserver:
    """Train in this process, where a test can plant what it likes; `isolated` as users do."""
    observer, options = SilentObserver(), TrainOptions(wandb_mode="disabled")
    run_study(
        study, out, options=options, observer=observer, jobs=jobs, isolated=isolated or jobs > 1
    )
    return observer


@pytest.fixture
def run_tiny() -> Callable[..., SilentObserver]:
    return run_quietly


def train_edited(
    folder: Path, text: Path, edit: Callable[[dict], None] = lambda content: None
) -> tuple[Path, Path]:
    """Train the tiny study, changed by `edit`; return the path of its YAML and its folder."""
    path = write_tiny(folder, text, edit)
    run_quietly(load_study(path), folder / "runs")
    return path, folder / "runs" / "tiny"


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text_file) -> Path:
    """The folder of the tiny study, trained once, for all workers; tests only read it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained.txt"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            folder = train_edited(tmp_path_factory.mktemp("trained"), text_file)[1]
            shared.write_text(str(folder))
    return Path(shared.read_text())
