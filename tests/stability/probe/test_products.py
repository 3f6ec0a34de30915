"""Which operators are products: all of ATen's by name, and each spelling of one with its dtypes."""

import re

import pytest
import torch
from torch import nn
from torch._C import _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key
from torch.nn import functional as F

from stability.probe.executed import Executed
from stability.probe.products import COMPOSED, MATMULS, kind_of

PRODUCT = re.compile(
    "mm|matmul|linear|conv|bmm|mv|dot|cdist|bilinear|gemm|_attention|addr|ger|rnn|lstm|gru|einsum"
)

NO_PRODUCTS = {
    *("_convert_indices_from_coo_to_csr", "_convert_indices_from_csr_to_coo"),
    # interpolations between neighbours
    *("upsample_linear1d", "upsample_linear1d_backward", "upsample_bilinear2d"),
    *(
        "upsample_bilinear2d_backward",
        "_upsample_bilinear2d_aa",
        "_upsample_bilinear2d_aa_backward",
    ),
    *("upsample_trilinear3d", "upsample_trilinear3d_backward"),
    # gamma functions, maxima, windows
    *("digamma", "lgamma", "mvlgamma", "polygamma", "igamma", "igammac", "_foreach_lgamma"),
    *("special_digamma", "special_polygamma", "special_multigammaln", "special_gammaln"),
    *("special_gammainc", "special_gammaincc", "_standard_gamma", "_standard_gamma_grad"),
    *("cummax", "cummin", "_cummax_helper", "_cummin_helper", "cummaxmin_backward"),
    *("hamming_window", "_nested_get_jagged_dummy"),
    # weights packed or laid out anew
    *("_convert_weight_to_int4pack", "_convert_weight_to_int4pack_for_cpu"),
    *("mkldnn_reorder_conv2d_weight", "mkldnn_reorder_conv3d_weight", "_wrapped_linear_prepack"),
    *("fbgemm_linear_quantize_weight", "fbgemm_pack_gemm_matrix_fp16"),
    *("fbgemm_pack_quantized_matrix", "_cudnn_rnn_flatten_weight", "_use_cudnn_rnn_flatten_weight"),
    # the elementwise part of a recurrent cell, whose products come by as their own
    *("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward", "_thnn_fused_gru_cell"),
    *("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"),
    *("_thnn_differentiable_lstm_cell_backward", "_thnn_differentiable_gru_cell_backward"),
    # integers behind an opaque handle, without a gradient
    *("quantized_lstm", "quantized_gru", "quantized_lstm_cell", "quantized_gru_cell"),
    *("quantized_rnn_relu_cell", "quantized_rnn_tanh_cell"),
}
"""Operators whose names look like a product's, and why they are none."""


def _aten():
    """Return the names of ATen's operators, each with those of its overloads."""
    names = [name for name in _dispatch_get_all_op_names() if name.startswith("aten::")]
    found = {}
    for name in names:
        found.setdefault(name[6:].partition(".")[0], []).append(name)
    return found


ATEN = _aten()


class _Func:
    """Has the name of an operator, which is all that tells its kind."""

    def __init__(self, name):
        self._name = f"aten::{name}"

    def name(self):
        return self._name


def _unknown(names):
    looks = [n for n in names if PRODUCT.search(n) and n.removesuffix("_") not in NO_PRODUCTS]
    return [name for name in looks if kind_of(_Func(name)) is None]


def test_every_operator_of_aten_that_looks_like_a_product_is_told():
    assert len(ATEN) > 1000
    assert not _unknown(ATEN)
    assert _unknown([*ATEN, "_new_fused_gemm", "mm"]) == ["_new_fused_gemm"]


def test_what_is_said_to_be_no_product_is_an_operator_and_no_product():
    assert not NO_PRODUCTS - ATEN.keys()
    assert not [name for name in NO_PRODUCTS if kind_of(_Func(name))]


def test_what_is_said_to_be_composed_has_no_kernel_of_its_own():
    def is_composed(operator):
        return _dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")

    assert not [op for name in COMPOSED for op in ATEN[name] if not is_composed(op)]
    # and what has one would be missed, were it not in the other table
    assert not all(is_composed(op) for name in MATMULS for op in ATEN[name])


def test_what_is_multiplied_is_a_tensor_in_every_overload():
    wrong = [
        (str(schema), place)
        for name, places in MATMULS.items()
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        for place in places
        if "Tensor" not in str(schema.arguments[place].type) or schema.arguments[place].kwarg_only
    ]
    assert not wrong


