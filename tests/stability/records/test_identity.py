"""The identity of a run holds what decides its bits, and tells of each change by name."""

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch

import attention_kernels
from stability.records import identity
from stability.records import numeric_switches as switches_module
from stability.records.identity import (
    HARMLESS,
    VARIABLES,
    WAITING,
    environment,
    environment_outside,
    hash_environment,
    is_compared,
    is_on_record,
)
from stability.records.numeric_switches import numeric_switches, training_switches
from tests.sampling import one_in

ROOT = Path(__file__).parents[3]


def test_it_is_json_and_says_what_decides_the_bits():
    found = environment()
    assert json.loads(json.dumps(found)) == found == environment()
    assert found["package.torch"] == metadata.version("torch")
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert found["simd"] == torch.backends.cpu.get_cpu_capability()
    assert set(found) >= {"python", "platform", "gpu", "cpu_flags", "interop_threads"}
    assert "unknown to this torch" not in found.values()
    assert None not in found.values(), "None is what a run says that has no such entry"


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
            ("model/lightning_module.py", "recorder/trainer_door.py"),
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
    one_in(
        5,
        [
            ("MKL_CBWR", "COMPATIBLE"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("DNNL_MAX_CPU_ISA", "AVX2"),
            ("ATEN_CPU_CAPABILITY", "default"),
            ("NVIDIA_TF32_OVERRIDE", "1"),
            ("TRITON_INTERPRET", "1"),
            ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2"),
            ("LD_PRELOAD", "libother.so"),
            ("LD_LIBRARY_PATH", "/opt/other/lib"),
            ("DISABLE_ADDMM_CUDA_LT", "1"),
            ("CUDA_FORCE_PTX_JIT", "1"),
            ("CUDA_DISABLE_PTX_JIT", "1"),
            ("ROCBLAS_DEFAULT_ATOMICS_MODE", "0"),
            ("HIPBLASLT_TUNING_OVERRIDE_FILE", "tuned.txt"),
            ("MIOPEN_FIND_MODE", "1"),
            ("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE"),
            ("BLIS_ARCH_TYPE", "haswell"),
            ("OPENBLAS_CORETYPE", "Haswell"),
            ("GOMP_CPU_AFFINITY", "0"),
            ("PYTORCH_TUNABLEOP_ENABLED", "1"),
            ("PYTHONHASHSEED", "7"),
            ("TORCHDYNAMO_DISABLE", "1"),
            ("TORCHINDUCTOR_CACHE_DIR", "/data/tuned"),
            ("NVTE_FLASH_ATTN", "0"),
        ],
    ),
)
def test_a_variable_that_math_libraries_read_is_in_it(name, value, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = hash_environment(environment())
    monkeypatch.setenv(name, value)
    assert environment()[f"variable.{name}"] == value
    assert hash_environment(environment()) != before


def test_every_listed_variable_says_how_it_reaches_numerics_and_is_tried_or_like_one():
    for name, why in [*VARIABLES.items(), *HARMLESS.items()]:
        assert len(why.split()) >= 1, name
        assert why.strip() != name, name
    # without a `*` at the end of a word, `OMP` would be each name that begins so
    assert all(re.fullmatch(r"[A-Z0-9_]+(\*[A-Z]*)?\*?", name) for name in VARIABLES)


def test_every_switch_has_a_reason_above_it():
    source = Path(str(switches_module.__file__)).read_text()
    for table in ("_SWITCHES", "_SET_BY_TRAINER"):
        (body,) = re.findall(rf"^{table}: .*?^}}", source, re.MULTILINE | re.DOTALL)
        lines = body.splitlines()[1:-1]
        assert lines[0].lstrip().startswith("#")
        assert all(line.startswith(("    #", '    "', "        ", "    )")) for line in lines)


def test_the_cache_that_torch_chose_itself_is_no_choice(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = environment()
    chosen = os.path.join(tempfile.gettempdir(), "torchinductor_somebody")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    assert environment() == before


@pytest.mark.parametrize("name", HARMLESS)
def test_a_variable_without_effect_is_not(name, monkeypatch):
    before = environment()
    monkeypatch.setenv(name, "another")
    after = environment()
    assert {key for key in before if before[key] != after.get(key)} <= {"waiting"}
    assert before.keys() == after.keys()
    assert hash_environment(after) == hash_environment(before)


def test_how_idle_threads_wait_is_on_record_and_never_compared(monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert environment()["waiting"] == "OMP_WAIT_POLICY=PASSIVE"
    assert not is_compared("waiting")


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

    assert switches_module._told(refuses, torch) == "old and new switches are mixed"


@pytest.mark.slow
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

    # off before it is put there, or the fixture would put it back when the test is over
    del sys.modules["schedule_of_mine"]
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


@contextmanager
def _set(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _called(function, value, before):
    function(value)
    try:
        yield
    finally:
        function(before)


_CUDA = torch.backends.cuda
_REDUCTION = _CUDA.allow_fp16_bf16_reduction_math_sdp
_ORDER = torch._C._get_sdp_priority_order()


@pytest.mark.parametrize(
    ("name", "turned"),
    [
        ("sdpa_math_reduction", lambda: _called(_REDUCTION, True, False)),
        ("sdpa_order", lambda: _called(torch._C._set_sdp_priority_order, _ORDER[::-1], _ORDER)),
        ("cuda_fp16_accumulation", lambda: _set(_CUDA.matmul, "allow_fp16_accumulation", True)),
        ("cuda_linalg", lambda: _set(_CUDA, "preferred_linalg_library", lambda: "magma")),
        ("rocm_attention", lambda: _set(_CUDA, "preferred_rocm_fa_library", lambda: "ck")),
        ("mkldnn_matmul_fp32", lambda: _fp32_of("mkldnn.matmul", "bf16")),
        ("mkldnn_conv_fp32", lambda: _fp32_of("mkldnn.conv", "bf16")),
        ("mkldnn_rnn_fp32", lambda: _fp32_of("mkldnn.rnn", "bf16")),
        ("cudnn_conv_fp32", lambda: _fp32_of("cudnn.conv", "ieee")),
        ("cudnn_rnn_fp32", lambda: _fp32_of("cudnn.rnn", "ieee")),
        ("mkldnn_deterministic", lambda: _mkldnn_deterministic()),
        ("nnpack", lambda: torch.backends.nnpack.flags(enabled=False)),
        ("mha_fastpath", lambda: _called(torch.backends.mha.set_fastpath_enabled, False, True)),
        ("einsum", lambda: _set(torch.backends.opt_einsum, "enabled", "other")),
        ("einsum_strategy", lambda: _set(torch.backends.opt_einsum, "strategy", "optimal")),
        (
            "fill_uninitialized",
            lambda: _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
        ),
        ("rounds_to_nearest", lambda: _rounding(0x800)),
        ("rounds_to_nearest", lambda: _rounding(0x400)),
        ("rounds_to_nearest", lambda: _rounding(0xC00)),
    ],
)
def test_a_switch_that_moves_bits_is_told(name, turned):
    before = numeric_switches()
    with turned():
        after = numeric_switches()
    assert before[name] != after[name]
    assert numeric_switches() == before
    assert json.loads(json.dumps(after)) == after


def test_the_order_of_backends_is_told_as_a_first_call_on_a_gpu_leaves_it(monkeypatch):
    """torch 2.11 puts cuDNN first in a process's first call on an H100 or H200, and not before."""
    settled = [_ORDER[-1], *_ORDER[:-1]]

    def choice(*_):
        torch._C._set_sdp_priority_order(settled)
        return 3

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    assert numeric_switches()["sdpa_order"] == str(_ORDER)  # no GPU is used by this process
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(switches_module, "_GPU", "cpu")
    try:
        assert numeric_switches()["sdpa_order"] == str(settled)
    finally:
        torch._C._set_sdp_priority_order(_ORDER)


def test_an_order_without_a_backend_for_the_question_is_told_too(monkeypatch):
    def choice(*_):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(switches_module, "_GPU", "cpu")
    assert numeric_switches()["sdpa_order"] == str(_ORDER)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_first_call_on_this_gpu_moves_no_switch():
    """In a process of its own, where attention has not been called yet."""
    code = """if 1:
        import torch
        from stability.records.numeric_switches import all_switches
        q = torch.zeros(1, 1, 16, 16, device="cuda", dtype=torch.bfloat16)
        before = all_switches()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert all_switches() == before, (before, all_switches())
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@contextmanager
def _fp32_of(path, precision):
    backend = torch.backends
    for name in path.split("."):
        backend = getattr(backend, name)
    with _set(backend, "fp32_precision", precision):
        yield


@contextmanager
def _mkldnn_deterministic():
    # not `flags`, which would set all that it isn't told as well
    with _called(torch._C._set_mkldnn_deterministic, True, False):
        yield


@contextmanager
def _rounding(mode):
    """Let this thread round in another direction: <fenv.h> of x86."""
    libm = ctypes.CDLL("libm.so.6")
    if libm.fesetround(mode):
        pytest.skip("this processor numbers its rounding modes otherwise")
    try:
        yield
    finally:
        libm.fesetround(0)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("torch._inductor.config", "inductor", "max_autotune"),
        ("torch._dynamo.config", "dynamo", "suppress_errors"),
    ],
)
def test_a_compilers_config_is_told_where_it_is_not_the_default(module, name, value):
    config = __import__(module, fromlist=["config"])
    before = numeric_switches()[name]
    with config.patch(value, True):
        assert f"{value} = True" in numeric_switches()[name].split("; ")
    assert numeric_switches()[name] == before


def test_what_the_trainer_turns_in_a_compilers_config_is_no_difference():
    import torch._inductor.config as config

    before = numeric_switches()["inductor"]
    with config.patch(deterministic=True):
        assert config.deterministic
        assert numeric_switches()["inductor"] == before


@dataclass
class _Recipe:
    margin: int = 0


class _State:
    """TransformerEngine's `FP8GlobalStateManager`, as far as it is asked."""

    enabled = True

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls):
        return _Recipe(margin=3)


@pytest.mark.parametrize("name", switches_module._FP8_STATES)
def test_the_recipe_that_transformer_engine_has_entered_is_told(name, monkeypatch):
    assert numeric_switches()["fp8_transformer_engine"] == "off"
    module = type(sys)(name)
    monkeypatch.setitem(vars(module), "FP8GlobalStateManager", _State)
    monkeypatch.setitem(sys.modules, name, module)
    assert numeric_switches()["fp8_transformer_engine"] == "_Recipe(margin=3)"
    monkeypatch.setattr(_State, "enabled", False)
    assert numeric_switches()["fp8_transformer_engine"] == "off"


def test_a_torch_without_a_switch_says_so(monkeypatch):
    def lacks(torch):
        return torch.backends.no_such_switch

    monkeypatch.setitem(switches_module._SWITCHES, "sdpa_order", lacks)
    assert numeric_switches()["sdpa_order"] == "unknown to this torch"


@pytest.mark.slow
def test_python_without_assertions_is_another_one():
    code = "from stability.records.identity import environment; print(environment()['{}'])"
    asked = code.format("python_optimize")
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-O", "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.stdout.strip(), environment()["python_optimize"]) == ("1", sys.flags.optimize)


def test_an_entry_of_a_later_list_is_not_on_record_and_an_unset_variable_is():
    now = {"switch.new": 1, "variable.MKL_CBWR": "AVX2", "variables_listed": "MKL_* GLIBC_TUNABLES"}
    assert is_on_record("switch.new", now, {})
    assert not is_on_record("switch.new", {"variables_listed": "MKL_*"}, now)
    assert is_on_record("variable.MKL_CBWR", {"variables_listed": "MKL_*"}, now)
    assert not is_on_record("variable.GLIBC_TUNABLES", {"variables_listed": "MKL_*"}, now)
    # an older run says nothing of what was listed; two of them were of one list
    assert not is_on_record("variable.MKL_CBWR", {}, now)
    assert is_on_record("variable.MKL_CBWR", {}, {"variable.MKL_CBWR": "AVX2"})
    assert is_on_record("package.xformers", {}, now)
    assert is_on_record("module.mine", {}, now)


def test_what_lightning_sets_where_it_is_imported_is_compared_no_more():
    assert not is_compared("variable.PYTORCH_NVML_BASED_CUDA_CHECK")
    assert not is_compared("variables_listed")
    assert is_compared("variable.PYTORCH_TUNABLEOP_ENABLED")
    assert environment_outside({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}) == environment_outside({})


def test_the_list_itself_is_no_difference():
    found = environment()
    other = {**found, "variables_listed": "MKL_*"}
    assert hash_environment(found) == hash_environment(other)
