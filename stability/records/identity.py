"""What decides the bits of a run besides its config, in one list, each entry with why.

Two runs are a pair, and a stopped run goes on, only where these are equal (`hash_environment`).
The entries are flat, so that a message can name the one that differs:

- `python`, `platform`, `cpu`, `cpu_flags`, `simd`, `threads`, `gpu`, ...: another machine adds in
  another order, and chooses other kernels;
- `package.NAME`: the version of each imported distribution. One that only one of two runs has
  imported can't have moved the other (`may_be_missing`);
- `switch.NAME`: numeric switches of torch, which any imported module may turn;
- `variable.NAME`: environment variables that math libraries read;
- `package_source`, `kernel_source`: SHA-256 of this package's files that training imports, and of
  the attention library's;
- `module.NAME`: SHA-256 of each other module that lies outside of what is installed: the user's
  own, which are an attention's. One that only one of two runs has imported is its declared change,
  or moves nothing; one that is imported after training began is in the run's witness.

Leaves out what a run really executed, and every decision about it (`analysis.pair_contract`,
`study.run`).
"""

import functools
import hashlib
import json
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attention_kernels

__all__ = [
    "environment",
    "hash_environment",
    "hash_sources",
    "imported_packages",
    "is_module",
    "is_of_process",
    "may_be_missing",
    "numeric_switches",
    "own_modules",
    "training_switches",
]

VARIABLES = (
    "ATEN_",  # ATEN_CPU_CAPABILITY chooses the instructions of torch's own kernels
    "CUBLAS_",
    "CUDNN_",
    "DNNL_",  # the same two of oneDNN: DNNL_MAX_CPU_ISA
    "GOMP_",
    "KMP_",  # Intel's OpenMP: threads, and the order in which they add
    "LIBXSMM_",
    "MKL_",  # MKL_CBWR and MKL_ENABLE_INSTRUCTIONS choose the code of every GEMM
    "NCCL_",  # the algorithm of a reduction is its order
    "NVIDIA_TF32_OVERRIDE",  # TF32 whatever torch's switches say
    "NVTE_",  # TransformerEngine's FP8 recipes and attention backends
    "OMP_",  # threads: another split of a sum is another order
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",  # TRITON_INTERPRET, TRITON_F32_DEFAULT
)
"""Beginnings of the names of environment variables that reach numerics."""

HARMLESS = {
    "CUBLAS_WORKSPACE_CONFIG": "the Trainer sets it for each run, whatever it was",
    "OMP_WAIT_POLICY": "how an idle thread waits, not what it computes",
    "OMP_DISPLAY_ENV": "prints",
    "GOMP_SPINCOUNT": "how long an idle thread spins",
    "KMP_BLOCKTIME": "how long an idle thread spins",
    "KMP_WARNINGS": "prints",
    "MKL_VERBOSE": "prints",
    "DNNL_VERBOSE": "prints",
    "ONEDNN_VERBOSE": "prints",
    "NCCL_DEBUG": "prints",
    "TORCH_HOME": "where downloads lie",
    "TORCH_LOGS": "prints",
    "TORCH_SHOW_CPP_STACKTRACES": "prints",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled code lies",
    "TRITON_CACHE_DIR": "where compiled code lies",
    "PYTORCH_ALLOC_CONF": "where memory comes from",
    "PYTORCH_CUDA_ALLOC_CONF": "where memory comes from",
}
"""Variables of those names that no bit depends on, and why."""

_PACKAGE = Path(__file__).parents[1]
_NOT_IN_TRAINING = ("cli", "report", "tracking")
"""Rooms of this package that only start a run, or show it."""


def environment() -> dict[str, Any]:
    """Return what the bits of a run may depend on besides its config, as flat JSON values.

    To be called where the run trains, once everything that it needs is imported.
    """
    import torch  # heavy, and readers of a manifest need none of it

    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu("model name") or platform.processor(),
        # a virtual machine may hide some of a model's instructions
        "cpu_flags": _hash(_cpu("flags")),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        **_gpu(),
        **{f"package.{name}": version for name, version in imported_packages().items()},
        **{f"switch.{name}": value for name, value in numeric_switches().items()},
        **{f"variable.{name}": value for name, value in _variables().items()},
        **{f"module.{name}": sha256 for name, sha256 in own_modules().items()},
        "kernel_source": hash_sources(Path(str(attention_kernels.__file__)).parent),
        "package_source": hash_sources(_PACKAGE, _NOT_IN_TRAINING),
    }


