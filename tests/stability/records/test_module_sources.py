"""Every source that is imported or executed is hashed, or named where it can't be."""

import hashlib
import importlib
import os
import runpy
import sys
import types
import zipfile

import pytest
from torch._inductor.runtime import compile_tasks

from stability.records import distributions, module_sources
from stability.records.module_sources import UNHASHED, own_modules, watch_sources


def _sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = set(sys.modules)
    watch_sources()
    yield tmp_path
    watch_sources()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _import(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return importlib.import_module(name)


def _as_installed(monkeypatch, folder, distribution):
    """Let `folder` be one where packages are installed, with the one package `plug`."""
    monkeypatch.setattr(distributions, "_site_folders", lambda: (os.path.join(folder, ""),))
    installed = {**distributions._distributions(), "plug_in_of_mine": [distribution]}
    monkeypatch.setattr(distributions, "_distributions", lambda: installed)
    monkeypatch.setattr(distributions, "_known_tops", distributions._known_tops.__wrapped__)


def test_a_plug_in_is_hashed_though_it_is_installed_and_has_a_version(folder, monkeypatch):
    _as_installed(monkeypatch, folder, "plug-in-of-mine")
    package = folder / "plug_in_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from . import core\n")
    (package / "core.py").write_text("gain = 1\n")
    importlib.import_module("plug_in_of_mine")
    before = own_modules()
    assert before["plug_in_of_mine.core"] == _sha256("gain = 1\n")
    (package / "core.py").write_text("gain = 2\n")
    assert own_modules()["plug_in_of_mine.core"] == _sha256("gain = 2\n")


def test_what_this_package_depends_on_is_not_hashed(folder, monkeypatch):
    _as_installed(monkeypatch, folder, "numpy")
    package = folder / "plug_in_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("gain = 1\n")
    importlib.import_module("plug_in_of_mine")
    assert "plug_in_of_mine" not in own_modules()


def test_a_module_in_a_zip_is_hashed(folder, monkeypatch):
    file = folder / "code.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("zipped_one.py", "gain = 1\n")
    monkeypatch.syspath_prepend(str(file))
    importlib.import_module("zipped_one")
    assert own_modules()["zipped_one"] == _sha256("gain = 1\n")


def test_a_file_that_is_loaded_and_not_kept_as_a_module_is_hashed(folder):
    (folder / "plain.py").write_text("gain = 1\n")
    _import(
        folder,
        "loads_another",
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('hidden', {str(folder / 'plain.py')!r})\n"
        "spec.loader.exec_module(module_from_spec(spec))\n",
    )
    found = own_modules()
    assert "hidden" not in sys.modules
    assert found["plain.py"] == _sha256("gain = 1\n")
    (folder / "plain.py").write_text("gain = 2\n")
    assert own_modules()["plain.py"] == _sha256("gain = 2\n")


@pytest.mark.parametrize(
    "run",
    [
        "import runpy\nrunpy.run_path({file!r})\n",
        "import pathlib\nexec(compile(pathlib.Path({file!r}).read_text(), {file!r}, 'exec'))\n",
    ],
    ids=["runpy", "exec of compiled"],
)
def test_a_file_that_is_run_is_hashed(folder, run):
    file = folder / "plain.py"
    file.write_text("gain = 1\n")
    _import(folder, "runs_another", run.format(file=str(file)))
    found = own_modules()
    assert found["plain.py"] == _sha256("gain = 1\n")
    assert found["runs_another"] == _sha256(run.format(file=str(file)))
    assert UNHASHED not in found.values()


def test_two_files_of_one_name_are_told_from_one(folder):
    hashes = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "plain.py").write_text(f"{name} = 1\n")
        runpy.run_path(str(folder / name / "plain.py"))
        hashes.append(own_modules()["plain.py"])
    assert hashes[0] == _sha256("a = 1\n") != hashes[1]


def test_text_that_a_module_executes_is_named_as_unhashed(folder):
    _import(folder, "executes_text", "exec('gain = 1')\n")
    found = own_modules()
    assert found["executes_text (text that it executes)"] == UNHASHED
    assert len(found["executes_text"]) == len(_sha256(""))


def test_text_that_an_installed_package_executes_is_its_own(folder):
    # dataclass and namedtuple both write source text and execute it
    _import(
        folder,
        "has_dataclasses",
        "from collections import namedtuple\n"
        "from dataclasses import dataclass\n"
        "Pair = namedtuple('Pair', 'a b')\n"
        "@dataclass\nclass Gain:\n    value: float = 1.0\n",
    )
    assert UNHASHED not in own_modules().values()


def test_what_was_executed_before_a_run_is_not_its_own(folder):
    _import(folder, "executes_text", "exec('gain = 1')\n")
    watch_sources()
    assert UNHASHED not in own_modules().values()


def test_a_module_of_an_importer_that_tells_no_source_is_unhashed(folder, monkeypatch):
    finder = _import(
        folder,
        "importer_of_mine",
        "from importlib.machinery import ModuleSpec\n"
        "class Loader:\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): module.gain = 1\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return ModuleSpec(name, Loader()) if name == 'from_nowhere' else None\n",
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder.Finder()])
    assert importlib.import_module("from_nowhere").gain == 1
    assert own_modules()["from_nowhere"] == UNHASHED


def test_pythons_own_modules_and_folders_are_not_named(folder):
    (folder / "namespace_of_mine").mkdir()
    (folder / "namespace_of_mine" / "inner.py").write_text("gain = 1\n")
    importlib.import_module("namespace_of_mine.inner")
    found = own_modules()
    assert found["namespace_of_mine.inner"] == _sha256("gain = 1\n")
    assert not {"namespace_of_mine", "sys", "builtins", "zipimport", "json"} & found.keys()


def test_a_large_file_is_read_once_unless_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module_sources, "_LARGE", 4)
    file = tmp_path / "compiled.so"
    for content in (b"12345", b"123456"):
        file.write_bytes(content)
        expected = hashlib.sha256(content).hexdigest()
        assert module_sources._hash_file(str(file)) == expected
    stat = file.stat()
    file.write_bytes(b"654321")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert module_sources._hash_file(str(file)) == expected


def test_what_the_compiler_writes_and_executes_is_not_the_users(tmp_path):
    written = tmp_path / "cabc.py"
    written.write_text("x = 1")
    name = "torch._inductor.runtime.compile_tasks.cabc"
    module = types.ModuleType(name)
    module.__file__ = str(written)
    sys.modules[name] = module
    watch_sources()
    try:
        by_it = {"__name__": "torch._inductor.runtime.compile_tasks"}
        text = f"exec(compile('y = 2', {str(written)!r}, 'exec'))"
        exec(compile(text, compile_tasks.__file__, "exec"), by_it)
        assert not [found for found in own_modules() if "cabc" in found or "compile_tasks" in found]
        own = types.ModuleType("torch_inductor_of_mine")
        own.__file__ = str(written)
        sys.modules["torch_inductor_of_mine"] = own
        assert "torch_inductor_of_mine" in own_modules()
    finally:
        sys.modules.pop(name)
        sys.modules.pop("torch_inductor_of_mine", None)


def test_a_module_that_torch_makes_of_its_own_text_is_not_the_users():
    importlib.import_module("torch.distributed.nn.jit.instantiator")
    assert "_remote_module_non_scriptable" in sys.modules
    assert "_remote_module_non_scriptable" not in module_sources.own_modules()
