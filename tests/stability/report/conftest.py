"""Gives tests the writer of synthetic studies, two studies to read, and a browser."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.stability.report import synthetic as writer
from tests.stability.report.browser import Browser, start_browser
from tests.stability.report.synthetic_full import write_full


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what needs a browser to the slow tests."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that writes synthetic studies."""
    return writer


@pytest.fixture(scope="session")
def finished(synthetic, tmp_path_factory) -> Path:
    """The folder of a finished study; tests only read it."""
    return synthetic.write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")


@pytest.fixture(scope="session")
def full_study(tmp_path_factory) -> Path:
    """The folder of a finished study with every kind of record; tests only read it."""
    return write_full(tmp_path_factory.mktemp("studies") / "full")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, one a worker; skips where there is none."""
    started = start_browser()
    yield started
    started.close()
