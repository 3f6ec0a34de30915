"""Gives tests the writer of synthetic studies, and a browser."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.stability.report.browser import Browser, start_browser

WRITER = Path(__file__).parents[1] / "report" / "synthetic.py"


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module `synthetic`, loaded by path: test folders are no packages."""
    spec = importlib.util.spec_from_file_location("synthetic", WRITER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def finished(synthetic, tmp_path_factory) -> Path:
    """The folder of a finished study; tests only read it."""
    return synthetic.write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, one a worker; skips where there is none."""
    started = start_browser()
    yield started
    started.close()
