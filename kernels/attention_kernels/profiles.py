"""Named numerics: values only, each with its source in `kernels/README.md`."""

from dataclasses import fields

from attention_kernels.numerics import (
    BackwardNumerics,
    BaselineNumerics,
    FlashNumerics,
    ForwardNumerics,
)

__all__ = [
    "BASELINE_PROFILES",
    "DEFAULT_BASELINE_PROFILE",
    "DEFAULT_FLASH_PROFILE",
    "PROFILES",
    "fast_path",
]

DEFAULT_FLASH_PROFILE = "fa2"
DEFAULT_BASELINE_PROFILE = "plain"
"""What "flash" and "baseline" mean where no profile is named."""


def _flash_all(name: str) -> FlashNumerics:
    return FlashNumerics(
        forward=ForwardNumerics(**{f.name: name for f in fields(ForwardNumerics)}),
        backward=BackwardNumerics(**{f.name: name for f in fields(BackwardNumerics)}),
    )


_FA2 = FlashNumerics()
# keys from the last block on, and exp2, as FlashAttention-3's code has them
_FA3 = _FA2.with_(exp="exp2", key_order="reversed", block_q=128, block_k=128)
_FP8 = {"operands": "e4m3", "probabilities": "e4m3", "output": "bf16", "ds": "bf16"}

PROFILES: dict[str, FlashNumerics] = {
    "fa1": _FA2.with_(loop_order="key_outer"),
    "fa2": _FA2,
    "fa3": _FA3,
    "fa3_fp8": _FA3.with_(**_FP8, scaling="per_block", incoherent=True),
    "fa3_fp8_per_tensor": _FA3.with_(**_FP8, scaling="per_tensor", incoherent=True),
    "fa3_fp8_coherent": _FA3.with_(**_FP8, scaling="per_block"),
    # FlashAttention-4's own threshold, in log2; with FP8 it uses 0
    "fa4": _FA3.with_(exp="exp2_polynomial", rescale_threshold=8.0),
    # the harshest reading of a re-implementation "at BF16": real kernels keep statistics and
    # accumulator in FP32
    "all_bf16": _flash_all("bf16"),
    # beta 7 is the one that arXiv 2510.04212 plots, of the 2 to 8 it allows
    "stabilised": _FA2.with_(accumulator="bf16", repeated_max_beta=7.0),
    "golden": _flash_all("fp64"),
}

BASELINE_PROFILES: dict[str, BaselineNumerics] = {
    "plain": BaselineNumerics(),
    # the FP16 baseline of FlashAttention-3's table 3 keeps its softmax in FP16
    "fp16_softmax": BaselineNumerics(
        products="fp32", scores="fp32", softmax="fp16", softmax_rounding="each"
    ),
    # and its FP8 baseline has a factor for each tensor, and a softmax in FP16
    "fp8": BaselineNumerics(
        operands="e4m3",
        products="fp32",
        scores="fp32",
        softmax="fp16",
        softmax_rounding="each",
        probabilities="e4m3",
        scaling="per_tensor",
    ),
    "golden": BaselineNumerics(
        operands="fp64",
        products="fp64",
        scores="fp64",
        softmax="fp64",
        probabilities="fp64",
        output="fp64",
    ),
}


def fast_path(head_dim: int) -> FlashNumerics:
    """Return `fa2` in the tile that its kernels are quickest in without spilling registers.

    As FlashAttention-2's own, it shrinks as head_dim grows: past 128, 64 rows of q would spill in
    the kernel of dK and dV on sm_80 and sm_90 (`tests/kernels/triton/test_compile.py`).
    """
    return PROFILES["fa2"].with_(block_q=64 if head_dim <= 128 else 32)
