"""Gradients of what belongs to the mask: T5's position bias, biases of SDPA, GPT-OSS's sinks."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.models.t5 import modeling_t5

from attention_kernels import baseline_attention, golden_attention
from stability import shadow
from stability.intercept.attention_call import attention_call
from stability.intercept.doors import catch_attention
from stability.intercept.gradients import CaughtGradients
from stability.intercept.replacement import Replacement
from stability.intercept.transformers_candidate import register_transformers
from stability.probe.attention_registry import resolve_attention

LAYERS = {
    **{f"encoder.block.{i}.layer.0.SelfAttention": True for i in range(2)},
    **{f"decoder.block.{i}.layer.0.SelfAttention": True for i in range(2)},
    **{f"decoder.block.{i}.layer.1.EncDecAttention": False for i in range(2)},
}
"""By layer of the tiny T5, whether what is added to its scores is trained."""


def t5(implementation="eager"):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():  # attention that is far from uniform
        nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation(implementation)
    return model.train()


def train(model):
    ids = 1 + torch.arange(24).reshape(2, 12)
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[1, -3:] = 0
    labels = 1 + torch.arange(18).reshape(2, 9)
    loss = model(input_ids=ids, attention_mask=padding, labels=labels).loss
    loss.backward()
    return loss


def watched(model, candidate: Any = "flash:golden", **options: Any):
    with shadow(model, candidate, heads=True, **options) as probe:
        loss = train(model)
        probe.step()
    return loss, probe


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_layer_of_t5_is_looked_at_with_its_bias_and_changed_by_nothing(implementation):
    model = t5(implementation)
    plain = copy.deepcopy(model)
    expected = train(plain)
    loss, probe = watched(model)
    assert torch.equal(loss, expected)
    for (name, own), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert own.grad is not None, name
        assert torch.equal(own.grad, ours.grad), name
    assert sorted(probe.layers) == sorted(LAYERS)
    assert not probe.findings
    for layer, trained in LAYERS.items():
        assert (f"deviation/{layer}/dbias/rel_fro" in probe.metrics) == trained
        for what in ("out", "dq", "dk", "dv", *(["dbias"] if trained else [])):
            assert probe.metrics[f"deviation/{layer}/{what}/golden_baseline_rel_fro"] < 1e-5, what
            for head in range(2):
                gain = probe.metrics[f"deviation/{layer}/head_{head}/{what}/gain"]
                assert abs(gain) < 1e-5, what


def _recorded(monkeypatch):
    """Record each call's tensors and gradients by a function of the model's own, unwatched."""
    calls, own = [], modeling_t5.eager_attention_forward

    def recording(module, query, key, value, attention_mask, position_bias=None, **options):
        given = {"q": query, "k": key, "v": value, "bias": position_bias}
        given = {name: x.view_as(x) for name, x in given.items()}
        for x in given.values():
            if x.requires_grad:
                x.retain_grad()
        q, k, v, bias = given.values()
        out, weights = own(module, q, k, v, attention_mask, position_bias=bias, **options)
        out.retain_grad()
        calls.append((given, attention_mask, out, options["scaling"]))
        return out, weights

    monkeypatch.setattr(modeling_t5, "eager_attention_forward", recording)
    return calls


def _exact(given, attention_mask, out, scaling):
    """Return FP64's results of a call, by a formula of its own: T5's scores are not scaled."""
    leaves = [x.detach().double().requires_grad_() for x in given.values()]
    q, k, v, bias = leaves
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scaling + bias
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask < -1e30, -torch.inf)
    powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    mixed = torch.einsum("bhqk,bhkd->bqhd", powers / powers.sum(-1, keepdim=True), v)
    gradients = torch.autograd.grad(mixed, leaves, out.grad.double())
    return {"out": mixed.transpose(1, 2).detach()} | {
        f"d{name}": x for name, x in zip(given, gradients, strict=True)
    }


def _kept(x):
    """Return the values of the rows that are not padding."""
    return torch.cat([x[0].flatten(), x[1, :, :-3].flatten()])


def test_the_figures_of_t5_are_those_of_an_fp64_formula(monkeypatch):
    model = t5()
    plain = copy.deepcopy(model)
    with monkeypatch.context() as patched:
        calls = _recorded(patched)
        train(plain)
    _, probe = watched(model)
    assert len(calls) == len(LAYERS)
    for layer, (given, mask, out, scaling) in zip(probe.layers, calls, strict=True):
        exact = _exact(given, mask, out, scaling)
        found = {"out": out.transpose(1, 2)} | {f"d{name}": x.grad for name, x in given.items()}
        for what, right in exact.items():
            if found[what] is None:
                assert not LAYERS[layer]
                assert what == "dbias"
                continue
            error = found[what].double() - right
            if layer.startswith("encoder") and what != "dbias":  # rows of padding do not count
                error, right = _kept(error), _kept(right)
            expected = error.norm() / right.norm()
            figure = probe.metrics[f"deviation/{layer}/{what}/golden_baseline_rel_fro"]
            assert figure == pytest.approx(expected.item(), abs=1e-12), (layer, what)
            assert figure > 1e-9


class _Gradient(torch.autograd.Function):
    """The same value, and each head's gradient times a factor."""

    @staticmethod
    def forward(ctx, x, factors):
        ctx.factors = factors
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factors[:, None, None].to(grads[0].dtype), None


