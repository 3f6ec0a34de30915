"""What the version of a distribution says all about, and what it doesn't."""

import re
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch

from stability.records import distributions
from stability.records.distributions import (
    DEPENDENCIES,
    imported_packages,
    is_installed,
    is_known_by_version,
)

ROOT = Path(__file__).parents[3]
SITE = Path(sysconfig.get_paths()["purelib"])


def test_the_dependencies_are_those_of_the_project():
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    listed = [*project["dependencies"], *content["build-system"]["requires"]]
    listed += [each for extra in project["optional-dependencies"].values() for each in extra]
    matches = (re.match(r"[A-Za-z0-9._-]+(\[[a-z0-9,]+\])?", each) for each in listed)
    names = {match.group() for match in matches if match}
    assert set(DEPENDENCIES) == {name for name in names if "training-stability" not in name}
    assert list(DEPENDENCIES) == sorted(DEPENDENCIES)


@pytest.mark.parametrize("module", [torch, numpy, torch.nn, pytest, re])
def test_what_this_package_depends_on_is_known_by_its_version(module):
    assert is_known_by_version(module.__file__)


@pytest.mark.parametrize(
    "file",
    [
        SITE / "my_plug_in" / "core.py",
        SITE / "loose_file.py",
        # of the Python that the virtual environment was made from
        Path(sysconfig.get_paths()["stdlib"]) / "site-packages" / "my_plug_in" / "core.py",
    ],
)
def test_what_is_installed_besides_is_not(file):
    assert is_installed(str(file))
    assert not is_known_by_version(str(file))


def test_a_script_of_the_start_up_is_not_known_though_it_lies_in_pythons_own_folder():
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert is_known_by_version(str(folder / "json" / "__init__.py"))
    assert not is_known_by_version(str(folder / "sitecustomize.py"))


def test_what_only_an_extra_needs_is_not_known(monkeypatch):
    needs = {
        "mine": ["other_one>=1", 'quick; extra == "fast"', "asked[more_of] ; python_version > '3'"],
        "asked": ["behind (>=2); extra == 'more-of'", "unasked; extra == 'all'"],
    }
    monkeypatch.setattr(distributions, "DEPENDENCIES", ("mine",))
    monkeypatch.setattr(distributions, "_requires", lambda name: needs.get(name, []))
    assert distributions._closure.__wrapped__() == {"mine", "other-one", "asked", "behind"}


def test_a_name_that_two_distributions_share_is_known_only_if_both_are(monkeypatch):
    installed = {"torch": ["torch"], "shared": ["torch", "my-plug-in"]}
    monkeypatch.setattr(distributions, "_distributions", lambda: installed)
    assert distributions._known_tops.__wrapped__() == {"torch"}


def test_libraries_that_are_loaded_without_an_import_have_their_versions(monkeypatch):
    # CUDA's wheels hold no module that anybody imports
    installed = {"nvidia": ["nvidia-cublas", "nvidia_cudnn_cu12"], "torch": ["torch"], "x": ["x"]}
    monkeypatch.setattr(distributions, "_distributions", lambda: installed)
    monkeypatch.setattr(distributions, "_version", {"torch": "2", "nvidia-cublas": "13"}.get)
    found = imported_packages()
    assert found == {"nvidia-cublas": "13", "nvidia_cudnn_cu12": None, "torch": "2"}
    monkeypatch.undo()
    assert imported_packages()["torch"] == metadata.version("torch")
