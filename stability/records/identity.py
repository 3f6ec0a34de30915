"""What decides the bits of a run besides its config, in one list, each entry with why.

Two runs are a pair, and a stopped run goes on, only where these are equal (`hash_environment`).
The entries are flat, so that a message can name the one that differs:

- `python`, `platform`, `cpu`, `cpu_flags`, `simd`, `threads`, `gpu`, ...: another machine adds in
  another order, and chooses other kernels;
- `package.NAME`: the version of each imported distribution. One that only one of two runs has
  imported can't have moved the other (`may_be_missing`);
- `switch.NAME`: numeric switches of torch, which any imported module may turn;
- `variable.NAME`: environment variables that math libraries read. `variables_listed` says which
  would be here, so that one that is not set is told from one that an older list did not have;
- `waiting`: how idle threads wait, which decides no bit and is never compared;
- `package_source`, `kernel_source`: SHA-256 of this package's files that training imports, and of
  the attention library's;
- `module.NAME`: SHA-256 of each other source that was imported or executed and that no version
  names (`module_sources`): the user's own, which are an attention's. One that only one of two runs
  has imported is its declared change, or moves nothing; one that is imported after training began
  is in the run's witness.

An entry that one of two runs does not have on record proves nothing (`is_on_record`). Leaves out
what a run really executed, and every decision about it (`analysis.pair_contract`, `study.run`).
"""

import fnmatch
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attention_kernels
from stability.records.distributions import imported_packages
from stability.records.module_sources import own_modules
from stability.records.numeric_switches import numeric_switches

__all__ = [
    "VARIABLES_LISTED",
    "WAITING",
    "decides_no_bit",
    "environment",
    "environment_outside",
    "hash_environment",
    "hash_sources",
    "is_compared",
    "is_module",
    "is_of_process",
    "is_on_record",
    "may_be_missing",
]

VARIABLES = {
    "ATEN_*": "ATEN_CPU_CAPABILITY chooses the instructions of torch's own kernels",
    "BLIS_*": "threads and the architecture of BLIS, numpy's or torch's BLAS in some builds",
    "CUBLASLT_*": "which algorithms cuBLASLt may take, and how much memory for them",
    "CUBLAS_*": "CUBLAS_EMULATE_SINGLE_PRECISION computes FP32 products from BF16 ones",
    "CUDA_*JIT*": "kernels compiled anew by the driver (CUDA_FORCE_PTX_JIT) are other machine code",
    "CUDNN_*": "which of cuDNN's engines are tried",
    "DISABLE_ADDMM_*": "DISABLE_ADDMM_CUDA_LT: the bias of a linear layer is added apart",
    "DNNL_*": "oneDNN by its older name: DNNL_MAX_CPU_ISA chooses the code of every product",
    "FLASH_ATTENTION_*": "flash-attn's backends, e.g. FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "GLIBC_TUNABLES": "masks CPU features: another exp, log and sin of libm, other last bits",
    "GOMP_*": "GNU OpenMP: which cores, and so how many threads, share a sum",
    "GOTO_NUM_THREADS": "OpenBLAS by its older name: another number of threads splits a sum anew",
    "HIPBLASLT_*": "HIPBLASLT_TUNING_OVERRIDE_FILE says which algorithms are taken",
    "HSA_OVERRIDE_GFX_VERSION": "ROCm takes the kernels of another GPU",
    "KMP_*": "Intel's OpenMP: threads, and KMP_DETERMINISTIC_REDUCTION the order of their sum",
    "LD_LIBRARY_PATH": "which file a library's name means: another BLAS, libm or CUDA library",
    "LD_PRELOAD": "a library that takes the place of any function",
    "LIBXSMM_*": "LIBXSMM_TARGET chooses the instructions of small products",
    "MIOPEN_*": "which of MIOpen's algorithms are tried, and where it keeps what it found fastest",
    "MKL_*": "MKL_CBWR and MKL_ENABLE_INSTRUCTIONS choose the code of every GEMM",
    "NCCL_*": "the algorithm of a reduction is its order",
    "NVIDIA_TF32_OVERRIDE": "TF32 whatever torch's switches say",
    "NVTE_*": "TransformerEngine's FP8 recipes and attention backends",
    "OMP_*": "threads: another split of a sum is another order",
    "ONEDNN_*": "ONEDNN_MAX_CPU_ISA and ONEDNN_DEFAULT_FPMATH_MODE: code and precision of products",
    "OPENBLAS_*": "OPENBLAS_CORETYPE chooses the kernels, OPENBLAS_NUM_THREADS the split",
    "PYTHONHASHSEED": "the order of sets, which may be the order of layers or of sums",
    "PYTORCH_*": "PYTORCH_TUNABLEOP_ENABLED takes the GEMM that was measured to be fastest",
    "ROCBLAS_*": "ROCBLAS_DEFAULT_ATOMICS_MODE: sums in the order of arrival",
    "TORCHAO_*": "TORCHAO_AUTOTUNER_ENABLE takes the kernels that were measured to be fastest",
    "TORCHDYNAMO_*": "what is compiled, and what stays eager and is rounded between operators",
    "TORCHINDUCTOR_*": "fusion, autotuning, and TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCH_*": "TORCH_BLAS_PREFER_HIPBLASLT, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and others",
    "TRITON_*": "TRITON_INTERPRET, TRITON_F32_DEFAULT",
    "XFORMERS_*": "which of xFormers' attentions are taken",
}
"""Names of environment variables that reach numerics, as patterns, and how."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how an idle thread waits: on record as `waiting`, and never compared."""

