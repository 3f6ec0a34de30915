"""A module whose .pyc is not that of its source is refused: its hash would name other code."""

import importlib
import os
import py_compile
import sys

import pytest

from stability.records.identity import own_modules
from stability.records.stale_bytecode import refuse_stale_bytecode


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that imports `scale_of_mine` anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)

    def imported():
        sys.modules.pop("scale_of_mine", None)
        importlib.invalidate_caches()
        return importlib.import_module("scale_of_mine")

    yield imported
    sys.modules.pop("scale_of_mine", None)


def _write(folder, text, at=1.7e9):
    path = folder / "scale_of_mine.py"
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_an_edit_that_keeps_size_and_time_is_refused(module, tmp_path):
    _write(tmp_path, "SCALE = 1.25\n")
    assert module().SCALE == 1.25
    refuse_stale_bytecode(own_modules())
    path = _write(tmp_path, "SCALE = 1.00\n")
    assert module().SCALE == 1.25  # what is to be found: Python runs the old code
    said = rf"{path}: its \.pyc is not that of its source.*: delete .*__pycache__$"
    with pytest.raises(ValueError, match=said):
        refuse_stale_bytecode(own_modules())
    for stale in (tmp_path / "__pycache__").iterdir():
        stale.unlink()
    assert module().SCALE == 1.0
    refuse_stale_bytecode(own_modules())


def test_a_pyc_that_python_never_checks_is_refused(module, tmp_path):
    path = _write(tmp_path, "SCALE = 1.25\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), invalidation_mode=unchecked)
    _write(tmp_path, "SCALE = 3.0  # longer\n", at=1.8e9)
    assert module().SCALE == 1.25
    with pytest.raises(ValueError, match=r"its \.pyc is not that"):
        refuse_stale_bytecode(own_modules())


def test_no_constant_makes_an_honest_module_stale(module, tmp_path):
    text = "X = (1e999 - 1e999, -0.0, 1j, {1, 2} == {'a', 'b'}, b'x')\n"
    text += "def f(a, *, b=X):\n    return a in {3, 4, -0.0} or [c for c in b]\n"
    _write(tmp_path, text)
    module()
    refuse_stale_bytecode(["scale_of_mine", "__main__", "sys", "not_there"])
    module()  # from the .pyc
    refuse_stale_bytecode(["scale_of_mine"])
