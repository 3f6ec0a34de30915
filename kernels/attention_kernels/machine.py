"""What this machine is: processor, versions, engines, formats it multiplies itself, switches.

These functions read and change nothing. A benchmark, an experiment and a run write down what they
say, because each of it can change a number or a speed. Which other libraries' attentions run here
is `peers.registry`'s to say.
"""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "EngineStatus",
    "engines",
    "hardware",
    "native_formats",
    "precision_switches",
    "versions",
]


class EngineStatus(NamedTuple):
    """An engine of `flash_attention`, whether it runs on a device, and how or why not."""

    name: str
    available: bool
    how: str


def versions() -> dict[str, str]:
    """Return the versions that figures depend on, by name; "" for what is not there."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "",
        "cudnn": str(cudnn or ""),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def hardware(device: torch.device | str) -> dict[str, Any]:
    """Return the processor of `device`: name, and cores and SIMD or capability and memory."""
    device = torch.device(device)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory_gib": round(gpu.total_memory / 2**30, 1),
        }
    return {
        "name": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


def _cores() -> int:
    """Return how many cores this process may use, which a container can make fewer."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_field(name: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(name)]
    return found[0] if found else ""


def native_formats(device: torch.device | str) -> dict[str, str]:
    """Return the formats whose matrix products the chip computes itself, and by what unit.

    All others are emulated: each value is rounded to the format and computed with in FP32 or FP64.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return _cpu_formats(set((_cpu_field("flags") or _cpu_field("Features")).split()))
    return _gpu_formats(torch.cuda.get_device_capability(device))


def _gpu_formats(capability: tuple[int, int]) -> dict[str, str]:
    found = {"fp64": "CUDA cores", "fp32": "CUDA cores"}
    first = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "e4m3": (8, 9), "e5m2": (8, 9)}
    return found | {name: "tensor cores" for name, since in first.items() if capability >= since}


def _cpu_formats(flags: set[str]) -> dict[str, str]:
    found = {"fp64": "SIMD", "fp32": "SIMD"}
    units = {
        "bf16": {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "bf16": "NEON"},
        "fp16": {"amx_fp16": "AMX", "avx512_fp16": "AVX-512", "asimdhp": "NEON"},
    }
    for name, by_flag in units.items():
        unit = next((unit for flag, unit in by_flag.items() if flag in flags), None)
        if unit:
            found[name] = unit
    return found


def engines(device: torch.device | str) -> list[EngineStatus]:
    """Return the engines of `flash_attention` on `device`."""
    on_cuda = torch.device(device).type == "cuda"
    found = [EngineStatus("twin", True, "PyTorch")]
    if importlib.util.find_spec("triton") is None:
        return [*found, EngineStatus("triton", False, "triton is not installed")]
    how = "compiled" if on_cuda else "interpreted: right, and hundreds of times slower"
    return [*found, EngineStatus("triton", True, how)]


def precision_switches() -> dict[str, str]:
    """Return the process's switches that change what a matrix product is, by torch's name.

    `flash_attention`, `baseline_attention` and `golden_attention` do not follow the FP32 ones;
    peers and the rest of a model do.
    """
    cuda = torch.backends.cuda.matmul
    mkldnn = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "cuda.matmul.fp32_precision": str(cuda.fp32_precision),
        "mkldnn.matmul.fp32_precision": str(mkldnn.fp32_precision),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": str(
            cuda.allow_bf16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": str(
            cuda.allow_fp16_reduced_precision_reduction
        ),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
