"""Every dial and mask of the twin: none matters in exact arithmetic, each moves narrow results."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import (
    PROFILES,
    FlashNumerics,
    baseline_attention,
    flash_attention,
    golden_attention,
    round_to,
)
from attention_kernels.rounding_key import draws_of
from attention_kernels.score_units import ScoreUnits
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, with_gradients
from attention_kernels.twin.arithmetic import Rounder, dot, exponential, weights
from attention_kernels.twin.forward import block_maximum, running_maximum

SHAPE = Shape(2, 4, 2, 65, 130, 40)
EXACT_DIALS = {
    "blocks": {"block_q": 16, "block_k": 128},
    "reversed": {"key_order": "reversed", "block_k": 32},
    "splits": {"splits": 3, "block_k": 16},
    "more_splits_than_blocks": {"splits": 7, "block_k": 64},
    "key_outer": {"loop_order": "key_outer", "block_k": 16},
    "exp2": {"exp": "exp2"},
    "threshold": {"rescale_threshold": 8.0, "block_k": 16},
    "beta": {"repeated_max_beta": 7.0, "block_k": 32},
    "published_beta": {
        "repeated_max_beta": 2.0,
        "repeated_max_rule": "published",
        "repeated_max_tolerance": 0.1,
        "block_k": 96,
    },
    "gradient_scale": {"gradient_scale": "probabilities", "block_q": 96},
    "incoherent": {"incoherent": True},
    "all": {
        "key_order": "reversed",
        "splits": 2,
        "exp": "exp2",
        "rescale_threshold": 4.0,
        "repeated_max_beta": 2.0,
        "incoherent": True,
        "block_k": 16,
    },
}
MOVING_DIALS = {
    "reversed": {"key_order": "reversed"},
    "splits": {"splits": 3},
    "key_outer": {"loop_order": "key_outer"},
    "exp2": {"exp": "exp2"},
    "polynomial": {"exp": "exp2_polynomial"},
    "threshold": {"rescale_threshold": 8.0},
    "beta": {"repeated_max_beta": 7.0},
    "near_ties": {"repeated_max_beta": 7.0, "repeated_max_tolerance": 0.1},
    "incoherent": {"incoherent": True},
    "per_tensor": {"operands": "e4m3", "scaling": "per_tensor"},
    "per_block": {"operands": "e4m3", "scaling": "per_block"},
    "toward_zero": {"rounding": "toward_zero"},
    "nearest_away": {"rounding": "nearest_away"},
    "stochastic": {"rounding": "stochastic"},
}
FORWARD_ONLY = {"splits", "key_outer", "threshold", "beta", "near_ties"}


def masks():
    generator = torch.Generator().manual_seed(7)
    lengths = (SHAPE.query_len, SHAPE.key_len)
    padding = torch.rand(SHAPE.batch, SHAPE.key_len, generator=generator) > 0.3
    padding[1] = False
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (10, 3)},
        "window_causal": {"window": (20, None), "causal": True},
        "padding": {"key_padding": padding},
        "bias": {"attn_mask": torch.randn(1, 4, *lengths, generator=generator), "causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, *lengths, generator=generator) > 0.5},
        "softcap": {"softcap": 2.0, "causal": True},
        "alibi": {"alibi_slopes": torch.rand(4, generator=generator)},
    }


def draw(shape=SHAPE, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


def twin(*tensors, profile="golden", mask=None, **changes):
    numerics = PROFILES[profile].with_(**changes)
    return with_gradients(
        flash_attention, *tensors, numerics=numerics, engine="twin", **(mask or {})
    )


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("dial", EXACT_DIALS)
def test_in_fp64_no_dial_moves_a_result_beyond_1e14(dial, mask):
    tensors = draw()
    expected = with_gradients(golden_attention, *tensors, **masks()[mask])
    found = twin(*tensors, mask=masks()[mask], **EXACT_DIALS[dial])
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 1e-14 * expected[name].norm(), name


@pytest.mark.parametrize("dial", MOVING_DIALS)
def test_each_dial_moves_what_it_may_at_low_precision(dial):
    tensors = draw(dtype=torch.float32)
    # FP32 results, so that what the dial moves is not hidden by the last rounding.
    profile = "fa2" if dial == "exp2" else "all_bf16"
    base = {"profile": profile, "output": "fp32", "gradients": "fp32", "block_k": 16}
    plain, moved = twin(*tensors, **base), twin(*tensors, **base, **MOVING_DIALS[dial])
    for name, value in moved.items():
        assert value.isfinite().all()
        if name == "out" or dial not in FORWARD_ONLY:
            assert not torch.equal(value, plain[name]), name


def test_reversed_keys_are_the_forward_order_of_reversed_blocks():
    q, k, v, dout = draw(Shape(1, 2, 2, 32, 64, 16), torch.bfloat16)
    swapped = [torch.cat(x.split(16, dim=2)[::-1], dim=2) for x in (k, v)]
    base = {"profile": "all_bf16", "block_k": 16, "block_q": 16}
    backwards = twin(q, k, v, dout, key_order="reversed", **base)
    forwards = twin(q, *swapped, dout, **base)
    for name in ("out", "dq"):
        assert torch.equal(backwards[name], forwards[name]), name
    for name in ("dk", "dv"):
        unswapped = torch.cat(forwards[name].split(16, dim=2)[::-1], dim=2)
        assert torch.equal(backwards[name], unswapped), name


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("profile", ["fa1", "fa2", "fa3", "fa4"])
def test_each_16_bit_profile_passes_the_rule_of_flash_attn_with_every_mask(profile, mask):
    tensors = draw(dtype=torch.bfloat16)
    # The reference may not differ in the mask's own rounding: flash-attn casts its bias too.
    options = masks()[mask]
    golden = with_gradients(golden_attention, *(x.double() for x in tensors), **options)
    baseline = with_gradients(baseline_attention, *tensors, **options)
    found = twin(*tensors, profile=profile, mask=options)
    for name, value in found.items():
        factor = 2.0 if name == "out" else 3.0
        assert_within_budget(value, baseline[name], golden[name], factor, name)


def test_rows_that_attend_nothing_give_zeros_and_no_gradient_whatever_hides_the_keys():
    q, k, v, dout = draw(Shape(1, 2, 2, 8, 40, 16), torch.bfloat16)
    nothing = {
        "padding": {"key_padding": torch.zeros(1, 40, dtype=torch.bool)},
        "bool": {"attn_mask": torch.zeros(8, 40, dtype=torch.bool)},
        "bias": {"attn_mask": torch.full((40,), -torch.inf)},
    }
    for profile in PROFILES:
        for mask in nothing.values():
            for value in twin(q, k, v, dout, profile=profile, mask=mask).values():
                assert torch.equal(value, torch.zeros_like(value))


def test_a_key_block_whose_scores_all_overflow_is_not_a_row_without_keys():
    # FP16 scores of the first 64 keys are -inf, those of the others are not.
    q = torch.full((1, 1, 4, 16), 100.0, dtype=torch.float16)
    k = torch.cat([torch.full((1, 1, 64, 16), -100.0), torch.zeros(1, 1, 8, 16)], dim=2).half()
    v = torch.arange(72.0).half()[:, None].expand(1, 1, 72, 16)
    out = twin(q, k, v, q, profile="fa2", scores="fp16", mask={"scale": 1.0})["out"]
    assert torch.equal(out, torch.full_like(out, 67.5))


def test_key_outer_rounds_the_output_at_each_key_block():
    q, k, v, _ = draw(Shape(1, 1, 1, 16, 32, 64), torch.bfloat16)

    def bf16(x):
        return x.bfloat16().float()

    scores = q.float() @ k.float().mT / 8
    out = flash_attention(
        q, k, v, numerics=PROFILES["fa1"].with_(block_k=16), engine="twin"
    ).float()
    old_max = scores[..., :16].amax(-1, keepdim=True)
    old_p = torch.exp(scores[..., :16] - old_max)
    old_sum = old_p.sum(-1, keepdim=True)
    stored = bf16(bf16(old_p) @ v[:, :, :16].float() / old_sum)
    new_max = scores.amax(-1, keepdim=True)
    p = torch.exp(scores[..., 16:] - new_max)
    carried = old_sum * torch.exp(old_max - new_max)
    new_sum = carried + p.sum(-1, keepdim=True)
    expected = bf16((carried * stored + bf16(p) @ v[:, :, 16:].float()) / new_sum)
    assert (out == expected).double().mean() > 0.99  # the order of additions decides the rest
    once = flash_attention(q, k, v, numerics=PROFILES["fa2"].with_(block_k=16), engine="twin")
    assert (once.float() == expected).double().mean() < 0.95


def test_the_polynomial_is_off_by_what_flash_attention_4_says():
    x = -torch.rand(1, 1, 100_000, dtype=torch.float64) * 100
    error = (exponential(x.clone(), "exp2_polynomial") / x.exp() - 1).abs().max().item()
    assert error == pytest.approx(8.8e-5, rel=0.01)
    assert (exponential(x.clone(), "exp2") / x.exp() - 1).abs().max() < 1e-13
    assert exponential(torch.full((1,), -torch.inf), "exp2_polynomial").item() == 0.0
    assert exponential(torch.full((1,), torch.nan), "exp2_polynomial").isnan()


def test_a_threshold_of_zero_is_none_and_a_large_one_keeps_the_first_maximum():
    q, k, v, _ = draw(Shape(1, 1, 1, 16, 64, 16), torch.float32)
    k = k * torch.linspace(0.1, 2, 64)[:, None]  # the maximum grows from block to block
    kept = PROFILES["fa2"].with_(block_k=16, rescale_threshold=100.0)
    out = flash_attention(q, k, v, numerics=kept, engine="twin")
    scores = q @ k.mT / 4
    p = torch.exp(scores - scores[..., :16].amax(-1, keepdim=True))
    torch.testing.assert_close(out, p @ v / p.sum(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    assert p.amax() > 8
    moved = flash_attention(q, k, v, numerics=kept.with_(rescale_threshold=0.0), engine="twin")
    assert not torch.equal(moved, out)


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_beta_leaves_no_probability_of_one_where_the_maximum_is_repeated(sign):
    # Two tied maxima, so P would be 1 twice; with beta the lse still is that of the scores.
    k = torch.zeros(1, 1, 16, 16)
    k[0, 0, :2] = sign * 1.0
    k[0, 0, 2:] = -3.0
    q = torch.ones(1, 1, 1, 16) * 0.25
    v = torch.arange(16.0)[:, None].expand(1, 1, 16, 16)
    numerics = PROFILES["fa2"].with_(repeated_max_beta=7.0, probabilities="bf16")
    found = flash_attention(q, k, v, scale=1.0, numerics=numerics, engine="twin", return_lse=True)
    scores = (q @ k.mT).squeeze()
    assert found.lse.item() == pytest.approx(scores.logsumexp(0).item(), rel=1e-6)
    # beta moves 4 by 24, which is bounded by taking 26 factors of two back, and -4 to 0.
    p = torch.exp(scores - (28.0 - 26 * math.log(2) if sign > 0 else 0.0))
    rounded = round_to(p, "bf16")
    assert rounded.max() < 1
    expected = (rounded * torch.arange(16.0)).sum() / p.sum()
    assert found.out[0, 0, 0, 0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_stochastic_rounding_is_reproducible_and_keeps_the_mean():
    q, k, v, _ = draw(Shape(1, 1, 1, 4, 300, 16), torch.float32)
    golden = golden_attention(q, k, v)
    outs = []
    for seed in range(200):
        numerics = PROFILES["golden"].with_(accumulator="bf16", rounding="stochastic", seed=seed)
        outs.append(flash_attention(q, k, v, numerics=numerics, engine="twin"))
    again = flash_attention(q, k, v, numerics=numerics, engine="twin")
    assert torch.equal(outs[-1], again)
    assert not torch.equal(outs[-1], outs[-2])
    errors = torch.stack(outs).double() - golden
    standard_error = errors.std(dim=0) / math.sqrt(len(outs))
    # 64 means, each within 5 standard errors of zero.
    assert (errors.mean(dim=0).abs() <= 5 * standard_error).all()
    nearest = flash_attention(
        q, k, v, numerics=PROFILES["golden"].with_(accumulator="bf16"), engine="twin"
    )
    assert ((nearest - golden).abs() > 5 * standard_error).any()


def test_tf32_products_err_as_tf32_and_three_of_them_as_fp32():
    tensors = draw(Shape(1, 2, 2, 65, 130, 64), torch.float32)
    golden = with_gradients(golden_attention, *(x.double() for x in tensors))
    errors = {}
    for mode in ("ieee", "tf32", "tf32x3"):
        found = twin(*tensors, profile="fa2", dot=mode)
        errors[mode] = {
            n: ((x - golden[n]).norm() / golden[n].norm()).item() for n, x in found.items()
        }
    for name in errors["ieee"]:
        assert errors["tf32"][name] > 2**-13, name
        assert errors["tf32x3"][name] < 20 * errors["ieee"][name], name
        assert errors["tf32x3"][name] < 2**-18, name


def test_fp8_operands_err_more_than_bf16_and_scaling_helps():
    tensors = [x * 1e-3 for x in draw(dtype=torch.bfloat16)]
    golden = with_gradients(golden_attention, *(x.double() for x in tensors))

    def error(**changes):
        found = twin(*tensors, profile="fa2", operands="e4m3", **changes)
        return {n: ((x - golden[n]).norm() / golden[n].norm()).item() for n, x in found.items()}

    unscaled, scaled = error(), error(scaling="per_block")
    for name in ("out", "dv"):
        assert scaled[name] < 0.06
        assert unscaled[name] > 3 * scaled[name]


def test_fusion_is_refused_where_no_compiler_contracts():
    q, k, v, _ = draw()
    with pytest.raises(ValueError, match="twin: fp_fusion must be false, got True"):
        flash_attention(q, k, v, numerics=PROFILES["fa2"].with_(fp_fusion=True), engine="twin")


@settings(max_examples=25)
@given(data=st.data(), causal=st.booleans())
def test_packed_sequences_are_each_attended_alone(data, causal):
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4)
    )
    totals = [max(1, sum(part)) for part in zip(*lengths, strict=True)]
    tail = totals[0] - sum(q for q, _ in lengths), totals[1] - sum(k for _, k in lengths)
    lengths.append(tail)
    q, k, v, dout = draw(Shape(1, 4, 2, totals[0], totals[1], 16), torch.bfloat16)
    packed = [x.squeeze(0).transpose(0, 1) for x in (q, k, v, dout)]
    offsets = {
        f"cu_seqlens_{name}": torch.tensor([0, *parts], dtype=torch.int32).cumsum(0).int()
        for name, parts in zip("qk", zip(*lengths, strict=True), strict=True)
    }
    found = twin(*packed, profile="fa2", mask={"causal": causal, **offsets})
    row = key = 0
    for queries, keys in lengths:
        at_q, at_k = slice(row, row + queries), slice(key, key + keys)
        row, key = row + queries, key + keys
        if not (queries and keys):
            assert not found["out"][at_q].any()
            continue
        parts = (q[:, :, at_q], k[:, :, at_k], v[:, :, at_k], dout[:, :, at_q])
        alone = twin(*parts, profile="fa2", mask={"causal": causal})
        for name, x in alone.items():
            at = at_q if name in ("out", "dq") else at_k
            assert torch.equal(found[name][at], x.squeeze(0).transpose(0, 1)), name


@pytest.mark.parametrize("profile", PROFILES)
def test_forward_and_backward_repeat_to_the_bit(profile):
    tensors = draw(dtype=torch.bfloat16)
    first, second = twin(*tensors, profile=profile), twin(*tensors, profile=profile)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_repeated_maximum_is_moved_and_a_single_one_is_not():
    beta = PROFILES["fa2"].with_(repeated_max_beta=2.0).softmax
    scores = torch.tensor([[1.5, 1.5, 0], [1.5, 1, 0], [-2, -2, -3], [-8, -8, -9], [9, 9, 1]])
    two = math.log(2)
    expected = torch.tensor([3, 1.5, 0, -3 * two, 18 - 5 * two])
    torch.testing.assert_close(block_maximum(scores, beta).flatten(), expected)
    assert block_maximum(torch.zeros(1, 2), beta).item() == 0
    assert block_maximum(torch.full((1, 2), -torch.inf), beta).item() == -torch.inf
    assert block_maximum(scores, PROFILES["fa2"].softmax).flatten().tolist() == [
        1.5,
        1.5,
        -2,
        -8,
        9,
    ]


def test_scores_within_the_tolerance_repeat_a_maximum_and_those_beyond_do_not():
    near = PROFILES["fa2"].with_(repeated_max_beta=2.0, repeated_max_tolerance=0.25).softmax
    scores = torch.tensor([[1.5, 1.25, 0], [1.5, 1.125, 0], [-2, -2.25, -3]])
    assert block_maximum(scores, near).flatten().tolist() == [3, 1.5, 0]


def test_the_published_rule_takes_no_doubling_back_and_counts_a_hidden_block():
    published = PROFILES["fa2"].with_(repeated_max_beta=2.0, repeated_max_rule="published").softmax
    hidden = -torch.inf
    scores = torch.tensor([[9, 9, 1], [9, 8, 1], [-2, -2, -3], [-2, -3, hidden], [hidden] * 3])
    assert block_maximum(scores, published).flatten().tolist() == [18, 9, 0, -2, 0]
    # one hidden key is repeated by no other
    assert block_maximum(torch.tensor([[hidden]]), published).item() == 0
    # off with beta 1, whatever the rule
    off = PROFILES["fa2"].with_(repeated_max_rule="published").softmax
    assert block_maximum(scores, off)[-1].item() == hidden


def test_the_maximum_is_kept_up_to_the_threshold_in_powers_of_two():
    kept = PROFILES["fa2"].with_(rescale_threshold=4.0).softmax
    bits = math.log(2)
    old = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf, 1.0])
    new = torch.tensor([3.9 * bits, 4.1 * bits, 1.0, -torch.inf, 1.0])
    expected = torch.tensor([0.0, 4.1 * bits, 1.0, -torch.inf, 1.0])
    natural, halved = ScoreUnits(1.0, 1.0, None), ScoreUnits(1.0, 0.5, 0.5 * math.log2(math.e))
    assert torch.equal(running_maximum(old, new, kept, natural), expected)
    assert torch.equal(running_maximum(2 * old, 2 * new, kept, halved), 2 * expected)
    assert torch.equal(running_maximum(old, new, PROFILES["fa2"].softmax, natural), new)
    growth = torch.tensor([3.0])
    edge = PROFILES["fa2"].with_(rescale_threshold=float(growth * math.log2(math.e))).softmax
    at_edge = running_maximum(torch.zeros(1), growth, edge, natural)
    assert at_edge == 0.0, "kept at the threshold itself"


def test_every_factor_of_scaled_operands_is_multiplied_back():
    # Operands on a grid with 20 bits and P on FP16's, with factors that differ by 1e6 from
    # block to block: a factor that is left out or taken twice is off by orders of magnitude.
    q, k, v, dout = draw(Shape(2, 4, 2, 96, 160, 32))
    q, dout = (x * torch.logspace(-1, 1, 96).double()[:, None] for x in (q, dout))
    k, v = (x * torch.logspace(1, -1, 160).double()[:, None] for x in (k, v))
    golden = with_gradients(golden_attention, q, k, v, dout)
    for scaling in ("per_block", "per_tensor"):
        found = twin(q, k, v, dout, operands="e5m20", probabilities="fp16", scaling=scaling)
        for name, value in found.items():
            assert (value - golden[name]).norm() <= 2**-10 * golden[name].norm(), name


def test_tf32_rounds_ties_away_from_zero():
    tie = torch.full((1, 1, 1), 1 + 2**-11)
    one = torch.ones(1, 1, 1)
    assert dot(tie, one, "ieee").item() == 1 + 2**-11
    assert dot(tie, one, "tf32").item() == 1 + 2**-10
    assert dot(-tie, one, "tf32").item() == -1 - 2**-10
    assert dot(tie, one, "tf32x3").item() == 1 + 2**-11


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "infinite"])
@pytest.mark.parametrize("mode", ["tf32", "tf32x3"])
def test_tf32_of_operands_that_it_holds_has_the_bits_of_rounded_ones(mode, finite):
    left, right = (x.bfloat16().float() for x in torch.randn(2, 3, 40, 40))
    # whose products vanish, with either sign; a power of two, so that BF16 still holds them
    left[0] *= 2.0**-77
    right[0] *= 2.0**-77
    if not finite:
        left[1, 3, 4], right[1, 5, 6], right[1, 7, 8] = torch.inf, -torch.inf, torch.nan
    found, rounded = dot(left, right, mode + "_held"), dot(left, right, mode)
    assert torch.equal(found.isnan(), rounded.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), rounded.nan_to_num().view(torch.int32))
    numerics = FlashNumerics().with_(dot=mode)
    assert numerics.resolve(torch.bfloat16).product("ds", "k") == mode + "_held"
    assert numerics.with_(ds="fp32").resolve(torch.bfloat16).product("ds", "k") == mode
    assert numerics.resolve(torch.float32).product("q", "k") == mode


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, -126), (torch.float64, -1022)])
def test_the_cubic_is_exact_at_whole_powers_and_0_below_the_smallest_normal(dtype, smallest):
    powers = range(smallest - 40, -smallest + 1)
    found = weights(torch.tensor(powers, dtype=dtype), "exp2_polynomial", ScoreUnits(1.0, 1.0, 1.0))
    assert found.tolist() == [2.0**n if n >= smallest else 0.0 for n in powers]


def test_random_bits_differ_from_head_to_head_sequence_to_sequence_and_block_to_block():
    q, k, v, _ = draw(Shape(1, 1, 1, 16, 32, 16), torch.float32)
    twice = [torch.cat([x, x], dim=2).squeeze(0).transpose(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 16, 32], dtype=torch.int32)
    numerics = PROFILES["golden"].with_(output="bf16", rounding="stochastic")
    packed = flash_attention(
        *twice, numerics=numerics, cu_seqlens_q=offsets, cu_seqlens_k=2 * offsets, engine="twin"
    )
    assert not torch.equal(packed[:16], packed[16:])
    alone = flash_attention(q, k, v, numerics=numerics, engine="twin")
    assert torch.equal(packed[:16], alone.squeeze(0).transpose(0, 1))
    heads = flash_attention(
        *(x.expand(1, 2, -1, -1) for x in (q, k, v)), numerics=numerics, engine="twin"
    )
    assert torch.equal(heads[:, :1], alone)
    assert not torch.equal(heads[:, :1], heads[:, 1:])
    rounded = Rounder(numerics.with_(scores="bf16", statistics="bf16"), heads=1, draws=draws_of(0))
    tile = torch.full((1, 64, 64), 1 + 2**-9)
    drawn = [
        rounded(tile, point, range(64), range(64), step)
        for point, step in (("p", 0), ("p", 16), ("scores", 0))
    ]
    for other in drawn[1:]:
        # Each goes up in a quarter of the places, so two agree in 10/16: 2560, give or take 31.
        assert (drawn[0] == other).sum().item() == pytest.approx(2560, abs=155)
