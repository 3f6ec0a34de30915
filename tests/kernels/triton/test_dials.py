"""Every dial and mask of the interpreted kernels: exact at FP64, the twin's bits below."""

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.testing import (
    Shape,
    assert_within_budget,
    make_qkv,
    nan_filled,
    with_gradients,
)
from tests.sampling import others_long

# the interpreter takes minutes over them: every run has a few, which a mistake in any factor, rule
# or order of the kernels shows in
_LONG = pytest.mark.long
SHAPE = Shape(2, 2, 1, 35, 50, 20)
TILES = {"block_q": 16, "block_k": 16}
DIALS = {
    "reversed": {"key_order": "reversed"},
    "splits": {"splits": 3},
    "key_outer": {"loop_order": "key_outer"},
    "exp2": {"exp": "exp2"},
    "threshold": {"rescale_threshold": 8.0},
    "beta": {"repeated_max_beta": 7.0},
    "published_beta": {"repeated_max_beta": 2.0, "repeated_max_rule": "published"},
    "near_ties": {"repeated_max_beta": 7.0, "repeated_max_tolerance": 0.1},
    "gradient_scale": {"gradient_scale": "probabilities"},
    "incoherent": {"incoherent": True},
}
NARROW = {
    "fa1": ("fa1", {}),
    "fa2": ("fa2", {}),
    "fa3": ("fa3", {}),
    "fa4": ("fa4", {}),
    "low_threshold": ("fa4", {"rescale_threshold": 1.0}),
    "fa3_fp8": ("fa3_fp8", {}),
    "per_tensor": ("fa3_fp8", {"scaling": "per_tensor", "incoherent": False}),
    "stochastic_fp8": ("fa3_fp8", {"rounding": "stochastic", "seed": 3}),
    "all_bf16": ("all_bf16", {}),
    "stochastic": ("all_bf16", {"rounding": "stochastic"}),
    "stochastic_splits": ("all_bf16", {"rounding": "stochastic", "splits": 3}),
    "stochastic_key_outer": ("all_bf16", {"rounding": "stochastic", "loop_order": "key_outer"}),
    "toward_zero": ("all_bf16", {"rounding": "toward_zero", "key_order": "reversed"}),
    "e5m5": ("all_bf16", {"scores": "e5m5-flush", "statistics": "e8m9", "dp": "e6m5"}),
    "beta": ("all_bf16", {"repeated_max_beta": 7.0}),
    "each_operation": ("peer_2510_04212", {}),
    "each_operation_fp8": ("peer_2510_04212", {"operands": "e4m3", "scaling": "per_block"}),
    "stochastic_each_operation": ("peer_2510_04212", {"rounding": "stochastic"}),
    "stochastic_each_split": ("peer_2510_04212", {"rounding": "stochastic", "splits": 3}),
    "each_operation_key_outer": ("peer_2510_04212", {"loop_order": "key_outer"}),
    "published_maximum": ("peer_2510_04212_stabilised", {"key_order": "reversed"}),
}
IN_EVERY_RUN = ("fa1", "fa3_fp8", "low_threshold", "beta")


def masks(shape=SHAPE, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    lengths = (shape.query_len, shape.key_len)
    padding = torch.rand(shape.batch, shape.key_len, generator=generator) > 0.3
    padding[-1] = False
    bias = torch.randn(1, shape.heads, *lengths, generator=generator).to(dtype)
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (10, 3)},
        "window_causal": {"window": (20, None), "causal": True},
        "padding": {"key_padding": padding},
        "bias": {"attn_mask": bias, "causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, *lengths, generator=generator) > 0.5},
        "softcap": {"softcap": 2.0, "causal": True},
        "alibi": {"alibi_slopes": torch.rand(shape.heads, generator=generator)},
    }


