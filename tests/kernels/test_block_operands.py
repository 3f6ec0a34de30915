"""Operands of attention in blocks: as `round_blocks` has them, head by head, in both engines."""

import pytest
import torch

from attention_kernels import (
    PROFILES,
    BaselineNumerics,
    FlashNumerics,
    flash_attention,
    golden_attention,
)
from attention_kernels.block_recipes import BLOCK_RECIPES
from attention_kernels.block_scaling import dequantize, quantize, round_blocks
from attention_kernels.operands import prepare
from attention_kernels.rounding import round_to

TAKEN = [name for name, recipe in BLOCK_RECIPES.items() if recipe.scales != "fp32"]
AXES = {"q": -1, "k": -1, "v": -2, "dout": -1}


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 7, shape[:2], generator=generator).float())
    return (torch.randn(shape, generator=generator) * sizes[..., None, None]).to(dtype)


def numerics(operands, dtype=torch.float32, **changes):
    return FlashNumerics().with_(operands=operands, **changes).resolve(dtype)


def restored(operand, block):
    rows = operand.values.shape[2]
    by_row = operand.scales.repeat_interleave(block, dim=2)[:, :, :rows, None]
    return operand.values.double() * by_row.double()


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("recipe", [*TAKEN, "mxfp4-even"])
def test_each_head_is_quantized_by_itself_along_the_axis_that_is_summed(recipe, name):
    x = draw(2, 3, 37, 40)
    operand = prepare(x, name, numerics(recipe), 16)
    assert operand.values.dtype == torch.bfloat16
    assert operand.scales.shape == (2, 3, 3)
    for batch in range(2):
        for head in range(3):
            found = quantize(x[batch, head], recipe, AXES[name], partial=True)
            tensor_scale = 1.0 if found.tensor_scale is None else found.tensor_scale
            exact = round_blocks(x[batch, head].double(), recipe, AXES[name], partial=True)
            assert (operand.scales[batch, head] == tensor_scale).all()
            assert torch.allclose(
                restored(operand, 16)[batch, head], exact, rtol=1e-6, atol=1e-9 * exact.abs().max()
            )
            # the product of element and scale is exact in BF16: its FP32 twin has the same value
            whole = found._replace(tensor_scale=None)
            values = operand.values[batch, head].float()
            assert torch.equal(values, dequantize(whole))


@pytest.mark.parametrize(
    ("recipe", "causal"), [("mxfp8", False), ("nvfp4", True), ("nvfp4", False)]
)
def test_attention_is_golden_on_the_operands_that_the_recipe_gives(recipe, causal):
    q, k, v = (draw(1, 4, 70, 40, seed=s).double() / 8 for s in range(3))
    k, v = k[:, :2], v[:, :2]
    exact = PROFILES["golden"].with_(operands=recipe, block_q=16, block_k=32)
    named = zip((q, k, v), ("q", "k", "v"), strict=True)
    rounded = [restored(prepare(x, name, exact.resolve(x.dtype), 16), 16) for x, name in named]
    assert (rounded[0] - q).norm() > 0.01 * q.norm()
    wanted = golden_attention(*rounded, causal=causal)
    for engine in ("twin", "triton"):
        out = flash_attention(q, k, v, causal=causal, numerics=exact, engine=engine)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_both_engines_have_the_same_gradients(recipe):
    exact = PROFILES["golden"].with_(operands=recipe, block_q=16, block_k=32)
    x = [draw(1, 2, 40, 24, seed=s).double() / 8 for s in range(3)]
    grads = {}
    for engine in ("twin", "triton"):
        inputs = [y.clone().requires_grad_() for y in x]
        out = flash_attention(*inputs, causal=True, numerics=exact, engine=engine)
        out.backward(draw(1, 2, 40, 24, seed=3).double())
        grads[engine] = [y.grad for y in inputs]
    for what, one, other in zip("qkv", grads["twin"], grads["triton"], strict=True):
        assert one.norm() > 0
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-12, msg=f"d{what}")


@pytest.mark.slow
def test_a_compiled_model_has_the_bits_of_an_eager_one():
    q, k, v = (draw(1, 2, 40, 32, seed=s, dtype=torch.bfloat16) for s in range(3))
    used = FlashNumerics().with_(operands="nvfp4", block_q=16, block_k=16)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, numerics=used, engine="twin")

    assert torch.equal(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))


def test_a_rotation_comes_before_the_blocks():
    x = draw(1, 1, 4, 64)
    plain, rotated = (prepare(x, "q", numerics("nvfp4", incoherent=i), 16) for i in (False, True))
    turned = prepare(x, "q", numerics("fp32", incoherent=True), 16).values
    assert torch.equal(rotated.values, prepare(turned, "q", numerics("nvfp4"), 16).values)
    assert not torch.equal(plain.values, rotated.values)


def test_stochastic_rounding_draws_by_place_and_tensor():
    x = draw(1, 2, 32, 32)
    drawn = [
        prepare(x, name, numerics("mxfp4", rounding="stochastic", seed=seed), 16).values
        for name, seed in (("q", 0), ("q", 0), ("k", 0), ("q", 1))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])
    # a row that is quantized with fewer others draws the same
    part = prepare(x[:, :, :16], "q", numerics("mxfp4", rounding="stochastic"), 16).values
    assert torch.equal(part, drawn[0][:, :, :16])


def test_probabilities_fill_their_format_as_with_scaled_operands():
    assert numerics("nvfp4", probabilities="e4m3").probability_scale() == 256
    assert numerics("fp32", probabilities="e4m3").probability_scale() == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(bad):
    x = draw(1, 1, 20, 16)
    x[0, 0, 3, 3] = bad
    with pytest.raises(ValueError, match="flash_attention: k must be finite when its scaling is"):
        prepare(x, "k", numerics("mxfp8"), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"probabilities": "nvfp4"},
            "probabilities must be a format, got 'nvfp4'; the operands of",
        ),
        (
            {"scores": "mxfp8"},
            "ForwardNumerics: scores must be a format, got 'mxfp8'; the",
        ),
        ({"ds": "mxfp8"}, "BackwardNumerics: ds must be a format, got 'mxfp8'; the operands of"),
        ({"operands": "deepseek_1x128"}, "whose FP32 scales do not fit into operands of 16 bits"),
        ({"operands": "nvfp5"}, "ForwardNumerics: operands must be a format, got 'nvfp5'"),
        ({"operands": ["nvfp4"]}, "operands must be a format, got "),
        (
            {"operands": "nvfp4", "scaling": "per_block"},
            "scaling must be 'none' with operands 'nvfp4', which have scales of their own",
        ),
    ],
)
def test_blocks_where_none_are_taken_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FlashNumerics().with_(**changes)


def test_the_baseline_and_packed_sequences_take_no_blocks():
    with pytest.raises(ValueError, match="BaselineNumerics: operands must be a format, got"):
        BaselineNumerics(operands="nvfp4")
    x = draw(1, 2, 20, 16)[0].transpose(0, 1)
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"operands must be a format with packed sequences.*nvfp4"):
        flash_attention(
            x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, numerics=numerics("nvfp4"), engine="twin"
        )


def test_the_work_format_and_the_grid_of_operands_are_those_of_their_products():
    resolved = numerics("nvfp4")
    assert resolved.work_format == "fp32"
    assert resolved.format_at("q") == "bf16"
    values = prepare(draw(1, 1, 20, 32), "q", resolved, 16).values.float()
    assert torch.equal(round_to(values, "bf16"), values)
