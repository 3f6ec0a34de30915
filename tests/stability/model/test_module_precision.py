"""A module computes in the precision that names it: held against casts and formulas of torch's.

The references know nothing of the code under test: FP8 is torch's own cast, BF16 its autocast.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_kernels import baseline_attention
from attention_kernels.formats import format_named
from stability.config.precision import parse_precision
from stability.config.schema import ModelConfig
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.module_precision import (
    attention_in_default,
    in_module_precision,
    with_module_precision,
)
from stability.model.precision import EmulatedLinear, precision_plugins
from tests.stability.model.looked_at import trained

CPU = torch.device("cpu")
CONFIG = ModelConfig(depth=2, width=32, heads=2, context=16, vocab_size=64)
TOKENS = torch.arange(32).view(2, 16) % 64


def _gpt(text, seen=None):
    """Return a GPT of the precision `text` and the context that its run calls it in."""
    precision = parse_precision(text)

    def attend(q, k, v, **options):
        if seen is not None:
            seen.append((q.dtype, k.dtype, v.dtype))
        return baseline_attention(q, k, v, **options)

    attention = [attention_in_default(attend, precision, CPU)] * CONFIG.depth
    model = GPT(CONFIG, attention)
    initialise(model, 1)
    with_module_precision(model, precision, CPU)
    plugins = precision_plugins(text, CPU)
    around = plugins[0].forward_context() if plugins else torch.autocast("cpu", torch.bfloat16)
    return model, nullcontext() if text == "32-true" else around


def _trained(text, look=()):
    """Return logits, gradients, and x, y, dx and dy of each module that is looked at."""
    model, around = _gpt(text)
    logits, seen = trained(model, TOKENS, around, look)
    return logits, {n: p.grad for n, p in model.named_parameters()}, seen, model


def _e4m3(x):
    return x.to(torch.float8_e4m3fn).float()


def test_an_emulated_module_is_torchs_own_fp8_cast_around_an_fp32_product():
    name = "blocks.layer_1.mlp_residual"
    _, grads, seen, model = _trained("bf16-mixed, *.mlp_*=emulated:e4m3", [name])
    found, linear = seen[name], model.get_submodule(name)
    x, weight, bias = (_e4m3(t.float()) for t in (found["x"], linear.weight, linear.bias))
    # products of two values of 4 bits are exact in FP32; only the order of additions is torch's
    torch.testing.assert_close(found["y"], _e4m3(x @ weight.T + bias), rtol=0, atol=0)
    dy = _e4m3(found["dy"].float()).flatten(0, 1)
    expected = _e4m3(dy.T @ x.flatten(0, 1)), _e4m3(dy.sum(0))
    assert torch.equal(grads[f"{name}.weight"], expected[0])
    assert torch.equal(grads[f"{name}.bias"], expected[1])
    assert found["y"].unique().numel() > 3


def test_modules_that_no_glob_names_stay_in_autocast():
    look = ["blocks.layer_0.query", "blocks.layer_0.mlp_up"]
    _, _, seen, model = _trained("bf16-mixed, *.mlp_*=emulated:e4m3", look)
    query = seen[look[0]]
    weight, bias = (p.bfloat16() for p in (model.blocks["layer_0"].query.parameters()))
    assert query["y"].dtype == torch.bfloat16
    assert torch.equal(query["y"], F.linear(query["x"].bfloat16(), weight, bias))
    assert seen[look[1]]["y"].dtype == torch.float32


@pytest.mark.parametrize("value", ["bf16", "fp16"])
def test_every_module_in_one_format_is_that_mixed_precision_to_the_bit(value):
    whole = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[value]
    logits, grads, *_ = _trained(whole)
    own, own_grads, *_ = _trained(f"{whole}, *={value}")
    assert torch.equal(logits, own)
    assert all(torch.equal(grads[name], own_grads[name]) for name in grads)


def test_a_module_in_emulated_bf16_differs_from_native_by_the_order_of_additions_alone():
    name = "blocks.layer_0.mlp_up"
    _, _, native, _ = _trained("bf16-mixed", [name])
    _, _, emulated, model = _trained(f"bf16-mixed, {name}=emulated:bf16", [name])
    native, emulated = native[name], emulated[name]
    assert torch.equal(native["x"], emulated["x"])
    # products are exact in FP32; a sum of 32 of them and a bias is off by at most 33 * 2^-24 of
    # sum |x||w|, and rounded to BF16 that may turn one tie: one unit of 2^-8 of the result
    linear = model.get_submodule(name)
    size = native["x"].abs().float() @ linear.weight.abs().T + linear.bias.abs()
    bound = 2**-8 * native["y"].abs().float() + 33 * 2**-24 * size
    assert ((native["y"].float() - emulated["y"]).abs() <= bound).all()
    assert torch.equal(emulated["y"], emulated["y"].bfloat16().float())


def test_a_module_in_fp32_is_given_what_autocast_lowered_and_multiplies_fp32():
    name = "blocks.layer_0.attention_residual"
    _, grads, seen, model = _trained(f"bf16-mixed, {name}=fp32", [name])
    found, linear = seen[name], model.get_submodule(name)
    assert found["x"].dtype == torch.bfloat16  # the attention's output, before it is widened
    assert torch.equal(found["y"], F.linear(found["x"].float(), linear.weight, linear.bias))
    dy = found["dy"].flatten(0, 1)
    assert torch.equal(grads[f"{name}.weight"], dy.T @ found["x"].float().flatten(0, 1))


def test_a_block_in_fp32_holds_for_all_inside_but_its_attention():
    calls = []
    model, around = _gpt("bf16-mixed, blocks.layer_0=fp32", calls)
    outs = {}
    for name in ("query", "mlp_up"):
        module = model.get_submodule(f"blocks.layer_0.{name}")
        module.register_forward_hook(lambda m, a, out, name=name: outs.update({name: out.dtype}))
    with around:
        model(TOKENS)
    assert set(outs.values()) == {torch.float32}
    assert calls == [(torch.bfloat16,) * 3] * 2


@pytest.mark.parametrize("inner", ["fp32", "bf16", "emulated:e5m2"])
def test_a_module_inside_an_emulated_one_is_rounded_as_it_alone_says(inner):
    name = "blocks.layer_0.mlp_up"
    _, _, seen, model = _trained(f"emulated:e4m3, blocks=emulated:e4m3, {name}={inner}", [name])
    found, linear = seen[name], model.get_submodule(name)
    x, (weight, bias) = found["x"], linear.parameters()
    expected = {
        "fp32": lambda: F.linear(x, weight, bias),
        "bf16": lambda: F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()),
        "emulated:e5m2": lambda: _e5m2(F.linear(_e5m2(x), _e5m2(weight), _e5m2(bias))),
    }[inner]()
    assert torch.equal(found["y"], expected)


def _e5m2(x):
    return x.to(torch.float8_e5m2).float()


def test_emulation_ends_with_the_module():
    model, around = _gpt("bf16-mixed, *.mlp_up=emulated:e4m3")
    with around:
        model(TOKENS)
    off_grid = torch.tensor([0.3])
    assert F.linear(off_grid, torch.ones(1, 1)).equal(off_grid)
    with EmulatedLinear(format_named("e4m3")):
        assert not F.linear(off_grid, torch.ones(1, 1)).equal(off_grid)
        with EmulatedLinear(None):
            assert F.linear(off_grid, torch.ones(1, 1)).equal(off_grid)


def test_a_module_beside_one_in_bf16_is_given_fp32_where_it_emulates():
    name = "blocks.layer_0.mlp_residual"
    _, _, seen, model = _trained("emulated:e5m2, *.mlp_up=bf16", [name])
    found, (weight, bias) = seen[name], model.get_submodule(name).parameters()
    assert found["x"].dtype == torch.bfloat16
    expected = _e5m2(F.linear(_e5m2(found["x"].float()), _e5m2(weight), _e5m2(bias)))
    assert torch.equal(found["y"], expected)


class _Own(nn.Module):
    def __init__(self, multiply):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.multiply = multiply

    def forward(self, x):
        return self.multiply(x, self.weight)


@pytest.mark.parametrize(
    ("multiply", "name"),
    [
        (lambda x, w: x @ w, "matmul"),
        (lambda x, w: torch.addmm(x, x, w), "addmm"),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), "einsum"),
    ],
)
def test_a_product_that_emulation_would_not_round_is_refused(multiply, name):
    model = nn.ModuleDict({"own": _Own(multiply)})
    with_module_precision(model, parse_precision("bf16-mixed, own=emulated:e4m3"), CPU)
    with pytest.raises(ValueError, match=f"own must multiply by F.linear alone .* got .*{name}"):
        model["own"](torch.ones(4, 4))
    plain = nn.ModuleDict({"own": _Own(multiply)})
    with_module_precision(plain, parse_precision("bf16-mixed, own=fp32"), CPU)
    assert plain["own"](torch.ones(4, 4).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bf16-mixed, *.mpl_up=fp32",
            r"\*.mpl_up must name a module of the model, got none; nearest: .*mlp_up",
        ),
        (
            "bf16-mixed, *_norm=emulated:e4m3",
            "_norm must name a module that multiplies where it is emulated:e4m3, got blocks.layer_0"
            ".attention_norm, .*; nothing there would be rounded",
        ),
    ],
)
def test_a_glob_that_names_nothing_to_compute_so_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        _gpt(text)


def test_a_model_computes_as_before_once_its_precision_is_left():
    model, around = _gpt("bf16-mixed")
    precision = parse_precision("bf16-mixed, *.mlp_*=fp32")
    with around:
        before = model(TOKENS)
        with in_module_precision(model, precision, CPU):
            inside = model(TOKENS)
        assert torch.equal(model(TOKENS), before)
    assert not torch.equal(inside, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_text_without_globs_touches_no_module():
    model, _ = _gpt("bf16-mixed")
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("text", "has_scaler"),
    [
        ("bf16-mixed, *.mlp_up=emulated:e4m3", True),
        ("emulated:bf16, *.mlp_up=fp32", False),
        ("emulated:bf16, *.mlp_up=fp16", True),
        ("16-mixed, *.mlp_up=fp32", True),
    ],
)
def test_the_loss_is_scaled_where_a_format_is_narrow(text, has_scaler):
    (plugin,) = precision_plugins(text, CPU)
    assert (plugin.scaler is not None) is has_scaler
