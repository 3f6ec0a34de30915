"""Modules that a recipe of linear layers computes: which, from what, and with which random bits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_kernels import baseline_attention
from attention_kernels.linear_recipes import LINEAR_RECIPES, linear_recipe_named
from attention_kernels.recipe_linear import recipe_linear
from stability.config.model import layer_names
from stability.config.precision import parse_precision
from stability.config.schema import ModelConfig
from stability.model.decoder import build_decoder
from stability.model.initial_weights import initialise
from stability.model.module_precision import attention_in_default, with_module_precision
from stability.model.precision import precision_plugins
from stability.probe.rounding_keys import RoundingKeys
from tests.stability.model.looked_at import trained

CPU = torch.device("cpu")
TOKENS = torch.arange(32).view(2, 16) % 64


def _model(text, keys=None, depth=2, builder="gpt2", seen=None):
    """Return a decoder whose modules compute as its run's, by `keys`."""
    config = ModelConfig(depth=depth, width=32, heads=2, context=16, vocab_size=64, builder=builder)
    precision = parse_precision(text).over(layer_names(depth))

    def attend(q, k, v, **options):
        if seen is not None:
            seen.append((q.dtype, k.dtype, v.dtype))
        return baseline_attention(q, k, v, **options)

    model = build_decoder(config, [attention_in_default(attend, precision, CPU)] * depth)
    initialise(model, 1, config)
    key_of = () if keys is None else (keys.of_module,)
    with_module_precision(model, precision, CPU, *key_of)
    return model


def _trained(model, look=()):
    """Train once; return gradients and x, y, dx and dy of each module that is looked at."""
    _, seen = trained(model, TOKENS, torch.autocast("cpu", torch.bfloat16), look)
    return {n: p.grad.clone() for n, p in model.named_parameters()}, seen


def _number(model, name):
    return [each for each, _ in model.named_modules()].index(name)


@pytest.mark.parametrize("recipe", ["nvfp4", "all=mxfp4 dgrad=fp8_per_row-e5m2+stochastic/mxfp8"])
def test_a_module_is_computed_by_the_recipe_from_what_the_default_gives_it(recipe):
    keys = RoundingKeys(seed=7, step=3, call=1, first_batch=4)
    model = _model(f"bf16-mixed, *.mlp_*=recipe:{recipe}", keys)
    look = ["blocks.layer_1.mlp_up", "blocks.layer_1.mlp_residual", "blocks.layer_0.query"]
    grads, seen = _trained(model, look)
    for name in look[:2]:
        found, linear = seen[name], model.get_submodule(name)
        x, weight, bias = (
            t.detach().requires_grad_() for t in (found["x"], linear.weight, linear.bias)
        )
        key = (7, 3, _number(model, name), 1, 4, 0, 0)
        y = recipe_linear(x, weight, bias, linear_recipe_named(recipe), rounding_key=key)
        assert torch.equal(found["y"], y)
        assert found["y"].dtype == torch.bfloat16
        y.backward(found["dy"])
        if name == look[1]:  # the x of the other has gradients of its own alone
            assert torch.equal(found["dx"], x.grad)
        assert torch.equal(grads[f"{name}.weight"], weight.grad)
        assert torch.equal(grads[f"{name}.bias"], bias.grad)
    # GELU between them computes in BF16, as in the default
    assert seen[look[1]]["x"].dtype == torch.bfloat16
    query = seen[look[2]]
    weight, bias = (p.bfloat16() for p in model.get_submodule(look[2]).parameters())
    assert torch.equal(query["y"], F.linear(query["x"].bfloat16(), weight, bias))


