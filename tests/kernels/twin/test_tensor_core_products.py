"""The twin multiplies as the tensor core that `dot` names, and adds into its accumulator."""

import math

import pytest
import torch

from attention_kernels import PROFILES, FlashNumerics, flash_attention, golden_attention, round_to
from attention_kernels.tensor_core import tensor_core_matmul
from attention_kernels.tensor_core_models import MODELS
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, with_gradients

FP8 = {"operands": "e4m3", "probabilities": "e4m3", "ds": "e5m2"}
WIDE = {"output": "fp32", "gradients": "fp32"}
SCALE = 0.125


def numerics_of(dot, **changes):
    """No scaling and one row of blocks of 32, with results that are not rounded."""
    formats = FP8 if dot.endswith("fp8") else dict.fromkeys(FP8, MODELS[dot].operands[0])
    return FlashNumerics().with_(dot=dot, block_q=32, block_k=32, **formats, **WIDE | changes)


def draw(dot, length=64, seed=0):
    draws = torch.Generator().manual_seed(seed)
    format = "e4m3" if dot.endswith("fp8") else MODELS[dot].operands[0]
    return [round_to(torch.randn(1, 1, length, 48, generator=draws), format) for _ in range(4)]


def matmul(a, b, dot, c=None, formats=None):
    return tensor_core_matmul(a, b, MODELS[dot], c=c, formats=formats)


def attended(q, k, v, dot, formats):
    """The recurrence over key blocks of 32, in the words of the kernels' README: out and lse."""
    rows = len(q)
    largest, total, acc = (
        torch.full((rows, 1), -torch.inf),
        torch.zeros(rows, 1),
        torch.zeros(rows, 48),
    )
    for start in range(0, len(k), 32):
        keys = slice(start, start + 32)
        scores = matmul(q, k[keys].T.contiguous(), dot) * SCALE
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        p, alpha = torch.exp(scores - new), torch.exp(largest - new)
        total = total * alpha + p.sum(1, keepdim=True)
        p = round_to(p, formats[0])
        acc = matmul(p, v[keys], dot, acc * alpha, formats)
        largest = new
    return acc / total, largest + total.log()


DOTS = ["hopper_fp8", "ada_fp8", "ampere_bf16", "hopper_tf32", "volta_fp16"]


@pytest.mark.parametrize("dot", DOTS)
def test_the_forward_adds_p_v_into_the_accumulator_of_the_tensor_core(dot):
    q, k, v, _ = draw(dot, length=96)
    found, lse = flash_attention(
        q, k, v, scale=SCALE, numerics=numerics_of(dot), engine="twin", return_lse=True
    )
    formats = ("e4m3", "e4m3") if dot.endswith("fp8") else (MODELS[dot].operands[0],) * 2
    out, wanted = zip(
        *(attended(q[0, 0, i : i + 32], k[0, 0], v[0, 0], dot, formats) for i in (0, 32, 64)),
        strict=True,
    )
    assert torch.equal(found[0, 0], torch.cat(out))
    assert torch.equal(lse[0, 0], torch.cat(wanted).squeeze(1))


def test_each_dot_gives_bits_of_its_own():
    q, k, v, _ = draw("hopper_fp8", length=256)
    found = {
        dot: flash_attention(
            q, k, v, scale=SCALE, numerics=numerics_of("hopper_fp8").with_(dot=dot), engine="twin"
        )
        for dot in ("ieee", "hopper_fp8", "ada_fp8", "blackwell_fp8")
    }
    names = list(found)
    for at, name in enumerate(names):
        for other in names[at + 1 :]:
            assert not torch.equal(found[name], found[other]), (name, other)
    exact = golden_attention(*(x.double() for x in (q, k, v)), scale=SCALE)
    errors = {name: (x.double() - exact).norm() for name, x in found.items()}
    assert errors["hopper_fp8"] < 1.05 * errors["ieee"], "P in e4m3 errs far more than sums do"


