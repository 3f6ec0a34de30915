"""The numeric switches of torch: how each stands in this process, by a name and with the reason.

Needs Python 3.9, the standard library and torch alone, any version from 2.1: it is also read in the
process of a training that knows nothing of this package (`recorder.inside`). A switch that a torch
does not have is "unknown to this torch". Leaves out what else decides the bits of a run
(`identity`).
"""

import contextlib
import re
import sys
from typing import Any, Callable, Dict

__all__ = ["all_switches", "numeric_switches", "training_switches"]

_SWITCHES: Dict[str, Callable[[Any], Any]] = {
    # what a tensor is made in where no dtype is named
    "default_dtype": lambda torch: str(torch.get_default_dtype()),
    # "high" and "medium" multiply FP32 as TF32 or BF16; the same by backend and operator below
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "fp32_precision": lambda torch: torch.backends.fp32_precision,
    "cuda_matmul_tf32": lambda torch: torch.backends.cuda.matmul.allow_tf32,
    "cuda_matmul_fp32": lambda torch: _effective(torch, torch.backends.cuda.matmul),
    # partial sums of a split product in BF16 or FP16, or all of one in FP16
    "cuda_bf16_reduction": lambda torch: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cuda_fp16_reduction": lambda torch: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda_bf16_split": lambda torch: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
    ),
    "cuda_fp16_split": lambda torch: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k
    ),
    "cuda_fp16_accumulation": lambda torch: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cudnn_tf32": lambda torch: torch.backends.cudnn.allow_tf32,
    "cudnn_conv_fp32": lambda torch: torch.backends.cudnn.conv.fp32_precision,
    "cudnn_rnn_fp32": lambda torch: torch.backends.cudnn.rnn.fp32_precision,
    # whether cuDNN, oneDNN, NNPACK or torch's own loops compute at all
    "cudnn": lambda torch: torch.backends.cudnn.enabled,
    "mkldnn": lambda torch: torch.backends.mkldnn.enabled,
    "nnpack": lambda torch: torch._C._get_nnpack_enabled(),
    # which library multiplies, decomposes, and attends
    "cuda_blas": lambda torch: str(torch.backends.cuda.preferred_blas_library()),
    "cuda_linalg": lambda torch: str(torch.backends.cuda.preferred_linalg_library()),
    "rocm_attention": lambda torch: str(torch.backends.cuda.preferred_rocm_fa_library()),
    "mkldnn_deterministic": lambda torch: torch.backends.mkldnn.deterministic,
    "mkldnn_matmul_fp32": lambda torch: _effective(torch, torch.backends.mkldnn.matmul),
    "mkldnn_conv_fp32": lambda torch: _effective(torch, torch.backends.mkldnn.conv),
    "mkldnn_rnn_fp32": lambda torch: _effective(torch, torch.backends.mkldnn.rnn),
    # which backends attention may take, in which order they are asked, and whether the math one
    # rounds between its products in BF16 and FP16, where it otherwise computes in FP32
    "sdpa_flash": lambda torch: torch.backends.cuda.flash_sdp_enabled(),
    "sdpa_memory_efficient": lambda torch: torch.backends.cuda.mem_efficient_sdp_enabled(),
    "sdpa_math": lambda torch: torch.backends.cuda.math_sdp_enabled(),
    "sdpa_cudnn": lambda torch: torch.backends.cuda.cudnn_sdp_enabled(),
    "sdpa_order": lambda torch: _sdpa_order(torch),
    "sdpa_math_reduction": lambda torch: torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    # a fused encoder layer in inference, which held-out text is
    "mha_fastpath": lambda torch: torch.backends.mha.get_fastpath_enabled(),
    # the order in which an einsum of several operands multiplies them
    "einsum": lambda torch: torch.backends.opt_einsum.enabled,
    "einsum_strategy": lambda torch: str(torch.backends.opt_einsum.strategy),
    # what torch.empty holds under deterministic algorithms: NaN, or what lay there
    "fill_uninitialized": lambda torch: torch.utils.deterministic.fill_uninitialized_memory,
    # fusion, autotuning, what is compiled: what differs from torch's default
    "inductor": lambda torch: _changed("torch._inductor.config"),
    "dynamo": lambda torch: _changed("torch._dynamo.config"),
    "functorch": lambda torch: _changed("torch._functorch.config"),
    # autocast of a whole process: an arm of another name would train in its format
    "autocast_cpu": lambda torch: _autocast(torch, "cpu"),
    "autocast_cuda": lambda torch: _autocast(torch, "cuda"),
    # the recipe of TransformerEngine's autocast, where one is entered for the whole process
    "fp8_transformer_engine": lambda torch: _fp8_recipe(),
    # a quarter of the least normal number is 0 where denormals are flushed
    "flush_denormal": lambda torch: bool(torch.tensor(1.2e-38).div(4).eq(0)),
    # rounded to nearest unless a library has told the processor otherwise
    "rounds_to_nearest": lambda torch: _rounds_to_nearest(),
}
"""How torch tells of each numeric switch, by the name that it gets here, and above it why."""

