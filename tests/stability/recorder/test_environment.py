"""Which sources a recorded training is said to have executed."""

import importlib.util
import sys
from pathlib import Path

import numpy
import pytest

from stability.recorder.inside.environment import own_files, own_modules


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("X = 1\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))


def test_the_users_own_sources_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("my_layers", tmp_path / "my_layers.py", monkeypatch)
    before = own_modules()["my_layers"]
    assert own_files()["my_layers"] == str(tmp_path / "my_layers.py")
    (tmp_path / "my_layers.py").write_text("X = 2\n")
    assert own_modules()["my_layers"] != before
    assert "numpy" not in own_modules()
    assert numpy.__name__ in sys.modules


def test_what_an_installed_package_generates_elsewhere_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("numpy._compiled_abc", tmp_path / "abc.py", monkeypatch)
    load("my_package.layers", tmp_path / "layers.py", monkeypatch)
    assert "numpy._compiled_abc" not in own_files()
    assert "my_package.layers" in own_files()


def test_what_inductor_builds_in_its_cache_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    made = f"c{'x2' * 25}y.main.py"
    for folder in ("graphs", "elsewhere"):
        (tmp_path / folder).mkdir()
        load(f"{folder}.kernel", tmp_path / folder / made, monkeypatch)
    load("graphs.mine", tmp_path / "graphs" / "train.py", monkeypatch)
    assert "graphs.kernel" not in own_files()
    assert "elsewhere.kernel" in own_files()
    assert "graphs.mine" in own_files(), "a cache may lie beside a user's sources"
