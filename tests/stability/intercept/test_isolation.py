"""What a candidate does to the world stays with it, and what the model does is not mistaken."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from attention_kernels import baseline_attention, flash_attention
from stability import shadow
from stability.config.schema import ProbeConfig
from stability.probe.attention_probe import AttentionProbe, DualAttention, as_shadows
from stability.probe.attention_registry import resolve_attention
from tests.stability.intercept.torch_models import (
    Decoder,
    tokens,
    train_step,
    unseen,
)

CPU = torch.device("cpu")


def _hook(shadow="flash:all_bf16", **options):
    probe = AttentionProbe(
        ProbeConfig(golden=False, **options),
        as_shadows([resolve_attention(shadow, CPU)]),
        shadow_is_candidate=True,
    )
    probe.arm()
    return DualAttention(layer="x", primary=resolve_attention("baseline", CPU), probe=probe)


def _inputs():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 2, 24, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]


def test_a_candidate_that_draws_numbers_does_not_move_the_runs_generator():
    def draws(q, k, v, *, causal, scale=None):
        return flash_attention(q + torch.randn_like(q), k, v, causal=causal)

    states = []
    for candidate in (None, draws):
        torch.manual_seed(0)
        model = Decoder(dropout=0.3)
        if candidate is None:
            train_step(model, 0)
        else:
            with shadow(model, candidate, inherited=True) as probe:
                train_step(model, 0)
                probe.step()
        states.append((torch.get_rng_state(), [p.grad for p in model.parameters()]))
    assert torch.equal(states[0][0], states[1][0])
    assert all(torch.equal(a, b) for a, b in zip(states[0][1], states[1][1], strict=True))


class Wide(Decoder):
    """Gives SDPA FP32 tensors under autocast, as rotary embeddings do."""

    def forward(self, ids):
        """Return logits."""
        x = self.embedding(ids)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))


class _WritesIntoItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.zero_()


def test_a_candidate_that_writes_into_its_gradient_does_not_reach_the_run():
    def writes(q, k, v, *, causal, scale=None):
        return _WritesIntoItsGradient.apply(flash_attention(q, k, v, causal=causal))

    gradients = []
    for candidate in ("flash:fa2", writes):
        q, k, v = _inputs()
        _hook(candidate)(q, k, v, causal=True).float().square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dq_is_the_attentions_own_where_q_is_used_elsewhere_too():
    found = []
    for elsewhere in (0.0, 5.0):
        q, k, v = _inputs()
        hook = _hook()
        dout = torch.ones_like(q)
        (hook(q, k, v, causal=True) * dout + elsewhere * q).backward(torch.ones_like(q))
        found.append(hook.probe.collect().metrics)
    assert found[0] == found[1]


def test_inputs_that_the_model_overwrites_are_a_finding_not_a_wrong_figure():
    q, k, v = _inputs()
    hook = _hook()
    out = hook(q, k, v, causal=True)
    with torch.no_grad():
        q.mul_(2)
    out.sum().backward()
    measured = hook.probe.collect()
    assert measured.metrics == {}
    assert [text for _, text in measured.findings] == ["inputs or out overwritten in place"]


def test_a_lost_device_is_no_finding():
    def loses(q, k, v, *, causal, scale=None):
        raise torch.AcceleratorError("device-side assert")

    hook = _hook(loses, backward=False)
    with pytest.raises(torch.AcceleratorError):
        hook(*_inputs(), causal=True)


def test_after_its_backward_a_layer_holds_no_tensor_of_the_run():
    q, k, v = _inputs()
    hook = _hook()
    out = hook(q, k, v, causal=True)
    captured = hook.probe._captured["x"]
    assert captured.call.q.data_ptr() == q.data_ptr()
    out.sum().backward()
    held = [*captured.qkv, captured.out, *(x for x, _ in captured._versions)]
    held += [x for results in captured.shadows.values() for x in results.values()]
    assert sum(x.numel() for x in held) == 0


def test_the_second_pass_drops_what_the_first_did():
    torch.manual_seed(0)
    model = Decoder(dropout=0.5)
    with shadow(model, "sdpa", inherited=True) as probe:
        train_step(model, 0)
        probe.step()
    for layer in range(3):
        for what in ("out", "carried", "total"):
            assert probe.metrics[f"deviation/layers.{layer}/{what}/rel_fro"] == 0, (layer, what)


@unseen
def test_under_autocast_a_shadow_computes_in_the_dtype_that_sdpa_does():
    seen = set()

    def spy(q, k, v, *, causal, scale=None):
        seen.add(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    model = Wide()
    with shadow(model, spy) as probe:
        train_step(model, 0, torch.bfloat16)
        probe.step()
    assert seen == {torch.bfloat16}
    assert probe.metrics["deviation/model/out/rel_fro"] == 0
    said = {text for _, _, text in probe.findings}
    not_run = "not seen: Attention was not run in the step that was looked at; "
    assert said == {not_run + "give steps=[...] in the first of which it runs"}


def test_a_forward_pass_that_raises_leaves_nothing_behind():
    class Raises(Decoder):
        def forward(self, ids):
            super().forward(ids)
            raise RuntimeError("the model's own")

    calls = []

    def counts(q, k, v, *, causal, scale=None):
        calls.append(1)
        return baseline_attention(q, k, v, causal=causal)

    model = Raises(depth=1)
    with shadow(model, counts, backward=False, evaluation=True), torch.no_grad():
        with pytest.raises(RuntimeError, match="the model's own"):
            model(tokens(0))
        caught = len(calls)
        q = torch.randn(1, 1, 8, 16)
        F.scaled_dot_product_attention(q, q, q)
        assert len(calls) == caught == 1


@unseen
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction_of_the_models_own_attention_is_its_own_under_autocast(direction):
    """SDPA as the candidate: both halves are what autocast makes of it, to the bit."""
    torch.manual_seed(0)
    model = Wide()
    twin = copy.deepcopy(model)
    train_step(model, 0, torch.bfloat16)
    with shadow(twin, "sdpa", replace=["*"], direction=direction, every=0):
        train_step(twin, 0, torch.bfloat16)
    for own, replaced in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (replaced.grad is None)
        assert own.grad is None or torch.equal(own.grad, replaced.grad)


@unseen
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("transform", ["vmap", "grad", "gradients of samples"])
def test_a_call_inside_torch_func_is_told_and_blamed_on_no_candidate(transform):
    torch.manual_seed(0)
    model = Decoder()
    model.norm = torch.nn.Identity()
    weights, ids = dict(model.named_parameters()), tokens(0)

    def loss(weights, ids):
        return functional_call(model, weights, (ids,)).square().mean()

    calls = {
        "vmap": lambda: vmap(lambda one: loss(weights, one[None]))(ids),
        "grad": lambda: grad(loss)(weights, ids),
        "gradients of samples": lambda: vmap(grad(loss), (None, 0))(weights, ids[:, None]),
    }
    plain = calls[transform]()
    with shadow(model) as probe:
        watched = calls[transform]()
        probe.step()
    for x, y in zip(tree_leaves(plain), tree_leaves(watched), strict=True):
        assert torch.equal(x, y)
    layers = [f"layers.{index}" for index in range(3)]
    assert {one.layer: one.state for one in probe.coverage} == dict.fromkeys(layers, "seen in part")
    assert sorted(layer for _, layer, _ in probe.findings) == layers
    for _, _, text in probe.findings:
        assert text.startswith("not looked at: made inside torch.func (vmap, grad, jvp)")
    assert not probe.metrics
    assert not torch._C._len_torch_function_stack()
    with shadow(model, modules={"layers.?": "emulated:e4m3"}, evaluation=True) as probe:
        calls[transform]()
        probe.step()
    assert sorted(layer for _, layer, _ in probe.findings) == layers
    for _, _, text in probe.findings:
        assert text.startswith("not looked at: made inside torch.func (vmap, grad, jvp)")