def _computed_so(model):
    """The names of the modules that multiply otherwise than in the default."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("builder", ["gpt2", "llama"])
def test_a_recipe_of_all_leaves_out_the_last_blocks_the_output_and_the_embeddings(builder):
    model = _model("recipe:nvfp4, *.query=fp32", depth=8, builder=builder)
    inside = {n for n, _ in model.named_modules() if n.startswith("blocks.layer_")}
    left_out = {name for name in inside if name.startswith(("blocks.layer_6", "blocks.layer_7"))}
    assert _computed_so(model) == inside - left_out | {n for n in left_out if n.endswith(".query")}
    seen = []
    model = _model("recipe:mxfp8", depth=2, builder=builder, seen=seen)
    inside = {n for n, _ in model.named_modules() if n.startswith("blocks.layer_")}
    assert _computed_so(model) == inside
    logits = {}
    model.register_forward_hook(lambda m, a, out: logits.update(out=out))
    ends = {}
    model.final_norm.register_forward_hook(lambda m, a, out: ends.update(x=out))
    _trained(model)
    output = getattr(model, "lm_head", model.token_embedding).weight
    expected = F.linear(ends["x"].bfloat16(), output.bfloat16())
    assert torch.equal(logits["out"], expected), "the output is in BF16"
    assert seen == [(torch.bfloat16,) * 3] * 2, "and so is attention"


def test_a_step_draws_anew_and_a_repeated_one_again_wherever_it_stands():
    keys = RoundingKeys(seed=1, step=0, call=0)
    model = _model("bf16-mixed, blocks.*=recipe:nvfp4", keys)
    name, found = "blocks.layer_0.mlp_residual.weight", []
    for step, call in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        keys.step, keys.call = step, call
        found.append(_trained(model)[0][name])
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(found[i], found[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    keys.seed = 2
    assert not torch.equal(_trained(model)[0][name], found[0])


def test_modules_draw_bits_of_their_own():
    numbers = []

    def key_of(number):
        numbers.append(number)
        return (0, 0, number, 0)

    model = _model("bf16-mixed, blocks.*=recipe:nvfp4", SimpleNamespace(of_module=key_of))
    _trained(model)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert {_number(model, name) for name in linear} <= set(numbers)
    assert len(set(numbers)) == len(numbers), "each module has a number of its own"


def test_without_keys_each_call_draws_the_same():
    model = _model("bf16-mixed, blocks.*=recipe:nvfp4")
    first, again = _trained(model)[0], _trained(model)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_blocks_that_are_recomputed_in_the_backward_draw_the_same_bits():
    keys = RoundingKeys(seed=1, step=5, call=0)
    plain = _trained(_model("recipe:nvfp4", keys, depth=3))[0]
    model = _model("recipe:nvfp4", keys, depth=3)
    for block in model.blocks.values():

        def recomputed(x, attention, forward=block.forward):
            return checkpoint(forward, x, attention, use_reentrant=False)

        block.forward = recomputed
    found = _trained(model)[0]
    assert all(torch.equal(plain[name], found[name]) for name in plain)


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        return F.linear(x, self.weight), F.linear(x, self.weight)


def test_two_products_of_one_forward_draw_bits_of_their_own():
    model = nn.ModuleDict({"own": _Twice()})
    keys = RoundingKeys(seed=1, step=5, call=0)
    precision = parse_precision("bf16-mixed, own=recipe:nvfp4")
    with_module_precision(model, precision, CPU, keys.of_module)
    values = torch.linspace(-5.9, 6, 64).view(4, 16)
    grads = []
    for _ in range(2):
        xs = torch.zeros(4, 16, requires_grad=True)
        first, second = model["own"](xs)
        grads.append([torch.autograd.grad(y, xs, values.bfloat16())[0] for y in (first, second)])
    assert not torch.equal(*grads[0])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "counted in one forward"


def test_what_is_no_linear_layer_computes_as_the_default_does():
    seen = []

    class Own(_Twice):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            return super().forward(x)

    for default in ("bf16-mixed", "16-mixed", "emulated:e5m2"):
        model = nn.ModuleDict({"own": Own()})
        with_module_precision(model, parse_precision(f"{default}, own=recipe:mxfp8"), CPU)
        model["own"](torch.ones(4, 16))
    assert seen == [torch.bfloat16, torch.float16, False]


@pytest.mark.parametrize("default", ["16-mixed", "emulated:e5m2"])
def test_a_recipe_beside_another_default_gives_bf16_and_is_rounded_by_it_alone(default):
    model = _model(f"{default}, *.mlp_up=recipe:mxfp8")
    name, found = "blocks.layer_0.mlp_up", {}
    linear = model.get_submodule(name)
    linear.register_forward_hook(lambda m, a, out: found.update(x=a[0], y=out))
    with precision_plugins(default, CPU)[0].forward_context():
        model(TOKENS)
    expected = recipe_linear(found["x"], linear.weight, linear.bias, LINEAR_RECIPES["mxfp8"])
    assert torch.equal(found["y"], expected)
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("multiply", "name"),
    [
        (lambda x, w: x @ w, "matmul"),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), "einsum"),
    ],
)
def test_a_product_that_a_recipe_would_not_compute_is_refused(multiply, name):
    class Own(_Twice):
        def forward(self, x):
            return multiply(x, self.weight)

    model = nn.ModuleDict({"own": Own()})
    with_module_precision(model, parse_precision("bf16-mixed, own=recipe:mxfp8"), CPU)
    with pytest.raises(ValueError, match=f"own must multiply by F.linear alone .* got .*{name}"):
        model["own"](torch.ones(16, 16))


def test_a_recipe_of_a_module_that_multiplies_nothing_is_refused():
    message = r"\*_norm must name a module that multiplies where it is recipe:nvfp4, got blocks"
    with pytest.raises(ValueError, match=message):
        _model("bf16-mixed, *_norm=recipe:nvfp4")
    with pytest.raises(ValueError, match=r"\*.mpl must name a module of the model, got none"):
        _model("bf16-mixed, *.mpl=recipe:nvfp4")


def test_a_recipe_asks_for_no_loss_scaler():
    assert precision_plugins("recipe:nvfp4", CPU) == []
    assert precision_plugins("bf16-mixed, x=recipe:fp8_current", CPU) == []
    assert precision_plugins("bf16-mixed, x=recipe:all=mxfp4", CPU) == []
    for text in ("recipe:all=e5m2", "bf16-mixed, x=recipe:all=mxfp4 output=fp16"):
        assert [each.precision for each in precision_plugins(text, CPU)] == ["16-mixed"]
