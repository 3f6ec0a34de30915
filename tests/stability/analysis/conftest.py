"""Gives tests the writer of synthetic studies."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
