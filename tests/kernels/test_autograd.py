"""Flash attention is a good citizen of autograd, and the caller's switches do not reach it."""

from contextlib import contextmanager

import pytest
import torch

from attention_kernels import (
    PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.testing import Shape, make_qkv, with_gradients

SHAPE = Shape(2, 4, 2, 33, 65, 40)
ATTENTIONS = {
    "flash": lambda *qkv, **options: flash_attention(*qkv, engine="twin", **options),
    "baseline": baseline_attention,
    "golden": golden_attention,
}


def draw(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    expected = [switch.fp32_precision for switch in switches]
    try:
        yield
        assert [switch.fp32_precision for switch in switches] == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradcheck_passes_through_the_golden_profile(causal):
    shape = Shape(1, 2, 1, 5, 18, 16)
    leaves = [x.requires_grad_() for x in draw(shape, torch.float64)[:3]]

    def attend(q, k, v):
        numerics = PROFILES["golden"].with_(block_q=16, block_k=16)
        return flash_attention(q, k, v, causal=causal, numerics=numerics, engine="twin")

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_autocast_around_forward_and_backward_changes_no_bit(attention, dtype):
    inputs = draw(SHAPE, dtype)
    plain = with_gradients(ATTENTIONS[attention], *inputs, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        under = with_gradients(ATTENTIONS[attention], *inputs, causal=True)
    for name in plain:
        assert torch.equal(plain[name], under[name]), name


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_matmul_precision_changes_no_bit_and_is_given_back(attention):
    inputs = draw(SHAPE, torch.float32)
    plain = with_gradients(ATTENTIONS[attention], *inputs)
    with matmul_precision("medium"):
        under = with_gradients(ATTENTIONS[attention], *inputs)
    for name in plain:
        assert torch.equal(plain[name], under[name]), name


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_strides_change_no_bit(attention):
    inputs = draw(SHAPE, torch.bfloat16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    plain = with_gradients(ATTENTIONS[attention], *inputs)
    under = with_gradients(ATTENTIONS[attention], *strided)
    for name in plain:
        assert torch.equal(plain[name], under[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_inputs_are_left_as_they_were(dtype):
    inputs = draw(SHAPE, dtype)
    before = [x.clone() for x in inputs]
    with_gradients(ATTENTIONS["flash"], *inputs, causal=True)
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["q", "k", "v"])
def test_a_single_input_can_want_its_gradient(wanted):
    *qkv, dout = draw(SHAPE, torch.bfloat16)
    every = with_gradients(ATTENTIONS["flash"], *qkv, dout)
    qkv[wanted].requires_grad_()
    ATTENTIONS["flash"](*qkv).backward(dout)
    assert torch.equal(qkv[wanted].grad, list(every.values())[1 + wanted])


def test_gradients_accumulate_over_two_uses():
    q, k, v, dout = draw(SHAPE, torch.float32)
    once = with_gradients(ATTENTIONS["flash"], q, k, v, dout)
    q.requires_grad_()
    for _ in range(2):
        ATTENTIONS["flash"](q, k, v).backward(dout)
    assert torch.equal(q.grad, 2 * once["dq"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_and_shape_of_the_inputs(dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    results = with_gradients(ATTENTIONS["flash"], q, k, v, dout)
    for name, like in zip(results, (q, q, k, v), strict=True):
        assert (results[name].dtype, results[name].shape) == (dtype, like.shape)


def test_an_fp64_result_is_stored_in_bf16_with_one_rounding():
    q = k = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    values = torch.tensor([1, 1, 2 + 2**-6, 2**-38], dtype=torch.bfloat16)
    v = values.view(1, 1, 4, 1).expand(k.shape)
    out = flash_attention(q, k, v, numerics=PROFILES["golden"], engine="twin")
    # The mean is 1 + 2**-8 + 2**-40; through FP32 it would lose the last term, tie and become 1.
    assert (out == 1 + 2**-7).all()


def test_lse_carries_no_gradient():
    q, k, v, dout = draw(SHAPE, torch.bfloat16)
    q.requires_grad_()
    out, lse = flash_attention(q, k, v, engine="twin", return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
    assert lse.dtype == torch.float32
    out.backward(dout)
    assert q.grad.isfinite().all()


def test_a_second_derivative_is_refused():
    q, k, v, _ = draw(SHAPE, torch.float64)
    q.requires_grad_()
    out = ATTENTIONS["flash"](q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
