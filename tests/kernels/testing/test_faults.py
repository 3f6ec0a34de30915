"""Planted faults are wrong where they say, by as much as they say, and nowhere else."""

import pytest
import torch

from attention_kernels import flash_attention, golden_attention
from attention_kernels.testing import injected_bias, make_packed, scale_off, skip_last_key


def packed():
    generator = torch.Generator().manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    return make_packed((3, 5), (9, 5), **sizes, generator=generator)


def test_the_skipped_key_is_missed_by_the_last_query_alone():
    q, k, v, mask = packed()
    wrong, right = skip_last_key(flash_attention)(q, k, v, **mask), flash_attention(q, k, v, **mask)
    apart = (wrong - right).abs().amax(dim=(1, 2)) > 1e-3
    assert apart.tolist() == [False, False, True, False, False, False, False, True]
    starts = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 1], [0, 8])]
    without = golden_attention(q[2:3], k[:8], v[:8], cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    torch.testing.assert_close(wrong[2:3], without.float())


def test_the_scale_is_one_per_cent_too_large():
    q, k, v, mask = packed()
    torch.testing.assert_close(
        scale_off(flash_attention)(q, k, v, **mask),
        flash_attention(1.01 * q, k, v, **mask),
        atol=1e-6,
        rtol=1e-5,
    )


def test_the_skipped_key_is_the_last_of_unpacked_keys_as_well():
    q, k, v = (torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(0)),) * 3
    wrong, right = (
        skip_last_key(flash_attention)(q, k, v),
        flash_attention(q, k[:, :, :4], v[:, :, :4]),
    )
    torch.testing.assert_close(wrong, right)


def _qkv(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 128, 32, generator=generator).to(dtype) for _ in range(3)]


def _ulps(attention, qkv):
    """Errors in ULPs, without the first query: it copies a value, and nothing is rounded."""
    golden = golden_attention(*qkv, causal=True)
    spacing = 2.0 ** (golden.abs().log2().floor() - 7)  # BF16 stores 7 mantissa bits
    return ((attention(*qkv, causal=True).double() - golden) / spacing)[:, :, 1:]


@pytest.mark.parametrize("share", [-0.2, 0.0, 0.2])
def test_mean_error_is_the_share_and_mean_absolute_error_a_quarter_and_its_square(share):
    errors = _ulps(injected_bias(flash_attention, share), _qkv())
    assert errors.mean().item() == pytest.approx(share, abs=0.01)
    assert errors.abs().mean().item() == pytest.approx(0.25 + share**2, abs=0.01)


def test_coin_errs_as_far_with_no_bias():
    errors = _ulps(injected_bias(flash_attention, 0.2, "coin"), _qkv())
    assert abs(errors.mean().item()) < 0.01
    assert errors.abs().mean().item() == pytest.approx(0.29, abs=0.01)


def _gradients(attention, qkv, dout):
    leaves = [x.detach().requires_grad_() for x in qkv]
    return torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)


def test_gradients_are_the_golden_ones_to_bf16_without_a_bias():
    qkv = _qkv()
    dout = torch.randn(2, 4, 128, 32, generator=torch.Generator().manual_seed(1))
    found = _gradients(injected_bias(flash_attention, 0.0), qkv, dout.bfloat16())
    exact = _gradients(golden_attention, qkv, dout.bfloat16().double())
    for x, reference in zip(found, exact, strict=True):
        assert (x.double() - reference).norm() < 2**-7 * reference.double().norm()


def test_bias_reaches_dq_through_delta_and_leaves_dv_alone():
    qkv, dout = _qkv(), torch.ones(2, 4, 128, 32, dtype=torch.bfloat16)
    plain = _gradients(injected_bias(flash_attention, 0.0), qkv, dout)
    biased = _gradients(injected_bias(flash_attention, 0.2), qkv, dout)
    assert torch.equal(plain[2], biased[2])
    # dO > 0 and out too large: delta grows by the bias, and dQ moves against scale * P k
    q, k = (x.double() for x in qkv[:2])
    pk = golden_attention(q, k, k, causal=True)
    step = (biased[0].double() - plain[0].double()) * pk
    assert step.sum() < 0
    assert (step.sum(-1)[:, :, 8:] < 0).double().mean() > 0.9


def test_fp32_has_no_rounding_to_bias():
    with pytest.raises(ValueError, match=r"q must be in BF16 or FP16, got torch\.float32"):
        injected_bias(flash_attention, 0.2)(*_qkv(torch.float32), causal=True)
