"""Which operators multiply matrices or attend, and which of their arguments they multiply.

The table names what reaches a dispatch mode. Most of what is written in Python (`einsum`, `conv2d`,
`lstm`) is composed of these before, but not in inference mode, where it arrives whole: `COMPOSED`.
In-place forms and those with `out=` have the same arguments and the same name.

Leaves out products that are written as an elementwise one and a sum (`torch.outer` and
`linalg.vecdot` are such), since no operator says that they belong together, and what a matrix
function (`linalg.solve`, `matrix_exp`, `householder_product`) multiplies inside. Signatures:
aten/src/ATen/native/native_functions.yaml.

Loaded in the processes of recorded trainings as well (`recorder.inside`), so on Python 3.9.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Optional, Tuple

__all__ = ["COMPOSED", "FUSED", "MATMULS", "NOT_OF_INTEREST", "Kind", "kind_of", "name_of"]

Kind = Tuple[str, Optional[Tuple[int, ...]]]
"""An operator's name and the places of what it multiplies; None for an attention or a library's."""

_TWO, _THREE = (0, 1), (0, 1, 2)

MATMULS: Dict[str, Tuple[int, ...]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "mkldnn_linear"), _TWO),
    # the first argument is added to the product
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "_addmm_activation"), (1, 2)),
    **dict.fromkeys(("linear_backward", "matmul_backward", "mkldnn_linear_backward"), _THREE),
    "mkldnn_linear_backward_input": (1, 2),
    "mkldnn_linear_backward_weights": _TWO,
    # FP8, integers, and weights that are packed into them
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm"), _TWO),
    **dict.fromkeys(
        ("_scaled_grouped_mm_v2", "_foreach_mm", "_int_mm", "_weight_int8pack_mm"), _TWO
    ),
    **dict.fromkeys(("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"), _TWO),
    **dict.fromkeys(("_weight_int4pack_mm_with_scales_and_zeros", "_mixed_dtypes_linear"), _TWO),
    "_dyn_quant_matmul_4bit": _TWO,
    # sparse operands
    **dict.fromkeys(("hspmm", "_sparse_sparse_matmul", "_sparse_mm_reduce_impl"), _TWO),
    **dict.fromkeys(("_cslt_sparse_mm", "_cslt_sparse_mm_search"), _TWO),
    **dict.fromkeys(("sspaddmm", "_sparse_addmm", "sparse_sampled_addmm"), (1, 2)),
    "_sparse_mm_reduce_impl_backward": _THREE,
    "_sparse_semi_structured_linear": _TWO,
    "_sparse_semi_structured_mm": (0, 2),
    "_sparse_semi_structured_addmm": (1, 3),
    # convolutions; the backward ones take two tensors and the weight
    **dict.fromkeys(("convolution", "convolution_overrideable", "_convolution", "conv_tbc"), _TWO),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d", "mkldnn_convolution"), _TWO),
    **dict.fromkeys(("_nnpack_spatial_convolution", "_slow_conv2d_forward"), _TWO),
    **dict.fromkeys(("slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d"), _TWO),
    **dict.fromkeys(("slow_conv_transpose2d", "slow_conv_transpose3d"), _TWO),
    **dict.fromkeys(("cudnn_convolution", "cudnn_convolution_transpose"), _TWO),
    **dict.fromkeys(("cudnn_convolution_relu", "cudnn_convolution_add_relu"), _TWO),
    **dict.fromkeys(("miopen_convolution", "miopen_convolution_transpose"), _TWO),
    **dict.fromkeys(("miopen_convolution_relu", "miopen_convolution_add_relu"), _TWO),
    **dict.fromkeys(("miopen_depthwise_convolution", "_mps_convolution"), _TWO),
    "_mps_convolution_transpose": _TWO,
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _THREE),
    **dict.fromkeys(("_slow_conv2d_backward", "mps_convolution_backward"), _THREE),
    "mps_convolution_transpose_backward": _THREE,
    # distances by a product (x - y)^2 = x^2 - 2 x y + y^2, and three factors at once
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), _TWO),
    "_cdist_backward": _THREE,
    "_trilinear": _THREE,
    "_compute_linear_combination": _TWO,
    # recurrent layers as a whole: input, weights, hidden state
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), (0, 1, 4)),
    "miopen_rnn": (0, 1, 3),
    "miopen_rnn_backward": (0, 1, 4),
    "_lstm_mps": _THREE,
    "lstm_mps_backward": (5, 6, 7),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), (0, 1, 2, 5)),
    # q, k and v with the weights that project them, and the one that projects out
    **dict.fromkeys(
        ("_native_multi_head_attention", "_triton_multi_head_attention"), (0, 1, 2, 5, 7)
    ),
    "_transformer_encoder_layer_fwd": (0, 3, 5, 12, 14),
}
"""The operators of ATen that multiply matrices, and which of their arguments they multiply."""

FUSED = (
    "_scaled_dot_product_",
    "_flash_attention_",
    "_efficient_attention_",
    "_cudnn_attention_",
    "_triton_scaled_dot_attention",
)
"""How the names of ATen's fused attentions begin."""

