"""The same claims on a GPU, compiled, and on the CPU, interpreted: each test runs as such a pair.

On a GPU the shapes are those of flash-attn's tests; the interpreter gets small ones.
"""

import pytest
import torch

from attention_kernels import (
    PROFILES,
    attention_with_kvcache,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, nan_filled
from attention_kernels.triton import launch as triton_launch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = (
    Shape(1, 2, 1, 63, 65, 40),
    Shape(1, 2, 2, 65, 63, 96),
    Shape(1, 2, 1, 1, 65, 256),
)
LARGE = (
    Shape(2, 4, 2, 113, 203, 40),
    Shape(2, 4, 4, 128, 217, 59),
    Shape(2, 4, 1, 108, 256, 96),
    Shape(2, 4, 2, 512, 256, 111),
    Shape(2, 4, 4, 1024, 1023, 128),
    Shape(1, 4, 2, 2048, 2048, 64),
    Shape(1, 2, 1, 1023, 1024, 256),
)


def places(small=SMALL, large=LARGE):
    pairs = [pytest.param("cpu", shape, id=f"cpu-{shape}") for shape in small]
    return pairs + [
        pytest.param("cuda", shape, id=f"cuda-{shape}", marks=NEEDS_CUDA) for shape in large
    ]


def draw(shape, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return [*(q, k, v), torch.randn(q.shape, generator=generator, device=device).to(dtype)]


def attend(attention, q, k, v, dout, **options):
    """Out and gradients by name."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def golden(q, k, v, dout, **options):
    return attend(golden_attention, *(x.double() for x in (q, k, v, dout)), **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("device", "shape"), places())
def test_fa2_errs_within_the_budget_of_plain_attention(device, shape, dtype, causal):
    tensors = draw(shape, dtype, device)
    exact = golden(*tensors, causal=causal)
    plain = attend(baseline_attention, *tensors, causal=causal)
    with nan_filled():
        flash = attend(flash_attention, *tensors, causal=causal, engine="triton")
    for name, factor in (("out", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        assert_within_budget(flash[name], plain[name], exact[name], factor, name)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("device", "shape"), places(large=[*LARGE[:4], Shape(1, 2, 1, 200, 300, 128)])
)
def test_at_fp64_the_kernels_are_the_golden(device, shape, causal):
    tensors = draw(shape, torch.float64, device)
    exact = golden(*tensors, causal=causal)
    numerics = PROFILES["golden"].with_(block_q=32, block_k=32)
    flash = attend(flash_attention, *tensors, causal=causal, numerics=numerics, engine="triton")
    for name in flash:
        assert (flash[name] - exact[name]).norm() <= 1e-12 * exact[name].norm(), name


@pytest.mark.parametrize(("device", "shape"), places())
def test_in_fp32_errors_are_those_of_fp32_sums(device, shape):
    tensors = draw(shape, torch.float32, device)
    exact = golden(*tensors)
    numerics = PROFILES["fa2"].with_(block_q=32, block_k=32)
    flash = attend(flash_attention, *tensors, numerics=numerics, engine="triton")
    # n * 2**-24 bounds a sum of n terms; TF32 would err by 2**-11.
    bound = (shape.head_dim + shape.query_len + shape.key_len) * 2**-24
    for name in flash:
        assert (flash[name] - exact[name]).norm() <= bound * exact[name].norm(), name


@pytest.mark.parametrize("profile", ["fa2", "all_bf16"])
@pytest.mark.parametrize(("device", "shape"), places())
def test_the_engines_agree_within_a_share_of_the_rounding_error(device, shape, profile):
    tensors = draw(shape, torch.bfloat16, device)
    options = {"causal": True, "numerics": PROFILES[profile]}
    twin = attend(flash_attention, *tensors, **options, engine="twin")
    kernel = attend(flash_attention, *tensors, **options, engine="triton")
    exact = golden(*tensors, causal=True)
    for name in twin:
        apart = (kernel[name].double() - twin[name].double()).norm()
        assert apart <= 0.5 * (twin[name].double() - exact[name]).norm(), name


@pytest.mark.parametrize(("device", "shape"), places())
def test_a_rerun_gives_the_same_bits(device, shape):
    tensors = draw(shape, torch.bfloat16, device)
    first, again = (attend(flash_attention, *tensors, engine="triton") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_pages_of_keys_give_the_bits_of_keys_side_by_side(device):
    q, k, v, _ = draw(Shape(1, 4, 2, 1, 75, 64), torch.bfloat16, device)
    table = torch.tensor([[3, 0, 7, 1, 4, 9]], dtype=torch.int32, device=device)
    pages = [torch.full((10, 2, 16, 64), torch.nan, dtype=x.dtype, device=device) for x in (k, v)]
    for cache, x in zip(pages, (k, v), strict=True):
        for at in range(75):
            cache[table[0, at // 16], :, at % 16] = x[0, :, at]
    ends = torch.tensor([75], device=device)
    found = {"cache_seqlens": ends, "block_table": table, "engine": "triton"}
    out = attention_with_kvcache(flash_attention, q, *pages, causal=True, **found)
    assert torch.equal(out, flash_attention(q, k, v, causal=True, engine="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_too_large_for_the_gpu_are_refused_by_name():
    q = torch.zeros(1, 1, 256, 256, device="cuda")
    numerics = PROFILES["fa2"].with_(block_q=256, block_k=256).resolve(q.dtype)
    with pytest.raises(ValueError, match="block_q=256, block_k=256"):
        triton_launch.forward(q, q, q, mask=Mask(), scale=0.0625, numerics=numerics)