def gradients(q, k, v, dout, dot, p_format, ds_format):
    """dQ, dK, dV of 32 keys and blocks of 32 queries, in the words of the kernels' README."""
    operand = "e4m3" if dot.endswith("fp8") else MODELS[dot].operands[0]
    out, lse = attended(q, k, v, dot, (p_format, operand))
    dq, dk, dv = [], torch.zeros(32, 48), torch.zeros(32, 48)
    for start in range(0, len(q), 32):
        rows = slice(start, start + 32)
        p = torch.exp(matmul(q[rows], k.T.contiguous(), dot) * SCALE - lse[rows])
        dp = matmul(dout[rows], v.T.contiguous(), dot)
        delta = (dout[rows] * out[rows]).sum(1, keepdim=True)
        ds = round_to(p * (dp - delta), ds_format)
        p = round_to(p, p_format)
        dv = matmul(p.T.contiguous(), dout[rows], dot, dv, (p_format, operand))
        dk = matmul(ds.T.contiguous(), q[rows], dot, dk, (ds_format, operand))
        dq.append(matmul(ds, k, dot, None, (ds_format, operand)))
    return torch.cat(dq) * SCALE, dk * SCALE, dv


@pytest.mark.parametrize("dot", ["hopper_fp8", "ampere_bf16", "hopper_tf32"])
def test_the_backward_adds_each_tile_into_the_accumulator_of_the_tensor_core(dot):
    q, k, v, dout = draw(dot, length=96, seed=1)
    k, v = k[:, :, :32], v[:, :, :32]
    found = with_gradients(
        flash_attention, q, k, v, dout, scale=SCALE, numerics=numerics_of(dot), engine="twin"
    )
    names = ("e4m3", "e5m2") if dot.endswith("fp8") else (MODELS[dot].operands[0],) * 2
    wanted = gradients(*(x[0, 0] for x in (q, k, v, dout)), dot, *names)
    for name, x in zip(("dq", "dk", "dv"), wanted, strict=True):
        assert torch.equal(found[name][0, 0], x), name


def scaled(x, rows):
    """Blocks of 32 rows in e4m3, and the factors that take them back: of a block, or of all."""
    peaks = x.abs().unflatten(0, (-1, rows)).amax((1, 2)) / 448.0
    peaks = peaks.repeat_interleave(rows // 32)
    blocks = x.unflatten(0, (-1, 32)) / peaks[:, None, None]
    return round_to(blocks.clamp(-448.0, 448.0), "e4m3"), peaks


@pytest.mark.parametrize("scaling", ["per_block", "per_tensor"])
def test_one_factor_for_a_head_waits_and_those_of_blocks_part_the_sum(scaling):
    draws = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(length, 48, generator=draws) for length in (32, 64, 64))
    numerics = numerics_of("hopper_fp8", scaling=scaling)
    found = flash_attention(
        *(x[None, None] for x in (q, k, v)), scale=SCALE, numerics=numerics, engine="twin"
    )
    whole = scaling == "per_tensor"
    (narrow_q, q_factor), *others = scaled(q, 32), *(scaled(x, 64 if whole else 32) for x in (k, v))
    largest, total, acc = torch.full((32, 1), -torch.inf), torch.zeros(32, 1), torch.zeros(32, 48)
    for narrow_k, k_factor, narrow_v, v_factor in zip(*others[0], *others[1], strict=True):
        scores = matmul(narrow_q[0], narrow_k.T.contiguous(), "hopper_fp8")
        scores = scores * (q_factor * k_factor) * SCALE
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        p, alpha = torch.exp(scores - new), torch.exp(largest - new)
        total = total * alpha + p.sum(1, keepdim=True)
        acc, p = acc * alpha, round_to(p * 256, "e4m3")
        if whole:
            acc = matmul(p, narrow_v, "hopper_fp8", acc)
        else:  # from zero, and added in FP32, which keeps the accumulator's bits
            acc = acc + matmul(p, narrow_v, "hopper_fp8") * (v_factor / 256)
        largest = new
    acc = acc * (others[1][1][0] / 256) if whole else acc
    assert torch.equal(found[0, 0], acc / total)


@pytest.mark.parametrize(
    "changes",
    [
        {"loop_order": "key_outer"},
        {"accumulator": "e8m22"},
        {"block_output": "e8m22"},
        {"splits": 2},
    ],
    ids=["key_outer", "accumulator", "block_output", "splits"],
)
def test_a_factor_is_applied_once_and_waits_only_where_nothing_else_is_rounded(changes):
    q, k, v, _ = draw("hopper_fp8", length=512, seed=5)
    q, v = q[:, :, :32], 0.01 * v.abs()
    numerics = numerics_of("hopper_fp8", scaling="per_tensor", **changes)
    found, wanted = (
        flash_attention(q, k, v, scale=SCALE, numerics=numerics.with_(dot=dot), engine="twin")
        for dot in ("hopper_fp8", "ieee")
    )
    # of a positive v the accumulator's 13 bits lose more the longer products go through it
    lost = 1 - found.sum() / wanted.sum()
    waits = "splits" in changes
    assert (0.001 < lost < 0.01) if waits else (abs(lost) < 0.0003)