COMPOSED: Dict[str, Tuple[int, ...]] = {
    **dict.fromkeys(("matmul", "linalg_matmul", "inner", "tensordot", "_sparse_mm", "smm"), _TWO),
    **dict.fromkeys(("cdist", "ger", "outer", "linalg_vecdot"), _TWO),
    **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), (0,)),
    **dict.fromkeys(("matrix_power", "linalg_matrix_power"), (0,)),
    "bilinear": _THREE,
    "einsum": (1,),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "_convolution_mode", "thnn_conv2d"), _TWO),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _TWO),
    "slow_conv3d": _TWO,
    "conv_tbc_backward": _THREE,
    "_convolution_double_backward": (3, 4, 5),
    # of the layers as a whole some forms have the lengths of packed sequences second
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (0, 1, 2, 3)),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), (0, 1, 2, 3)),
    **dict.fromkeys(("fbgemm_linear_int8_weight", "fbgemm_linear_fp16_weight"), _TWO),
    "fbgemm_linear_int8_weight_fp32_activation": _TWO,
    "fbgemm_linear_fp16_weight_fp32_activation": _TWO,
    "_wrapped_quantized_linear_prepacked": (0, 3),
}
"""Products that are composed of those above before dispatch, but for those in inference mode."""

NOT_OF_INTEREST = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp")
"""Namespaces whose other operators are neither products nor attentions; any other namespace is a
library's own, whose operators are recorded as they were called."""

_TORCHS_OWN = (
    *("inductor", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked", "quantized"),
    *("_quantized", "sparse", "symm_mem"),
)
"""Other namespaces of torch's, whose products are told by name."""

_IS_PRODUCT = re.compile(r"linear|conv|matmul|gemm|(?<!sy)mm")
_WHOLE_ATTENTION = "scaled_dot_product_attention"  # so it arrives in inference mode alone
_PACKS = re.compile(r"pack(_|$)|reorder|weight$")

_kinds: Dict[Any, Optional[Kind]] = {}


def kind_of(func: Any) -> Optional[Kind]:
    """Return what an operator is to a witness, or None if it is nothing to it."""
    try:
        return _kinds[func]
    except KeyError:
        _kinds[func] = found = _find_kind(name_of(func))
        return found


def name_of(func: Any) -> str:
    """Return an operator's name with its namespace and without its overload, e.g. `aten::mm`."""
    return func._schema.name if hasattr(func, "_schema") else str(func.name())


def _find_kind(full_name: str) -> Optional[Kind]:
    namespace, _, name = full_name.rpartition("::")
    if namespace == "aten":
        return _find_aten(full_name, name)
    if namespace in _TORCHS_OWN and _IS_PRODUCT.search(name) and not _PACKS.search(name):
        return full_name, _TWO
    return None if namespace in NOT_OF_INTEREST else (full_name, None)


def _find_aten(full_name: str, name: str) -> Optional[Kind]:
    plain = name if name in MATMULS or name in COMPOSED else name.removesuffix("_")
    places = MATMULS.get(plain, COMPOSED.get(plain))
    if places is not None:
        return full_name, places
    # SDPA's math path has no operator of its own: this softmax is called nowhere else
    is_attention = name.startswith(FUSED) or name in ("_safe_softmax", _WHOLE_ATTENTION)
    return (full_name, None) if is_attention else None
