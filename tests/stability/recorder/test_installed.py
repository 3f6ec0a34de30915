"""Code that no source of the user's tells of is known by its contents, or its lack is said."""

import base64
import ctypes
import hashlib
import importlib
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from stability.recorder.inside import environment, installed
from stability.recorder.inside.installed import installed_code, loaded_libraries, own_libraries

TEXT = "X = {}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return folder


def install(site: Path, value: int, *, more: str = "", record: bool = True) -> None:
    """Install a package without `__version__`, always under one version."""
    (site / "my_kernel").mkdir(exist_ok=True)
    text = TEXT.format(value)
    (site / "my_kernel/__init__.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop("my_kernel", None)
    importlib.import_module("my_kernel")
    if record:
        (site / "My_Kernel-1.0.dist-info").mkdir(exist_ok=True)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()[:-1]
        lines = f"my_kernel/__init__.py,sha256={digest},{len(text)}\n{more}"
        (site / "My_Kernel-1.0.dist-info/RECORD").write_text(lines)


def known() -> str:
    return installed_code()[0]["code.my_kernel"]


def test_a_reinstall_under_the_same_version_is_told(site: Path) -> None:
    install(site, 1)
    first = known()
    assert first.startswith("1.0 ")
    assert known() == first
    install(site, 2)
    assert known() != first
    install(site, 1)
    assert known() == first


def test_where_and_how_a_package_was_installed_is_no_code(site: Path) -> None:
    install(site, 1)
    first = known()
    other = "../../../bin/run,sha256=abc,3\nmy_kernel/__pycache__/x.pyc,,\n"
    other += "My_Kernel-1.0.dist-info/direct_url.json,sha256=abc,4\n"
    install(site, 1, more=other)
    assert known() == first
    install(site, 1, more="my_kernel/other.py,sha256=abc,3\n")
    assert known() != first


def test_of_a_package_without_a_record_the_loaded_sources_are_hashed(site: Path) -> None:
    install(site, 1, record=False)
    first = known()
    install(site, 2, record=False)
    assert known() != first


def library(path: Path, added: bytes = b"") -> Path:
    spec = find_spec("markupsafe._speedups")
    assert spec is not None
    assert spec.origin is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.origin, path)
    with path.open("ab") as file:
        file.write(added)
    ctypes.CDLL(str(path))
    return path


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="only Linux tells of libraries"
)


@pytest.mark.parametrize("added", [b"", b"another build"])
def test_a_library_that_ctypes_loads_is_hashed(tmp_path: Path, added: bytes) -> None:
    path = library(tmp_path / "libmine.so", added)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert installed_code()[0][f"library.{path}"] == sha256
    assert str(path) in own_libraries()
    of_package = library(tmp_path / ".venv/lib/python3/site-packages/x/libmine.so")
    assert str(of_package) in loaded_libraries()
    assert str(of_package) not in own_libraries()


def mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Make the system say that these files are loaded."""
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 42    {path}\n" for path in paths))
    monkeypatch.setattr(installed, "_MAPS", str(maps))


DRIVER = "/usr/local/nvidia/lib64/libcuda.so.580.159.04"


def test_the_drivers_own_libraries_are_known_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the driver loads its compiler only for a kernel that it has not kept from an earlier process
    compiler = "/usr/local/nvidia/lib64/libnvidia-ptxjitcompiler.so.580.159.04"
    mine = "/home/me/libmine.so.1.0.4"
    mapped(tmp_path, monkeypatch, compiler, mine, DRIVER, "/usr/lib/libc.so.6")
    assert loaded_libraries() == [mine]
    assert installed.driver_version() == "580.159.04"
    mapped(tmp_path, monkeypatch, compiler, mine)
    assert loaded_libraries() == [mine, compiler]
    assert installed.driver_version() == ""


@pytest.mark.parametrize("where", ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu"])
def test_the_version_of_the_gpus_driver_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    mapped(tmp_path, monkeypatch, f"{where}/libcuda.so.570.86.15")
    assert "driver" not in environment.environment({})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    assert environment.environment({})["driver"] == "570.86.15"


def test_a_library_that_was_built_again_in_its_place_is_told(site: Path) -> None:
    path = library(site / "my_kernel/ops.so")
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()[:-1]
    install(site, 1, more=f"my_kernel/ops.so,sha256={digest},3\n")
    assert "but" not in known()
    with path.open("ab") as file:
        file.write(b"another build")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert known().endswith(f"but ops.so {sha256}")


def test_a_library_that_is_too_large_or_was_replaced_is_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(tmp_path / "libmine.so")
    monkeypatch.setattr(installed, "_LARGEST", 1)
    said = f"the same code of {path}, a library that has 0 MiB, and up to 0 are hashed"
    assert said in installed_code()[1]
    path.unlink()
    (said,) = [each for each in installed_code()[1] if str(path) in each]
    assert "a library that was replaced while the process ran" in said


def test_what_is_known_by_its_version_or_compiled_from_known_sources_is_no_library(
    tmp_path: Path,
) -> None:
    made = library(tmp_path / f"torchinductor_me/x2/c{'x2' * 25}y.main.so")
    own = library(tmp_path / "torchinductor_study/mine.so")
    found, doubts = installed_code()
    assert str(made) not in str(found)
    assert f"library.{own}" in found, "a cache is not told by the name of a folder alone"
    assert not [key for key in found if key.startswith("library.torch")]
    assert not [each for each in doubts if "/torch/" in each]
    assert "code.torch" in found


def test_a_package_in_a_folder_that_can_not_be_listed_stops_nothing(site: Path) -> None:
    for path in ("/app.zip/site-packages/zipped/__init__.py", f"{site}/gone/site-packages/a.py"):
        module = type(sys)("zipped")
        module.__file__ = path
        sys.modules["zipped"] = module
        assert installed_code()[0]["code.zipped" if "zipped" in path else "code.a"]
