"""Gives tests an experiment by name: its module, loaded from its file."""

from pathlib import Path
from types import ModuleType

import pytest

from experiments.kit.runner import load

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def experiment(request: pytest.FixtureRequest) -> ModuleType:
    """The experiment that the test's file is named after: test_NAME.py."""
    return load(FOLDER, request.path.stem.removeprefix("test_"))


@pytest.fixture(scope="session")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which experiments that share a study find one another's runs."""
    return str(tmp_path_factory.mktemp("experiments"))
