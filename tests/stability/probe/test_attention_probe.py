"""The probe: its figures are those of the definitions, and the run never notices."""

import pytest
import torch

from attention_kernels import (
    PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from stability.config.schema import ProbeConfig
from stability.metrics.deviation import LAYER_COLUMNS, compare, deviation
from stability.probe.attention_probe import AttentionProbe, DualAttention, as_shadows
from stability.probe.attention_registry import resolve_attention
from stability.probe.captured_call import AttentionCall
from stability.records.metric_names import deviation_name
from tests.stability.metrics.floored_ulps import floored_ulps

CPU = torch.device("cpu")


def _inputs(dtype=torch.bfloat16, heads=2, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, 24, 16, generator=generator).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def _harsh(q, k, v, **mask):
    return flash_attention(q, k, v, numerics=PROFILES["all_bf16"], engine="twin", **mask)


def _hook(primary="baseline", shadows=("flash:all_bf16",), *, candidates=True, **options):
    probe = AttentionProbe(
        ProbeConfig(**options),
        as_shadows([resolve_attention(name, CPU) for name in shadows]),
        shadow_is_candidate=candidates,
    )
    probe.arm()
    return DualAttention(layer="layer_3", primary=resolve_attention(primary, CPU), probe=probe)


def _run(hook, qkv, causal=True):
    """Attend and go back through a loss; return dout."""
    out = hook(*qkv, causal=causal)
    seen = []
    out.register_hook(seen.append)
    out.float().square().sum().backward()
    return seen[0]


def test_every_result_is_compared_as_candidate_minus_baseline_whichever_is_primary():
    found = []
    for primary, shadow, candidates in (
        ("baseline", "flash:all_bf16", True),
        ("flash:all_bf16", "baseline", False),
    ):
        hook = _hook(primary, (shadow,), candidates=candidates, golden=False)
        hook(*_inputs(), causal=True).backward(torch.ones(2, 2, 24, 16, dtype=torch.bfloat16))
        found.append(hook.probe.collect().metrics)
    assert found[0] == found[1]
    assert {name.split("/")[2] for name in found[0]} == {"out", "lse", "dq", "dk", "dv"}


def test_gradients_of_the_shadow_are_those_of_a_real_backward_through_it_to_the_last_bit():
    qkv = _inputs()
    hook = _hook(golden=False)
    dout = _run(hook, qkv)
    found = hook.probe.collect().metrics
    own = _inputs()
    real = torch.autograd.grad(_harsh(*own, causal=True), own, dout)
    for what, shadow, x in zip(("dq", "dk", "dv"), real, qkv, strict=True):
        expected = deviation(shadow, x.grad, output_format="bf16")
        for metric in LAYER_COLUMNS:
            assert found[deviation_name("layer_3", what, metric)] == expected[metric], (
                what,
                metric,
            )


def test_error_ratio_of_each_result_is_against_the_golden():
    qkv = _inputs()
    hook = _hook()
    dout = _run(hook, qkv)
    found = hook.probe.collect().metrics
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out = golden_attention(*wide, causal=True)
    golden = [out.detach(), *torch.autograd.grad(out, wide, dout.double())]
    own = _inputs()
    shadow_out = _harsh(*own, causal=True)
    shadow = [shadow_out.detach(), *torch.autograd.grad(shadow_out, own, dout)]
    primary = [baseline_attention(*qkv, causal=True).detach(), *(x.grad for x in qkv)]
    for what, s, p, g in zip(("out", "dq", "dk", "dv"), shadow, primary, golden, strict=True):
        expected = ((s.double() - g).norm() / (p.double() - g).norm()).item()
        name = deviation_name("layer_3", what, "error_ratio")
        assert found[name] == pytest.approx(expected, rel=1e-12), what
    assert found[deviation_name("layer_3", "lse", "error_ratio")] > 1


@pytest.mark.parametrize("primary", ["baseline", "flash:all_bf16", "sdpa"])
def test_output_gradients_and_random_state_are_the_primarys_to_the_bit(primary):
    results = []
    for looking in (False, True):
        q, k, v = _inputs(heads=4)
        hook = _hook(primary, heads=True, positions=3, inside=True)
        if not looking:
            hook.probe.disarm()
        state = torch.get_rng_state()
        # q is used twice: its gradient is a sum whose order must not change
        out = hook(q, k, v, causal=True) + 0.5 * q.square()
        out.float().square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert bool(hook.probe.collect().metrics) == looking
        results.append([out, q.grad, k.grad, v.grad])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_an_idle_probe_runs_nothing():
    def explode(q, k, v, *, causal, scale=None):
        raise AssertionError("the shadow ran")

    hook = _hook(shadows=(explode,))
    hook.probe.disarm()
    _run(hook, _inputs())
    measured = hook.probe.collect()
    assert (measured.metrics, measured.findings) == ({}, ())


def test_without_gradients_forward_alone_is_compared_at_once():
    hook = _hook()
    with torch.no_grad():
        hook(*_inputs(), causal=True)
    compared = {name.split("/")[2] for name in hook.probe.collect().metrics}
    assert compared == {"out", "lse"}


def test_a_call_that_no_backward_reaches_is_compared_forward():
    hook = _hook()
    hook(*_inputs(), causal=True)
    compared = {name.split("/")[2] for name in hook.probe.collect().metrics}
    assert compared == {"out", "lse"}


def test_the_first_call_of_a_step_counts_and_collect_forgets():
    hook = _hook(backward=False)
    q, k, v = _inputs()
    hook(q, k, v, causal=True)
    hook(2 * q, k, v, causal=True)
    first = hook.probe.collect()
    hook(q, k, v, causal=True)
    assert hook.probe.collect() == first
    assert hook.probe.collect().metrics == {}


def test_heads_and_positions_are_those_of_the_slices():
    hook = _hook(heads=True, positions=3, golden=False, backward=False)
    q, k, v = _inputs()
    hook(q, k, v, causal=True)
    found = hook.probe.collect().metrics
    shadow, own = _harsh(q, k, v, causal=True), baseline_attention(q, k, v, causal=True)
    shadow, own = shadow.detach(), own.detach()
    head = deviation(shadow[:, 1:2], own[:, 1:2])
    rows = deviation(shadow[:, :, 8:16], own[:, :, 8:16])
    ulps = floored_ulps(shadow, own, "bf16")  # of the whole: its parts have one floor
    head["bias_ulp"], rows["bias_ulp"] = ulps[:, 1].mean(), ulps[:, :, 8:16].mean()
    for metric in ("rel_fro", "bias_ulp", "max_abs"):
        name = deviation_name("layer_3", "out", metric, part="head_1")
        assert found[name] == pytest.approx(head[metric], rel=1e-12)
        name = deviation_name("layer_3", "out", metric, part="positions_8_15")
        assert found[name] == pytest.approx(rows[metric], rel=1e-12)


def test_several_shadows_are_told_apart_and_histograms_counted():
    hook = _hook(shadows=("flash:all_bf16", "flash:fa2"), backward=False)
    q, k, v = _inputs()
    hook(q, k, v, causal=True)
    measured = hook.probe.collect()
    harsh, fa2 = (
        measured.metrics[deviation_name("layer_3", "out", "rel_fro", shadow=name)]
        for name in ("flash_all_bf16", "flash_fa2")
    )
    assert harsh > fa2 > 0
    name = deviation_name("layer_3", "out", "ulp_histogram", shadow="flash_all_bf16")
    expected = compare(_harsh(q, k, v, causal=True), baseline_attention(q, k, v, causal=True))
    assert measured.counts[name] == [int(count) for count in expected.histogram]
    assert sum(measured.counts[name]) == q.numel()


def test_layers_are_chosen_by_globs():
    hook = _hook(layers=("layer_1*", "other"))
    _run(hook, _inputs())
    assert hook.probe.collect().metrics == {}
    chosen = _hook(layers=("*_3",))
    _run(chosen, _inputs())
    assert chosen.probe.collect().metrics


def test_a_fifth_of_an_ulp_of_bias_is_caught_by_bias_ulp_and_not_by_max_abs():
    def biased(q, k, v, *, causal, scale=None):
        exact = golden_attention(q, k, v, causal=causal, scale=scale)
        ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
        noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1)).double()
        # rounds up where the plain one rounds to nearest, in a fifth of the places
        return torch.where(noise < 0.2, exact + ulp, exact).bfloat16().to(q.dtype)

    figures = []
    for shadow in (biased, "flash:all_bf16"):
        hook = _hook(shadows=(shadow,), backward=False)
        q, k, v = _inputs()
        # values far from zero, where an ULP is no tiny share of other errors
        hook(q, k, (v.detach().abs() / 4 + 2).bfloat16(), causal=True)
        metrics = hook.probe.collect().metrics
        figures.append([metrics[f"deviation/layer_3/out/{m}"] for m in METRICS])
    (bias, error, largest), (usual_bias, usual_error, usual_largest) = figures
    assert bias == pytest.approx(0.2, abs=0.05)
    assert bias > 10 * error
    assert abs(usual_bias) < 5 * usual_error
    assert largest <= 2 * usual_largest  # one ULP more


METRICS = ("bias_ulp", "bias_ulp_se", "max_abs")


def test_a_call_that_is_given_with_its_results_has_the_figures_of_one_that_is_attended():
    """Except for those of the LSE, which a call that is given comes without."""

    def without_lse(probe):
        metrics = probe.collect().metrics
        return {name: x for name, x in metrics.items() if "/lse/" not in name}

    qkv = _inputs()
    hook = _hook(heads=True)
    dout = _run(hook, qkv)
    attended = without_lse(hook.probe)
    out = hook.primary.function(*qkv, causal=True)
    given = _hook(heads=True).probe
    q, k, v = (x.detach() for x in qkv)
    call = AttentionCall(layer="layer_3", q=q, k=k, v=v, mask={"causal": True})
    gradients = [x.grad for x in qkv]
    given.compare_given(call, out.detach(), dout, gradients)
    # the first call of a layer is the one of this step
    given.compare_given(call, 2 * out.detach(), dout, gradients)
    assert without_lse(given) == attended
    assert {name.split("/")[-2] for name in attended} == {"out", "dq", "dk", "dv"}
    given.disarm()
    given.compare_given(call, out.detach(), dout, gradients)
    assert not given.collect().metrics
