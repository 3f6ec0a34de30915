"""The baseline is eager attention with a rounding at each named point, in both directions."""

import pytest
import torch

from attention_kernels import (
    BASELINE_PROFILES,
    BaselineNumerics,
    baseline_attention,
    golden_attention,
    round_to,
)
from attention_kernels.testing import HARD_SHAPES, Shape, make_qkv, with_gradients

SHAPE = Shape(2, 4, 2, 33, 65, 40)
EXACT = BASELINE_PROFILES["golden"]
CHOICES = ("scale_order", "softmax_rounding", "scaling")
POINTS = [name for name in EXACT.to_dict() if name not in CHOICES]


def draw(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


def assert_same(results, expected):
    for name in expected:
        assert results[name].dtype == expected[name].dtype
        assert torch.equal(results[name], expected[name]), name


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "softcap": {"softcap": 1.5},
    "padding": {"key_padding": torch.arange(65) < torch.tensor([[40], [65]])},
    "bias": {"attn_mask": torch.linspace(-2, 2, 33 * 65).reshape(33, 65)},
    "bool mask": {"attn_mask": torch.linspace(-2, 2, 33 * 65).reshape(33, 65) > -1.5},
    "alibi": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 0.5, 0.2, 0.1]])},
}


@pytest.mark.parametrize("mask", MASKS)
def test_at_fp64_the_baseline_is_the_golden_under_every_mask(mask):
    inputs, options = draw(SHAPE, torch.float64), MASKS[mask]
    base = with_gradients(baseline_attention, *inputs, numerics=EXACT, **options)
    gold = with_gradients(golden_attention, *inputs, **options)
    for name in base:
        torch.testing.assert_close(base[name], gold[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
def test_at_fp64_the_baseline_is_the_golden_at_hard_shapes(shape, causal):
    inputs = draw(shape, torch.float64)
    base = with_gradients(baseline_attention, *inputs, causal=causal, numerics=EXACT)
    gold = with_gradients(golden_attention, *inputs, causal=causal)
    for name in base:
        torch.testing.assert_close(base[name], gold[name], rtol=1e-13, atol=1e-13)


def test_packed_sequences_are_attended_each_by_itself():
    q, k, v, dout = (x[0].transpose(0, 1) for x in draw(Shape(1, 4, 2, 12, 15, 16), torch.bfloat16))
    queries, keys = [3, 0, 7, 2], [5, 4, 0, 6]
    offsets = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (queries, keys)]
    packed = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "causal": True}
    whole = with_gradients(baseline_attention, q, k, v, dout, **packed)
    pieces = zip(q.split(queries), k.split(keys), v.split(keys), dout.split(queries), strict=True)
    for index, piece in enumerate(pieces):
        at_q = slice(offsets[0][index], offsets[0][index + 1])
        at_k = slice(offsets[1][index], offsets[1][index + 1])
        places = {"out": at_q, "dq": at_q, "dk": at_k, "dv": at_k}
        if not (queries[index] and keys[index]):
            assert not any(whole[name][place].any() for name, place in places.items())
            continue
        alone = [x.transpose(0, 1).unsqueeze(0) for x in piece]
        expected = with_gradients(baseline_attention, *alone, causal=True)
        for name, place in places.items():
            assert torch.equal(whole[name][place], expected[name][0].transpose(0, 1)), name


