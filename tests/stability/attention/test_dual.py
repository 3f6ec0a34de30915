"""The dual hook: it reports what differs and leaves the primary alone."""

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from stability.attention.dual import AttentionProbe, DualAttention
from stability.attention.schedule import EveryN
from stability.metrics.deviation import DEVIATION_METRICS, GOLDEN_METRICS, deviation


def _inputs(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 24, 16)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def _harsh(q, k, v, *, causal, scale=None):
    return flash_attention(q, k, v, causal=causal, scale=scale, numerics=PROFILES["all_bf16"])


def _hook(primary, shadow, *, shadow_is_candidate, golden=True, active=True):
    probe = AttentionProbe(shadow=shadow, shadow_is_candidate=shadow_is_candidate, golden=golden)
    probe.active = active
    return DualAttention(layer="layer_3", primary=primary, probe=probe), probe


def test_deviation_is_candidate_minus_baseline_whichever_is_primary():
    q, k, v = _inputs()
    found = []
    for primary, shadow, is_candidate in (
        (baseline_attention, _harsh, True),
        (_harsh, baseline_attention, False),
    ):
        hook, probe = _hook(primary, shadow, shadow_is_candidate=is_candidate)
        hook(q, k, v, causal=True)
        found.append(probe.collect())
    assert found[0] == found[1]
    candidate, baseline = _harsh(q, k, v, causal=True), baseline_attention(q, k, v, causal=True)
    expected = deviation(candidate.detach(), baseline.detach(), output_format="bf16")
    for metric in DEVIATION_METRICS:
        assert found[0][f"deviation/layer_3/out/{metric}"] == expected[metric]


def test_error_ratio_is_against_the_golden():
    q, k, v = _inputs()
    hook, probe = _hook(baseline_attention, _harsh, shadow_is_candidate=True)
    hook(q, k, v, causal=True)
    found = probe.collect()
    golden = golden_attention(q, k, v, causal=True).detach()
    errors = [
        (attention(q, k, v, causal=True).detach().double() - golden).norm()
        for attention in (_harsh, baseline_attention)
    ]
    name = "deviation/layer_3/out/"
    assert found[name + "error_ratio"] == pytest.approx(float(errors[0] / errors[1]), rel=1e-12)
    relative = float(errors[1] / golden.norm())
    assert found[name + "golden_baseline_rel_fro"] == pytest.approx(relative, rel=1e-12)
    assert set(GOLDEN_METRICS) <= {key.rsplit("/", 1)[1] for key in found}


def test_output_and_gradients_are_the_primarys_to_the_bit():
    results = []
    for active in (False, True):
        q, k, v = _inputs()
        hook, _ = _hook(_harsh, baseline_attention, shadow_is_candidate=False, active=active)
        state = torch.get_rng_state()
        out = hook(q, k, v, causal=True)
        out.float().square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        results.append([out, q.grad, k.grad, v.grad])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_an_idle_probe_runs_nothing():
    def explode(*args, **kwargs):
        raise AssertionError("the shadow ran")

    hook, probe = _hook(baseline_attention, explode, shadow_is_candidate=True, active=False)
    hook(*_inputs(), causal=True)
    assert probe.collect() == {}


def test_collect_forgets_and_the_first_call_of_a_step_counts():
    hook, probe = _hook(baseline_attention, _harsh, shadow_is_candidate=True)
    q, k, v = _inputs()
    hook(q, k, v, causal=True)
    hook(2 * q, k, v, causal=True)
    first = probe.collect()
    hook(q, k, v, causal=True)
    assert probe.collect() == first
    assert probe.collect() == {}


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_schedule_names_every_nth_step(every, due):
    schedule = EveryN(every=every)
    assert [step for step in range(5) if schedule.is_due(step)] == due


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="every must be >= 0, got -1"):
        EveryN(every=-1)