def test_ds_that_does_not_fit_goes_to_the_wider_tensor_core():
    numerics = PROFILES["fa3_fp8"].with_(dot="hopper_fp8").resolve(torch.bfloat16)
    assert numerics.product("q", "k") == (MODELS["hopper_fp8"], ("e4m3", "e4m3"))
    assert numerics.product("probabilities", "v").model is MODELS["hopper_fp8"]
    assert numerics.product("ds", "k") == (MODELS["hopper_bf16"], ("bf16", "e4m3"))
    assert PROFILES["fa3_fp8"].resolve(torch.bfloat16).product("ds", "k") == "ieee"
    narrow = numerics.with_(ds="e5m2")
    assert narrow.product("ds", "k") == (MODELS["hopper_fp8"], ("e5m2", "e4m3"))


@pytest.mark.parametrize(
    ("profile", "changes"),
    [
        ("fa2", {"dot": "hopper_bf16"}),
        ("fa1", {"dot": "ampere_bf16", "splits": 1}),
        ("fa2", {"dot": "ampere_bf16", "splits": 2, "block_output": "bf16"}),
        ("fa2", {"dot": "hopper_tf32", "gradient_products": "fp16"}),
    ],
    ids=["hopper_bf16", "key_outer", "splits", "tf32"],
)
def test_every_way_through_the_twin_keeps_the_budget(profile, changes):
    draws = torch.Generator().manual_seed(3)
    tensors = list(make_qkv(Shape(1, 2, 1, 65, 130, 40), torch.bfloat16, draws))
    tensors.append(torch.randn(1, 2, 65, 40, generator=draws).bfloat16())
    numerics = PROFILES[profile].with_(**changes)
    found = with_gradients(flash_attention, *tensors, causal=True, numerics=numerics, engine="twin")
    wide = [x.double() for x in tensors]
    golden = with_gradients(golden_attention, *wide, causal=True)
    usual = with_gradients(
        flash_attention, *tensors, causal=True, engine="twin",
        numerics=numerics.with_(dot="ieee"),
    )  # fmt: skip
    for name in golden:
        assert_within_budget(found[name], usual[name], golden[name], 1.5, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dot": "hopper_fp8"}, "operands must be a format that fits into e4m3, e5m2 with dot"),
        (
            {"dot": "hopper_fp8", "operands": "e4m3"},
            "probabilities must be a format that fits into e4m3, e5m2 with dot 'hopper_fp8', got "
            "'bf16'",
        ),
        (
            {"dot": "ada_fp8", "operands": "e4m3", "probabilities": "e5m2", "ds": "fp16"},
            "ds must be a format that fits into e4m3, e5m2, bf16 with dot 'ada_fp8', got 'fp16'",
        ),
        (
            {"dot": "hopper_fp8", "operands": "nvfp4", "probabilities": "e4m3"},
            "operands must be a format that fits into e4m3, e5m2 with dot 'hopper_fp8', got 'bf16'",
        ),
        ({"dot": "hopper_fp16"}, "operands must be a format that fits into fp16"),
        ({"dot": "hopper_bf16", "accumulator": "fp64"}, "dot must be 'ieee' where the work format"),
    ],
)
def test_operands_that_a_tensor_core_does_not_take_are_refused(changes, message):
    q, k, v = (x.bfloat16() for x in draw("ampere_bf16")[:3])
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, numerics=PROFILES["fa2"].with_(**changes), engine="twin")


def test_triton_runs_on_the_chip_at_hand_and_no_other():
    q, k, v = (x.bfloat16() for x in draw("ampere_bf16")[:3])
    numerics = PROFILES["fa2"].with_(dot="hopper_bf16")
    message = "triton: dot must be ieee, tf32 or tf32x3, got 'hopper_bf16'; .* engine='twin'"
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, numerics=numerics, engine="triton")


def test_a_row_that_attends_nothing_stays_empty():
    q, k, v, dout = draw("hopper_fp8", length=40)
    numerics = numerics_of("hopper_fp8")
    padding = torch.zeros(1, 40, dtype=torch.bool)
    found = with_gradients(
        flash_attention, q, k, v, dout, key_padding=padding, numerics=numerics, engine="twin"
    )
    assert all((x == 0).all() for x in found.values())
    assert math.isfinite(found["dq"].sum())