def _wrong(fault):
    factors = torch.tensor([1.0, 1.01 if fault == "dbias x 1.01" else 1.001])

    def attend(q, k, v, *, causal, scale=None, attn_mask=None):
        if fault == "dbias x 1.01" and attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = _Gradient.apply(attn_mask, factors)
        elif fault == "scale x 1.001":
            q = q * factors[:, None, None]
        return baseline_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

    return attend


@pytest.mark.parametrize("fault", ["dbias x 1.01", "scale x 1.001"])
def test_a_planted_fault_is_named_at_layer_head_and_result(fault):
    _, probe = watched(t5(), _wrong(fault))
    for layer, trained in LAYERS.items():
        for what in ("out", "dq", "dk", "dv", *(["dbias"] if trained else [])):
            ratios = [
                probe.metrics[f"deviation/{layer}/head_{head}/{what}/error_ratio"]
                for head in range(2)
            ]
            is_wrong = what == "dbias" or fault == "scale x 1.001"
            assert ratios[0] < 5, (layer, what)
            assert (ratios[1] > 100) == is_wrong, (layer, what, ratios)
            if what == "dbias" and fault == "dbias x 1.01":
                gain = probe.metrics[f"deviation/{layer}/head_1/{what}/gain"]
                assert gain == pytest.approx(0.01, abs=1e-5)


def test_a_candidate_that_leaves_the_bias_out_of_its_gradient_is_told():
    def attend(q, k, v, *, causal, scale=None, attn_mask=None):
        attn_mask = None if attn_mask is None else attn_mask.detach()
        return baseline_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

    _, probe = watched(t5(), attend)
    told = {layer for _, layer, text in probe.findings if "no gradient reaches bias" in text}
    assert told == {layer for layer, trained in LAYERS.items() if trained}
    assert len(probe.findings) == len(told)
    assert f"deviation/{next(iter(LAYERS))}/dq/gain" in probe.metrics


def test_a_replaced_t5_trains_its_bias():
    model = t5()
    plain = copy.deepcopy(model)
    train(plain)
    _, probe = watched(model, replace=["*"])
    for (name, own), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (own.grad - ours.grad).norm() <= 1e-4 * own.grad.norm(), name
    assert not probe.findings
    layer = next(iter(LAYERS))
    assert probe.metrics[f"deviation/{layer}/dbias/golden_candidate_rel_fro"] < 1e-6
    with (
        pytest.raises(ValueError, match="direction must be 'both' where a bias is trained"),
        shadow(model, "flash:golden", replace=["*"], direction="backward"),
    ):
        train(model)