def hash_environment(environment: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an environment: equal in two runs that may be a pair.

    Packages and modules are left out, since a run may need more of them than its pair.
    """
    kept = {key: value for key, value in environment.items() if not may_be_missing(key)}
    return _hash(json.dumps(kept, sort_keys=True))


def may_be_missing(key: str) -> bool:
    """Whether two runs may differ in that only one of them has this entry."""
    return key.startswith(("package.", "module."))


def is_module(key: str) -> bool:
    """Whether the entry is a module of the user's own."""
    return key.startswith("module.")


def is_of_process(key: str) -> bool:
    """Whether the entry is true of the process that trains alone, which imports the modules."""
    return key.startswith(("switch.", "module."))


def own_modules() -> dict[str, str]:
    """Return the SHA-256 of each imported module that is the user's own, by name.

    Those are all whose file lies outside of this package, of Python and of what is installed there:
    what is installed has a version. A script that is run is called `__main__`.
    """
    not_own = _not_own()
    found: dict[str, str] = {}
    for name in sys.modules.keys() - _known_installed:
        module = sys.modules.get(name)
        # not getattr: a module that imports lazily would answer by importing
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or file.startswith(not_own) or not os.path.isfile(file):
            _known_installed.add(name)
            continue
        # the script that a process of `multiprocessing` was started from has a name of its own
        name = "__main__" if name == "__mp_main__" else name
        found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return dict(sorted(found.items()))


_known_installed: set[str] = set()
"""Names of modules that are not the user's own: thousands, and a run asks several times."""


@functools.cache
def _not_own() -> tuple[str, ...]:
    """Return the folders of Python, of what is installed and of this package, with a slash each."""
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = [sysconfig.get_paths()[name] for name in names]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [str(Path(__file__).parents[1]), *attention_kernels.__path__]
    real = [os.path.realpath(folder) for folder in folders]
    return tuple(sorted({os.path.join(folder, "") for folder in [*folders, *real]}))


def imported_packages() -> dict[str, str]:
    """Return the version of each distribution of which a module is imported, by name."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    found = {name for top in tops for name in _distributions().get(top, ())}
    return {name: _version(name) for name in sorted(found)}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    # a third of a second, once a process; the server of fresh processes has done it for all
    return metadata.packages_distributions()


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


_SWITCHES: dict[str, Callable[[Any], Any]] = {
    "default_dtype": lambda torch: str(torch.get_default_dtype()),
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "cuda_matmul_tf32": lambda torch: torch.backends.cuda.matmul.allow_tf32,
    "cuda_matmul_fp32": lambda torch: _effective(torch, torch.backends.cuda.matmul),
    "cuda_bf16_reduction": lambda torch: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cuda_fp16_reduction": lambda torch: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cudnn_tf32": lambda torch: torch.backends.cudnn.allow_tf32,
    "cudnn": lambda torch: torch.backends.cudnn.enabled,
    "cuda_blas": lambda torch: str(torch.backends.cuda.preferred_blas_library()),
    "mkldnn": lambda torch: torch.backends.mkldnn.enabled,
    "mkldnn_matmul_fp32": lambda torch: _effective(torch, torch.backends.mkldnn.matmul),
    "sdpa_flash": lambda torch: torch.backends.cuda.flash_sdp_enabled(),
    "sdpa_memory_efficient": lambda torch: torch.backends.cuda.mem_efficient_sdp_enabled(),
    "sdpa_math": lambda torch: torch.backends.cuda.math_sdp_enabled(),
    "sdpa_cudnn": lambda torch: torch.backends.cuda.cudnn_sdp_enabled(),
    # autocast of a whole process: an arm of another name would train in its format
    "autocast_cpu": lambda torch: _autocast(torch, "cpu"),
    "autocast_cuda": lambda torch: _autocast(torch, "cuda"),
    # a quarter of the least normal number is 0 where denormals are flushed
    "flush_denormal": lambda torch: bool(torch.tensor(1.2e-38).div(4).eq(0)),
}
"""How torch tells of each numeric switch, by the name that it gets here."""

_SET_BY_TRAINER: dict[str, Callable[[Any], Any]] = {
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "deterministic_warn_only": lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
    "cudnn_deterministic": lambda torch: torch.backends.cudnn.deterministic,
    "cudnn_benchmark": lambda torch: torch.backends.cudnn.benchmark,
}
"""Switches that the Trainer sets for each run anew (`study.assemble.make_trainer`), whatever they
were: they tell something of a run only while it trains (`records.witness`)."""


def numeric_switches() -> dict[str, Any]:
    """Return how each numeric switch of torch stands in this thread, by name."""
    import torch

    return {name: _told(tell, torch) for name, tell in _SWITCHES.items()}


def training_switches() -> dict[str, Any]:
    """Return how the switches stand that a Trainer sets, by name; to be called while it trains."""
    import torch

    return {name: _told(tell, torch) for name, tell in _SET_BY_TRAINER.items()}


def _autocast(torch: Any, device: str) -> str:
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)) if on else "off"


def _effective(torch: Any, backend: Any) -> str:
    """Return the precision of a backend's FP32 products; "none" leaves it to what stands above."""
    told = (backend.fp32_precision, torch.backends.fp32_precision, "ieee")
    return next(precision for precision in told if precision != "none")


def _told(tell: Callable[[Any], Any], torch: Any) -> Any:
    try:
        return tell(torch)
    except AttributeError:  # another version of torch has no such switch
        return "unknown to this torch"
    except RuntimeError:  # torch refuses to tell where its old and its new switches were mixed
        return "old and new switches are mixed"


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and name not in HARMLESS
    }


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