X = torch.ones(4, 4, dtype=torch.float64)
ROW = torch.ones(4, dtype=torch.float64)
CUBE = torch.ones(1, 4, 4, dtype=torch.float64)


def _cell(kind):
    return kind(4, 4).double()


SPELLINGS = {
    "matmul": lambda: X @ X,
    "mm(out=)": lambda: torch.mm(X, X, out=torch.empty_like(X)),
    "addmm_": lambda: torch.zeros_like(X).addmm_(X, X),
    "baddbmm_": lambda: torch.zeros_like(CUBE).baddbmm_(CUBE, CUBE),
    "addbmm_": lambda: torch.zeros_like(X).addbmm_(CUBE, CUBE),
    "addmv_": lambda: torch.zeros_like(ROW).addmv_(X, ROW),
    "addr": lambda: torch.addr(torch.zeros_like(X), ROW, ROW),
    "addr_": lambda: torch.zeros_like(X).addr_(ROW, ROW),
    "dot": lambda: torch.dot(ROW, ROW),
    "einsum": lambda: torch.einsum("ij,jk->ik", X, X),
    "tensordot": lambda: torch.tensordot(X, X, 1),
    "inner": lambda: torch.inner(X, X),
    "multi_dot": lambda: torch.linalg.multi_dot([X, X, X]),
    "matrix_power": lambda: torch.linalg.matrix_power(X, 3),
    "bilinear": lambda: F.bilinear(X, X, torch.ones(2, 4, 4, dtype=torch.float64)),
    "cdist": lambda: torch.cdist(X, X),
    "cdist by a product": lambda: torch.cdist(X.repeat(9, 1), X.repeat(9, 1)),
    "sparse": lambda: torch.sparse.mm(X.to_sparse(), X),
    "sparse times sparse": lambda: torch.sparse.mm(X.to_sparse(), X.to_sparse()),
    "conv1d": lambda: F.conv1d(CUBE, torch.ones(4, 4, 1, dtype=torch.float64)),
    "conv_transpose1d": lambda: F.conv_transpose1d(CUBE, torch.ones(4, 4, 1, dtype=torch.float64)),
    "linear": lambda: F.linear(X, X),
    "lstm": lambda: _cell(nn.LSTM)(X),
    "gru": lambda: _cell(nn.GRU)(X),
    "lstm cell": lambda: _cell(nn.LSTMCell)(X),
    "gru cell": lambda: _cell(nn.GRUCell)(X),
    "multi-head": lambda: nn.MultiheadAttention(4, 2, dtype=torch.float64)(X, X, X),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("is_inference", [False, True], ids=["training", "inference mode"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_product_is_seen_however_it_is_written(spelling, is_inference):
    executed = Executed()
    with torch.inference_mode(is_inference), executed:
        SPELLINGS[spelling]()
    assert {row.part for row in executed.rows} == {"linear"}
    assert {dtype for row in executed.rows for dtype in row.operands} == {"float64"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_product_of_compressed_rows_is_seen():
    executed, rows = Executed(), X.to_sparse_csr()
    with executed:
        rows @ X
    assert {row.operands for row in executed.rows} == {("float64", "float64")}


def test_the_backward_of_distances_and_of_a_bilinear_form_is_seen():
    x = X.clone().requires_grad_()
    form = torch.ones(2, 4, 4, dtype=torch.float64)
    executed = Executed()
    with executed:
        (F.bilinear(x, x, form).sum() + torch.cdist(x, 2 * X).sum()).backward()
    backward = {row.operator for row in executed.rows if row.during == "backward"}
    assert backward == {"aten::_trilinear", "aten::_cdist_backward"}


def test_a_product_of_torchs_own_libraries_is_told_by_its_name():
    for name in ("mkldnn::_linear_pointwise", "mkl::_mkl_linear", "onednn::qlinear_pointwise"):
        assert kind_of(_Named(name)) == (name, (0, 1))
    for name in ("onednn::qlinear_prepack", "mkldnn::_reorder_linear_weight", "mine::linear"):
        assert kind_of(_Named(name)) == (name, None)
    assert kind_of(_Named("prims::convert_element_type")) is None


class _Named(_Func):
    def __init__(self, name):
        self._name = name


def test_an_elementwise_product_and_a_sum_are_not_told_as_one():
    # docs/trust.md says that this is beyond a witness; a change here is to be said there
    executed = Executed()
    with executed:
        (X[:, :, None] * X[None]).sum(1)
        torch.outer(ROW, ROW)
    assert not executed.rows
