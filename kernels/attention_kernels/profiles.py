"""Named numerics: values only, each with its source in `kernels/README.md`."""

from dataclasses import fields

from attention_kernels.numerics import (
    BackwardNumerics,
    BaselineNumerics,
    FlashNumerics,
    ForwardNumerics,
)
from attention_kernels.points import UNROUNDED

__all__ = [
    "BASELINE_PROFILES",
    "DEFAULT_BASELINE_PROFILE",
    "DEFAULT_FLASH_PROFILE",
    "PROFILES",
]

DEFAULT_FLASH_PROFILE = "fa2"
DEFAULT_BASELINE_PROFILE = "plain"
"""What "flash" and "baseline" mean where no profile is named."""


def _every_point(name: str, *, each_operation: bool = False) -> FlashNumerics:
    """Return numerics that round to one format; with `each_operation` in between as well."""
    points = (*fields(ForwardNumerics), *fields(BackwardNumerics))
    chosen = [f.name for f in points if each_operation or f.default != UNROUNDED]
    return FlashNumerics().with_(**dict.fromkeys(chosen, name))


# exp2 of one fused multiply-add of the unscaled score, as the code of FlashAttention-2 and 3 has it
_FA2 = FlashNumerics().with_(exp="exp2_folded")
# and keys from the last block on
_FA3 = _FA2.with_(key_order="reversed", block_q=128, block_k=128)
_FP8 = {"operands": "e4m3", "probabilities": "e4m3", "output": "bf16", "ds": "bf16"}
# the code published with arXiv 2510.04212: PyTorch operations on BF16 tensors
_PEER = _every_point("bf16", each_operation=True).with_(gradient_scale="probabilities")

PROFILES: dict[str, FlashNumerics] = {
    "fa1": _FA2.with_(loop_order="key_outer"),
    "fa2": _FA2,
    "fa3": _FA3,
    "fa3_fp8": _FA3.with_(**_FP8, scaling="per_block", incoherent=True),
    "fa3_fp8_per_tensor": _FA3.with_(**_FP8, scaling="per_tensor", incoherent=True),
    "fa3_fp8_coherent": _FA3.with_(**_FP8, scaling="per_block"),
    # FlashAttention-4's own threshold, in log2; with FP8 it uses 0
    "fa4": _FA3.with_(exp="exp2_polynomial_folded", rescale_threshold=8.0),
    # a re-implementation "at BF16", each step of the recurrence rounded once: real kernels keep
    # statistics and accumulator in FP32
    "all_bf16": _every_point("bf16"),
    # and the harshest reading of it, each operation of a step rounded
    "peer_2510_04212": _PEER,
    # its cure as that code has it; the paper plots another beta, and scores of exactly the maximum
    "peer_2510_04212_stabilised": _PEER.with_(
        repeated_max_beta=2.0, repeated_max_tolerance=1e-3, repeated_max_rule="published"
    ),
    # beta 7 is the one that arXiv 2510.04212 plots, of the 2 to 8 it allows. P v alone is in BF16
    # here: the bias of tied maxima, 0.25 ULP, is gone. With everything in BF16 the same beta leaves
    # 0.05 ULP, and on rows with 27 tied keys it can turn the sign: README, "What beta cures".
    "stabilised": FlashNumerics().with_(accumulator="bf16", repeated_max_beta=7.0),
    "golden": _every_point("fp64"),
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