def draw(shape=SHAPE, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


def run(engine, tensors, profile="golden", mask=None, **changes):
    numerics = PROFILES[profile].with_(**(TILES | changes))
    with nan_filled():
        return with_gradients(
            flash_attention, *tensors, numerics=numerics, engine=engine, **(mask or {})
        )


def assert_nearly_the_same_bits(found, expected):
    """The order of additions decides a rounding now and then: 3 % of values may differ."""
    for name, value in found.items():
        assert value.isfinite().all(), name
        assert (value == expected[name]).double().mean() >= 0.97, name


@pytest.mark.parametrize("mask", masks())
@_LONG
def test_in_fp64_the_kernels_are_the_golden_under_every_mask(mask):
    tensors, options = draw(), masks()[mask]
    expected = with_gradients(golden_attention, *tensors, **options)
    for name, value in run("triton", tensors, mask=options).items():
        assert (value - expected[name]).norm() <= 1e-14 * expected[name].norm(), name


@pytest.mark.parametrize("mask", ["full", "window", "bias"])
@pytest.mark.parametrize("dial", DIALS)
@_LONG
def test_in_fp64_no_dial_moves_the_kernels_beyond_1e14(dial, mask):
    tensors, options = draw(), masks()[mask]
    expected = with_gradients(golden_attention, *tensors, **options)
    for name, value in run("triton", tensors, mask=options, **DIALS[dial]).items():
        assert (value - expected[name]).norm() <= 1e-14 * expected[name].norm(), name


@pytest.mark.parametrize("case", others_long(NARROW, IN_EVERY_RUN))
def test_the_kernels_have_the_twins_bits_at_every_dial(case):
    profile, changes = NARROW[case]
    tensors = draw(dtype=torch.bfloat16)
    mask = {"causal": True} if "out" in case else masks(dtype=torch.bfloat16)["bias"]
    found = run("triton", tensors, profile, mask, **changes)
    assert_nearly_the_same_bits(found, run("twin", tensors, profile, mask, **changes))


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@_LONG
def test_the_kernels_have_the_twins_bits_under_every_mask(mask, dtype):
    tensors, options = draw(dtype=dtype), masks(dtype=dtype)[mask]
    found = run("triton", tensors, "fa2", options)
    assert_nearly_the_same_bits(found, run("twin", tensors, "fa2", options))


@pytest.mark.parametrize("dot", ["tf32", "tf32x3"])
@_LONG
def test_the_kernels_split_fp32_operands_as_the_twin_does(dot):
    tensors = draw(dtype=torch.float32)
    found, twin = (run(engine, tensors, "fa2", dot=dot) for engine in ("triton", "twin"))
    plain = run("twin", tensors, "fa2")
    for name, value in found.items():
        # What TF32 drops is 2**-12; another order of additions moves few values across a tie.
        assert (value - twin[name]).norm() <= 2**-15 * twin[name].norm(), name
        moved = (value - plain[name]).norm() / plain[name].norm()
        assert (moved > 2**-14) == (dot == "tf32"), name


@pytest.mark.parametrize("profile", ["fa2", "stochastic"])
@pytest.mark.parametrize("mask", ["causal", "window", "alibi", "softcap"])
@_LONG
def test_packed_sequences_have_the_twins_bits(mask, profile):
    q, k, v, dout = draw(Shape(1, 2, 1, 35, 50, 20), torch.bfloat16)
    packed = [x.squeeze(0).transpose(0, 1) for x in (q, k, v, dout)]
    options = dict(masks()[mask])
    if mask == "alibi":
        options["alibi_slopes"] = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    options["cu_seqlens_q"] = torch.tensor([0, 7, 7, 30, 35], dtype=torch.int32)
    options["cu_seqlens_k"] = torch.tensor([0, 20, 30, 50, 50], dtype=torch.int32)
    changes = {"fa2": {}, "stochastic": {"rounding": "stochastic", "splits": 2}}[profile]
    base = "fa2" if profile == "fa2" else "all_bf16"
    found = run("triton", packed, base, options, **changes)
    assert_nearly_the_same_bits(found, run("twin", packed, base, options, **changes))


GRID = [
    ((113, 203), 32, "causal"),
    ((128, 217), 40, "window"),
    ((113, 211), 59, "padding"),
    ((108, 256), 64, "softcap"),
    ((113, 203), 80, "alibi"),
    ((128, 217), 96, "window_causal"),
    ((113, 211), 111, "bias"),
    ((108, 256), 128, "full"),
    ((113, 203), 160, "bool"),
    ((128, 217), 192, "causal"),
    ((113, 211), 224, "window"),
    ((108, 256), 256, "causal"),
]
"""The short half of flash-attn's lengths and all its head dims, each kind of mask among them."""


@pytest.mark.parametrize(("lengths", "head_dim", "mask"), GRID, ids=str)
@_LONG
def test_the_kernels_pass_flash_attns_rule_on_its_grid(lengths, head_dim, mask):
    shape = Shape(2, 2, 1, *lengths, head_dim)
    dtype = torch.bfloat16 if head_dim % 3 else torch.float16
    tensors, options = draw(shape, dtype), masks(shape, dtype)[mask]
    golden = with_gradients(golden_attention, *(x.double() for x in tensors), **options)
    baseline = with_gradients(baseline_attention, *tensors, **options)
    found = run("triton", tensors, "fa2", options, block_q=64, block_k=64)
    for name, value in found.items():
        factor = 2.0 if name == "out" else 3.0
        assert_within_budget(value, baseline[name], golden[name], factor, name)


@_LONG
def test_forward_and_backward_repeat_to_the_bit():
    tensors = draw(dtype=torch.bfloat16)
    first, second = (run("triton", tensors, "fa3_fp8", {"causal": True}) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@_LONG
def test_swapping_the_sides_of_a_square_tile_is_the_identity():
    # The free control of arXiv 2405.02803's figure 6: the two numerics are one value.
    square = PROFILES["all_bf16"].with_(block_q=32, block_k=32)
    tiling = square.tiling
    assert square.with_(block_q=tiling.block_k, block_k=tiling.block_q) == square
    tensors = draw(dtype=torch.bfloat16)
    changes = {"block_q": 32, "block_k": 32}
    for engine in ("twin", "triton"):
        first, second = (run(engine, tensors, "all_bf16", **changes) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_fusion_is_refused_where_kernels_are_interpreted():
    with pytest.raises(ValueError, match="triton: fp_fusion must be false"):
        run("triton", draw(), "fa2", fp_fusion=True)
