"""The identity of a run holds what decides its bits, and tells of each change by name."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attention_kernels
from stability.records import identity
from stability.records.identity import (
    HARMLESS,
    environment,
    hash_environment,
    training_switches,
)

ROOT = Path(__file__).parents[3]


def test_it_is_json_and_says_what_decides_the_bits():
    found = environment()
    assert json.loads(json.dumps(found)) == found == environment()
    assert found["package.torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert found["simd"] == torch.backends.cpu.get_cpu_capability()
    assert set(found) >= {"python", "platform", "gpu", "cpu_flags", "interop_threads"}
    assert "unknown to this torch" not in found.values()


def _copy_of_the_library(folder, monkeypatch):
    shutil.copytree(Path(attention_kernels.__file__).parent, folder)
    monkeypatch.setattr(attention_kernels, "__file__", str(folder / "__init__.py"))


def _copy_of_this_package(folder, monkeypatch):
    shutil.copytree(identity._PACKAGE, folder)
    monkeypatch.setattr(identity, "_PACKAGE", folder)


@pytest.mark.parametrize(
    ("key", "copy", "names"),
    [
        ("kernel_source", _copy_of_the_library, ("golden.py", "twin/forward.py")),
        (
            "package_source",
            _copy_of_this_package,
            ("model/lightning_module.py", "callbacks/batch_hash.py"),
        ),
    ],
)
def test_a_changed_source_changes_it(key, copy, names, tmp_path, monkeypatch):
    before, folder = environment()[key], tmp_path / "copy"
    copy(folder, monkeypatch)
    assert environment()[key] == before
    for name in names:
        was = environment()[key]
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        assert environment()[key] != was
    assert len(before) == len(hashlib.sha256().hexdigest())


def test_what_only_shows_a_run_is_no_part_of_it(tmp_path, monkeypatch):
    before, folder = environment()["package_source"], tmp_path / "copy"
    _copy_of_this_package(folder, monkeypatch)
    (folder / "report" / "page" / "html.py").write_text("# another page\n")
    (folder / "cli" / "show.py").unlink()
    assert environment()["package_source"] == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MKL_CBWR", "COMPATIBLE"),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("ATEN_CPU_CAPABILITY", "default"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("TRITON_INTERPRET", "1"),
    ],
)
def test_a_variable_that_math_libraries_read_is_in_it(name, value, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = hash_environment(environment())
    monkeypatch.setenv(name, value)
    assert environment()[f"variable.{name}"] == value
    assert hash_environment(environment()) != before


@pytest.mark.parametrize("name", HARMLESS)
def test_a_variable_without_effect_is_not(name, monkeypatch):
    before = environment()
    monkeypatch.setenv(name, "another")
    assert environment() == before


def test_a_switch_that_any_module_may_turn_is_in_it():
    before = environment()
    torch.set_float32_matmul_precision("medium")
    try:
        after = environment()
    finally:
        torch.set_float32_matmul_precision("highest")
    changed = {key for key in before if before[key] != after[key]}
    assert "switch.float32_matmul_precision" in changed
    assert {key.partition(".")[0] for key in changed} == {"switch"}
    torch.set_flush_denormal(True)
    try:
        assert environment()["switch.flush_denormal"] is True
    finally:
        torch.set_flush_denormal(False)
    assert environment() == before


def test_mixed_switches_are_told_as_that():
    def refuses(torch):
        raise RuntimeError("you have used mix of the legacy and new APIs")

    assert identity._told(refuses, torch) == "old and new switches are mixed"


def test_versions_are_those_of_what_is_imported():
    code = (
        "import sys\n"
        "from stability.records.identity import environment\n"
        "found = environment()\n"
        "assert found['package.torch'] and 'package.lightning' not in found\n"
        "print(sorted({'lightning', 'wandb', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_package_that_one_run_needs_more_than_the_other_is_no_difference_of_the_hash():
    found = environment()
    assert hash_environment({**found, "package.xformers": "1"}) == hash_environment(found)


def test_a_process_that_autocasts_is_told_from_one_that_does_not():
    before = environment()
    assert before["switch.autocast_cpu"] == "off"
    with torch.autocast("cpu", torch.bfloat16):
        after = environment()
    assert after["switch.autocast_cpu"] == "torch.bfloat16"
    assert hash_environment(after) != hash_environment(before)


def test_a_module_of_the_users_own_is_in_it_by_its_content(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "schedule_of_mine.py"
    file.write_text("lr = 1\n")
    assert "module.schedule_of_mine" not in environment()
    import schedule_of_mine

    monkeypatch.setitem(sys.modules, "schedule_of_mine", schedule_of_mine)
    before = environment()
    assert before["module.schedule_of_mine"] == hashlib.sha256(b"lr = 1\n").hexdigest()
    file.write_text("lr = 2\n")
    after = environment()
    assert {key for key in after if after[key] != before.get(key)} == {"module.schedule_of_mine"}
    # one that only one of two runs has imported is its declared change
    assert hash_environment(after) == hash_environment(before)


def test_what_is_installed_and_this_package_are_no_modules_of_the_users():
    names = {key.removeprefix("module.").split(".")[0] for key in environment() if "module." in key}
    assert not names & {"torch", "stability", "attention_kernels", "json", "pytest", "_pytest"}
    assert "tests" in names


def test_switches_that_a_trainer_sets_are_told_while_it_trains_alone():
    assert "switch.deterministic_algorithms" not in environment()
    before = training_switches()["deterministic_algorithms"]
    torch.use_deterministic_algorithms(not before)
    try:
        assert training_switches()["deterministic_algorithms"] is not before
    finally:
        torch.use_deterministic_algorithms(before)