def test_a_registered_candidate_trains_the_bias_of_t5():
    model = t5()
    plain = copy.deepcopy(model)
    train(plain)
    model.set_attn_implementation(register_transformers("flash:golden"))
    train(model)
    for (name, own), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (own.grad - ours.grad).norm() <= 1e-4 * own.grad.norm(), name


@pytest.mark.parametrize("is_isolated", [False, True], ids=["as trained", "isolated"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_gradient_of_the_whole_model_goes_through_the_bias(implementation, is_isolated):
    """Isolated, FP32's rounding in attention is all there is to err, and FP64 is around it."""
    model = t5(implementation)

    def loss():
        ids = 1 + torch.arange(24).reshape(2, 12)
        return model(input_ids=ids, labels=ids[:, :9].contiguous()).loss

    candidate = resolve_attention("flash:golden", torch.device("cpu"))
    replacement = Replacement(candidate=candidate, layers=["*"])
    gradients = CaughtGradients(model, loss, replacement, catch_attention)
    found = {role: gradients.of(role, False) for role in ("golden", "baseline", "candidate")}
    if is_isolated:
        found = {role: gradients.of(role, True) for role in found}
        wide = copy.deepcopy(model).double()
        parameters = wide.parameters()
        model, wide_loss = wide, loss()
        exact = torch.autograd.grad(wide_loss, list(parameters), allow_unused=True)
        for (name, _), x in zip(wide.named_parameters(), exact, strict=True):
            if x is not None and x.norm():
                assert (found["golden"][name] - x).norm() <= 3e-6 * x.norm(), name
    names = [name for name in found["golden"] if "relative_attention_bias" in name]
    assert len(names) == 2
    for name in names:
        right = found["golden"][name].double()
        assert right.norm() > 0
        for role in ("baseline", "candidate"):
            assert (found[role][name] - right).norm() <= 1e-5 * right.norm(), (role, name)


class _Biased(nn.Module):
    """SDPA, or attention by hand, with a trained bias that serves both of its calls."""

    def __init__(self, shape, by_hand=False):
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.bias = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
        self._attend = attention_call(self._by_hand) if by_hand else F.scaled_dot_product_attention

    @staticmethod
    def _by_hand(q, k, v, attn_mask):
        return golden_attention(q, k, v, attn_mask=attn_mask).to(q.dtype)

    def forward(self, x):
        for _ in range(2):
            q, k, v = (
                y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.project(x).chunk(3, -1)
            )
            x = self._attend(q, k, v, attn_mask=self.bias).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("by_hand", [False, True], ids=["sdpa", "by hand"])
@pytest.mark.parametrize("shape", [(2, 5, 5), (5, 5), (2, 2, 5, 5), (1, 1, 5)], ids=str)
def test_a_bias_of_sdpa_has_a_gradient_of_its_own_in_each_call(shape, by_hand):
    torch.manual_seed(0)
    model = _Biased(shape, by_hand)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 5, 32)
    plain(x).square().sum().backward()
    with shadow(model, "baseline", heads=True) as probe:
        model(x).square().sum().backward()
        probe.step()
    for own, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.grad, ours.grad)
    assert not probe.findings
    assert len(probe.layers) == 2
    for layer in probe.layers:
        for what in ("dq", "dbias"):
            name = f"deviation/{layer}/{what}/golden_baseline_rel_fro"
            assert probe.metrics[name] < 1e-4, (layer, what)


def test_a_bias_that_cannot_be_told_apart_is_told():
    def attend(q, k, v, added):
        return golden_attention(q, k, v, attn_mask=2 * added).to(q.dtype)

    model = _Biased((5, 5))
    doubled = attention_call(attend, masks=lambda attn_mask: {"attn_mask": 2 * attn_mask})
    model._attend = lambda q, k, v, attn_mask: doubled(q, k, v, attn_mask)
    with shadow(model, "baseline") as probe:
        model(torch.randn(2, 5, 32)).square().sum().backward()
        probe.step()
    said = {text for _, _, text in probe.findings}
    assert said == {"dbias not measured: no gradient of its own is seen"}
    assert all(f"deviation/{layer}/dq/gain" in probe.metrics for layer in probe.layers)