_SET_BY_TRAINER: Dict[str, Callable[[Any], Any]] = {
    # operators that add in the order of arrival are replaced, or refused, or only warned of
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "deterministic_warn_only": lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
    "cudnn_deterministic": lambda torch: torch.backends.cudnn.deterministic,
    # the fastest of several algorithms is another one from run to run
    "cudnn_benchmark": lambda torch: torch.backends.cudnn.benchmark,
}
"""Switches that the Trainer sets for each run anew (`study.assemble.make_trainer`), whatever they
were: they tell something of a run only while it trains (`records.witness`)."""


def numeric_switches() -> Dict[str, Any]:
    """Return how each numeric switch of torch stands in this thread, by name."""
    import torch

    return {name: _told(tell, torch) for name, tell in _SWITCHES.items()}


def training_switches() -> Dict[str, Any]:
    """Return how the switches stand that a Trainer sets, by name; to be called while it trains."""
    import torch

    return {name: _told(tell, torch) for name, tell in _SET_BY_TRAINER.items()}


def all_switches() -> Dict[str, Any]:
    """Return how all of them stand, by name; to be called while a training runs."""
    return {**numeric_switches(), **training_switches()}


def _autocast(torch: Any, device: str) -> str:
    if hasattr(torch, "get_autocast_dtype"):
        on = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)) if on else "off"
    # torch 2.3 and older have a function for each kind of device
    kinds = {"cpu": ("is_autocast_cpu_enabled", "get_autocast_cpu_dtype")}
    is_on, dtype = kinds.get(device, ("is_autocast_enabled", "get_autocast_gpu_dtype"))
    return str(getattr(torch, dtype)()) if getattr(torch, is_on)() else "off"


_GPU = "cuda"


def _sdpa_order(torch: Any) -> str:
    """Return the order in which attention's backends are asked, once torch has settled it.

    On some GPUs (9.0 and 10.0, with a cuDNN that torch prefers there) it puts cuDNN first when
    attention is first called in a process: a training would seem to have changed its order. Asking
    for the backend of a call settles it as the call would, and computes nothing. An order that was
    set before any call is overwritten by torch at the first one, asked or called.
    """
    if torch.cuda.is_initialized():
        # no memory left; or no backend may take this one, and the order is settled all the same
        with contextlib.suppress(RuntimeError):
            q = torch.empty((1, 1, 8, 8), dtype=torch.float16, device=_GPU)
            torch._fused_sdp_choice(q, q, q)
    return str(torch._C._get_sdp_priority_order())


def _effective(torch: Any, backend: Any) -> str:
    """Return the precision of a backend's FP32 products; "none" leaves it to what stands above."""
    told = (backend.fp32_precision, torch.backends.fp32_precision, "ieee")
    return next(precision for precision in told if precision != "none")


_FOLLOWS_THE_TRAINER = ("torch._inductor.config", "deterministic")
"""Set together with the deterministic algorithms, which the Trainer does for each run."""


def _changed(module: str) -> str:
    """Return what of a compiler's config is not torch's default; "" if it is not imported."""
    config = sys.modules.get(module)
    if config is None:
        return ""
    # not `codegen_config`, which lists what was set once and is the default again
    defaults = getattr(config, "_default", None)
    if defaults is not None:  # torch 2.5 and older hold the values themselves
        values = config._config
    else:
        values = config.get_config_copy()
        entries = {name: each for name, each in config._config.items() if not each.alias}
        defaults = {name: each.default for name, each in entries.items()}
    others = [
        f"{name} = {values[name]!r}"
        for name in sorted(values.keys() & defaults.keys())
        if values[name] != defaults[name] and (module, name) != _FOLLOWS_THE_TRAINER
    ]
    return _without_addresses("; ".join(others))


def _without_addresses(text: str) -> str:
    """Return what `repr` says of objects without where they lie, another place each time."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


_FP8_STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
"""Where TransformerEngine keeps the recipe that is entered, in its newer and its older versions."""


def _fp8_recipe() -> str:
    states = (getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in _FP8_STATES)
    state = next((each for each in states if each), None)
    if state is None or not state.is_fp8_enabled():
        return "off"
    return _without_addresses(repr(state.get_fp8_recipe()))


def _rounds_to_nearest() -> bool:
    """Whether what is far below the last place of 1 leaves it as it is, in each direction."""
    one = float(len("1"))  # no constant, which would have been added up when this was compiled
    small = one * 2.0**-55
    return one + small == one and one - small == one and -one - small == -one


def _told(tell: Callable[[Any], Any], torch: Any) -> Any:
    try:
        return tell(torch)
    except (AttributeError, AssertionError):  # another version of torch has no such switch
        return "unknown to this torch"
    except RuntimeError:  # torch refuses to tell where its old and its new switches were mixed
        return "old and new switches are mixed"