HARMLESS = {
    "CUBLAS_WORKSPACE_CONFIG": "the Trainer sets it for each run, whatever it was",
    **dict.fromkeys(WAITING, "how an idle thread waits, not what it computes"),
    "OMP_DISPLAY_ENV": "prints",
    "KMP_WARNINGS": "prints",
    "MKL_VERBOSE": "prints",
    "DNNL_VERBOSE": "prints",
    "ONEDNN_VERBOSE": "prints",
    "NCCL_DEBUG": "prints",
    "TORCH_HOME": "where downloads lie",
    "TORCH_LOGS": "prints",
    "TORCH_SHOW_CPP_STACKTRACES": "prints",
    "TRITON_CACHE_DIR": "where compiled code lies; which was fastest is kept there only where "
    "TRITON_CACHE_AUTOTUNING says so, which is listed",
    "PYTORCH_ALLOC_CONF": "where memory comes from",
    "PYTORCH_CUDA_ALLOC_CONF": "where memory comes from",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "how GPUs are counted; Lightning sets it when it is imported",
}
"""Variables of those names that no bit depends on, and why."""

VARIABLES_LISTED = re.compile("|".join(map(fnmatch.translate, VARIABLES)))

_PACKAGE = Path(__file__).parents[1]
_NOT_IN_TRAINING = ("cli", "execute", "report", "tracking")
"""Rooms of this package that only start a run, or show it."""


def environment() -> dict[str, Any]:
    """Return what the bits of a run may depend on besides its config, as flat JSON values.

    To be called where the run trains, once everything that it needs is imported.
    """
    import torch  # heavy, and readers of a manifest need none of it

    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        # -O drops assert statements, whatever they call
        "python_optimize": sys.flags.optimize,
        "platform": f"{platform.system()} {platform.machine()}",
        **environment_outside(os.environ),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        **_gpu(),
        **{f"package.{name}": version for name, version in imported_packages().items()},
        **{f"switch.{name}": value for name, value in numeric_switches().items()},
        **{f"module.{name}": sha256 for name, sha256 in own_modules().items()},
        "kernel_source": hash_sources(Path(str(attention_kernels.__file__)).parent),
        "package_source": hash_sources(_PACKAGE, _NOT_IN_TRAINING),
    }


def environment_outside(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what can be told of a process from outside, given its variables: those, and the CPU.

    The entries of `environment` that need nothing of the process itself.
    """
    return {
        "cpu": _cpu("model name") or platform.processor(),
        # a virtual machine may hide some of a model's instructions
        "cpu_flags": _hash(_cpu("flags")),
        **{f"variable.{name}": value for name, value in _listed(variables).items()},
        "variables_listed": " ".join(VARIABLES),
        "waiting": " ".join(f"{name}={variables[name]}" for name in WAITING if name in variables),
    }


def hash_environment(environment: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an environment: equal in two runs that may be a pair.

    Packages and modules are left out, since a run may need more of them than its pair, and so is
    what decides no bit.
    """
    left_out = (may_be_missing, decides_no_bit)
    kept = {k: v for k, v in environment.items() if not any(test(k) for test in left_out)}
    return _hash(json.dumps(kept, sort_keys=True))


def may_be_missing(key: str) -> bool:
    """Whether two runs may differ in that only one of them has this entry."""
    return key.startswith(("package.", "module.", "code.", "library."))


def decides_no_bit(key: str) -> bool:
    """Whether the entry says what would be on record, or how threads wait: nothing of the bits."""
    return key in ("variables_listed", "waiting")


def is_on_record(key: str, environment: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `environment` tells of an entry that it or the `other` one has.

    A run from before an entry was listed says nothing of it. A variable that was listed and is
    not there was not set; of two environments by one list both know the same names.
    """
    if key in environment:
        return True
    if not key.startswith("variable."):
        return may_be_missing(key)
    listed, by_other = (each.get("variables_listed") for each in (environment, other))
    name, patterns = key.removeprefix("variable."), str(listed or "").split()
    return listed == by_other or any(fnmatch.fnmatchcase(name, each) for each in patterns)


def is_compared(key: str) -> bool:
    """Whether an entry says something of the bits; older versions wrote down more than that."""
    return not decides_no_bit(key) and key != "variable.PYTORCH_NVML_BASED_CUDA_CHECK"


def is_module(key: str) -> bool:
    """Whether the entry is a module of the user's own."""
    return key.startswith("module.")


def recorded_modules(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of the user's own modules in an environment, by the module's name."""
    return {key.partition(".")[2]: str(environment[key]) for key in environment if is_module(key)}


def is_of_process(key: str) -> bool:
    """Whether the entry is true of the process that trains alone, which imports the modules."""
    return key.startswith(("switch.", "module."))


def _listed(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES_LISTED.match(name) and name not in HARMLESS and not _is_default(name, value)
    }


def _is_default(name: str, value: str) -> bool:
    """Whether torch itself has set a variable while it compiled, to what it takes without it."""
    folder = os.path.join(tempfile.gettempdir(), "torchinductor_")
    return name == "TORCHINDUCTOR_CACHE_DIR" and value.startswith(folder)


def _gpu() -> dict[str, Any]:
    """Return the GPU and the libraries that compute on it; the name alone, "", without one."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": ""}
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
    }


def _cpu(what: str) -> str:
    """Return a line of the first processor; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(what))
    return next(found, "")


def hash_sources(folder: Path, less: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of the names and texts of a package's files, less some of its folders."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] not in less:
            digest.update(f"{name.as_posix()}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