class Product(torch.autograd.Function):
    """A product of narrow operands that sums in FP32 and is rounded once."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        wide = torch.promote_types(a.dtype, torch.float32)
        return (a.to(wide) @ b.to(wide)).to(a.dtype)

    @staticmethod
    def backward(ctx, gradient):
        dtype, wide = gradient.dtype, torch.promote_types(gradient.dtype, torch.float32)
        gradient, a, b = (x.to(wide) for x in (gradient, *ctx.saved_tensors))
        return (gradient @ b.mT).to(dtype), (a.mT @ gradient).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_plain_profile_is_eager_pytorch_bit_for_bit_forward_and_backward(dtype):
    def eager(q, k, v):
        return Product.apply(torch.softmax(Product.apply(q, k.mT) * 40**-0.5, dim=-1), v)

    inputs = draw(Shape(2, 2, 2, 65, 65, 40), dtype)
    assert_same(with_gradients(baseline_attention, *inputs), with_gradients(eager, *inputs))


def test_scale_before_is_eager_pytorch_that_scales_q():
    def eager(q, k, v):
        return Product.apply(torch.softmax(Product.apply(q * 40**-0.5, k.mT), dim=-1), v)

    inputs = draw(Shape(2, 2, 2, 65, 65, 40), torch.bfloat16)
    before = BASELINE_PROFILES["plain"].with_(scale_order="before")
    got = with_gradients(baseline_attention, *inputs, numerics=before)
    assert torch.equal(got["out"], with_gradients(eager, *inputs)["out"])


NARROW = BaselineNumerics(
    operands="e5m4",
    products="bf16",
    scores="e8m5",
    softmax="fp16",
    probabilities="e5m2",
    output="e8m6",
)


@pytest.mark.parametrize("each", [False, True], ids=["once", "each"])
def test_every_point_is_rounded_where_it_is_named_forward_and_backward(each):
    q, k, v, dout = draw(Shape(1, 2, 2, 17, 33, 40), torch.float32)
    scale, softcap, bias = 40**-0.5, 2.0, torch.linspace(-1, 1, 33)
    numerics = NARROW.with_(softmax_rounding="each" if each else "once")
    options = {"softcap": softcap, "attn_mask": bias, "numerics": numerics}
    got = with_gradients(baseline_attention, q, k, v, dout, **options)

    narrow_q, narrow_k, narrow_v = (round_to(x, "e5m4") for x in (q, k, v))
    bent = torch.tanh(round_to(narrow_q @ narrow_k.mT, "bf16") * scale / softcap)
    scores = round_to(softcap * bent + bias, "e8m5")
    if each:
        powers = round_to(torch.exp(scores - scores.amax(-1, keepdim=True)), "fp16")
        weights = round_to(powers / round_to(powers.sum(-1, keepdim=True), "fp16"), "fp16")
    else:
        weights = round_to(torch.softmax(scores, dim=-1), "fp16")
    p = round_to(weights, "e5m2")
    assert torch.equal(got["out"], round_to(p @ narrow_v, "e8m6"))

    dout = round_to(dout, "e8m6")
    dweights = round_to(dout @ narrow_v.mT, "fp16")
    dscores = (dweights - (weights * dweights).sum(-1, keepdim=True)) * weights
    dproducts = round_to(round_to(dscores, "e8m5") * (1 - bent * bent) * scale, "bf16")
    near = {"rtol": 2**-7, "atol": 1e-5}  # a BF16 spacing: tanh and its chain may round apart
    assert torch.equal(got["dv"], p.mT @ dout)
    torch.testing.assert_close(got["dq"], dproducts @ narrow_k, **near)
    torch.testing.assert_close(got["dk"], dproducts.mT @ narrow_q, **near)


def test_scaled_operands_fill_their_format_and_are_scaled_back():
    q, k, v, _ = draw(Shape(2, 2, 2, 17, 33, 40), torch.bfloat16)
    got = baseline_attention(q, 100 * k, 1e-4 * v, numerics=BASELINE_PROFILES["fp8"], scale=1e-3)

    def scaled(x):
        factor = x.float().abs().amax(dim=(-1, -2), keepdim=True) / 448
        return round_to((x.float() / factor).clamp(-448, 448), "e4m3"), factor

    (nq, fq), (nk, fk), (nv, fv) = scaled(q), scaled(100 * k), scaled(1e-4 * v)
    scores = (nq @ nk.mT) * (fq * fk) * 1e-3
    powers = round_to(torch.exp(scores - scores.amax(-1, keepdim=True)), "fp16")
    weights = round_to(powers / round_to(powers.sum(-1, keepdim=True), "fp16"), "fp16")
    out = round_to(weights * 256, "e4m3") @ nv * (fv / 256)
    assert torch.equal(got, out.bfloat16())


def test_a_zero_operand_needs_no_factor():
    q, k, v, dout = draw(Shape(1, 2, 2, 5, 9, 16), torch.bfloat16)
    fp8 = BASELINE_PROFILES["fp8"]
    tiny = k.float().clamp(-1, 1).sign() * 2.0**-133
    for small in (0 * k, tiny.bfloat16()):
        got = baseline_attention(q, small, v, numerics=fp8)
        assert got.isfinite().all()
    results = with_gradients(baseline_attention, q, 0 * k, v, dout, numerics=fp8)
    assert all(x.isfinite().all() for x in results.values())
    mean = v.float().mean(2, keepdim=True).expand_as(q)
    torch.testing.assert_close(results["out"].float(), mean, rtol=2**-3, atol=2**-3)


def test_no_scaled_value_is_beyond_the_largest():
    # With this many mantissa bits a quotient one spacing of FP32 too large would round to infinity.
    q, k, v, _ = draw(Shape(16, 16, 16, 3, 5, 16), torch.float32)
    fine = BASELINE_PROFILES["plain"].with_(operands="e5m22", scaling="per_tensor")
    assert baseline_attention(q, k, v, numerics=fine).isfinite().all()


def test_scaling_stops_no_gradient_at_the_largest_value():
    # Factors are constants of the backward, and values at the end of the format move with x.
    q, k, v, dout = draw(Shape(2, 4, 4, 33, 33, 40), torch.float32)
    fine = EXACT.with_(operands="e4m23", products="fp32", scaling="per_tensor")
    scaled = with_gradients(baseline_attention, q, k, v, dout, numerics=fine)
    plain = with_gradients(baseline_attention, q, k, v, dout, numerics=EXACT)
    for name in plain:
        torch.testing.assert_close(scaled[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("point", POINTS)
def test_each_rounding_point_is_live(point):
    inputs = draw(SHAPE, torch.float64)
    exact = with_gradients(baseline_attention, *inputs, numerics=EXACT)
    lowered = EXACT.with_(**{point: "bf16"})
    moved = with_gradients(baseline_attention, *inputs, numerics=lowered)
    # P is rounded for its product with v alone: what it does to dq and dk, delta's part, is none.
    blind = {"probabilities": ("dq", "dk")}.get(point, ())
    for name, value in moved.items():
        distance = (value - exact[name]).abs().max()
        assert (distance > 1e-5) == (name not in blind), f"{name} at {point}"


@pytest.mark.parametrize(
    ("change", "lowered"),
    [
        ({"scale_order": "before"}, {"operands": "bf16"}),
        ({"softmax_rounding": "each"}, {"softmax": "bf16"}),
        ({"scaling": "per_tensor"}, {"operands": "e4m3"}),
    ],
    ids=str,
)
def test_each_choice_is_live_where_something_is_rounded_and_nothing_else(change, lowered):
    inputs = draw(SHAPE, torch.float64)
    for numerics, same in ((EXACT, True), (EXACT.with_(**lowered), False)):
        without = with_gradients(baseline_attention, *inputs, numerics=numerics)
        with_it = with_gradients(baseline_attention, *inputs, numerics=numerics.with_(**change))
        for name in without:
            distance = (without[name] - with_it[name]).abs().max()
            assert (distance < 1e-12) == same, name


def test_fp64_inputs_are_rounded_once_into_their_operand_format():
    # 1 + 2**-8 + 2**-40 rounds up to 1 + 2**-7 in BF16; through FP32 it would tie and become 1.
    v = torch.full((1, 1, 1, 16), 1 + 2**-8 + 2**-40, dtype=torch.float64)
    narrow = BaselineNumerics(**dict.fromkeys(POINTS, "bf16"))
    assert (baseline_attention(v, v, v, numerics=narrow) == 1 + 2**-7).all()


def test_heads_of_a_group_share_their_keys_and_sum_their_gradients():
    q, k, v, dout = draw(Shape(2, 6, 2, 33, 65, 40), torch.float64)
    grouped = with_gradients(baseline_attention, q, k, v, dout, numerics=EXACT)

    def repeated(q, k, v):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        return baseline_attention(q, k, v, numerics=EXACT)

    expected = with_gradients(repeated, q, k, v, dout)
    for name in expected:
        torch.testing.assert_close(grouped[name], expected[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_the_dtype_and_shape_of_the_inputs(dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    results = with_gradients(baseline_attention, q, k, v, dout)
    for name, like in zip(results, (q, q, k, v), strict=True):
        assert (results[name].dtype, results[name].shape) == (dtype, like.shape)


@pytest.mark.parametrize("profile", BASELINE_PROFILES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (0, 0)},
        {"key_padding": torch.zeros(1, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(70, 1, dtype=torch.bool)},
        {"attn_mask": torch.full((70, 1), -torch.inf)},
        {"attn_mask": torch.full((70, 1), -torch.inf), "softcap": 1.0},
    ],
    ids=["causal", "window", "padding", "bool mask", "bias", "softcap"],
)
def test_rows_that_attend_nothing_give_zeros_and_zero_gradients(options, profile):
    inputs = draw(Shape(1, 2, 1, 70, 5, 16), torch.bfloat16)
    numerics = BASELINE_PROFILES[profile]
    results = with_gradients(baseline_attention, *inputs, numerics=numerics, **options)
    assert not results["out"][:, :, :65].any()
    assert not results["dq"][:, :, :65].any()
    assert all(x.isfinite().all() for x in results.values())
    attends = options.get("causal") or "window" in options
    assert bool(results["out"][:, :, 65:].any()) == attends
    assert bool(results["dv"].any()) == attends
