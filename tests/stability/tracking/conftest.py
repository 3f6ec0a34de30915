"""Gives tests W&B's own reader, a W&B server of their own, and an environment without WANDB_*."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="session")
def without_wandb_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        yield


def _inspect(log: Path, *options: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(log)],
        env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@pytest.fixture(scope="session")
def offline_log() -> Callable[[Path], Path]:
    """Return a function that finds the only run's file in a folder `wandb`."""

    def find(directory: Path) -> Path:
        (path,) = directory.glob("offline-run-*/run-*.wandb")
        return path

    return find


@pytest.fixture(scope="session")
def read_records() -> Callable[[Path], list[dict]]:
    """Return a function that reads a file of W&B's with the reader behind `wandb leet`."""
    return lambda log: [json.loads(line) for line in _inspect(log).splitlines()]


@pytest.fixture(scope="session")
def read_rows(read_records) -> Callable[[Path], list[dict]]:
    """Return a function that gives the rows of a file of W&B's, a histogram's parts by dots."""

    def rows(log: Path) -> list[dict]:
        found = [record["history"]["item"] for record in read_records(log) if "history" in record]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in found]

    return rows


@pytest.fixture(scope="session")
def read_summary() -> Callable[[Path], dict]:
    """Return a function that gives the summary in a file of W&B's."""
    return lambda log: json.loads(_inspect(log, "--summary"))["summary"]


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The writer of synthetic studies: test folders are no packages."""
    return _load(HERE.parent / "report" / "synthetic.py")


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[dict]:
    """A W&B server on this machine, and an environment in which W&B knows no other."""
    served = _load(HERE / "wandb_server.py")
    with served.running() as runs:
        monkeypatch.setenv("WANDB_BASE_URL", runs.address)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        monkeypatch.setenv("HOME", str(tmp_path))
        yield runs
