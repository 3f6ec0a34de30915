"""Gives tests an experiment by name: its module, loaded from its file."""

from pathlib import Path
from types import ModuleType

import pytest

from stability.cli.experiment import load

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def experiment(request: pytest.FixtureRequest) -> ModuleType:
    """The experiment that the test's file is named after: test_NAME.py."""
    return load(FOLDER, request.path.stem.removeprefix("test_"))
