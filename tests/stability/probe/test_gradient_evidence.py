"""The meter's ratio, share and coherence of known errors, its findings, and its memory."""

import math

import pytest
import torch

from attention_kernels import golden_attention
from attention_kernels.formats import format_named
from stability.probe.gradient_evidence import (
    GradientMeter,
    isolated_attention,
    isolated_golden,
    surrounding_dtype,
)
from stability.records.metric_names import parse_gradient
from stability.records.metric_table import GRADIENT_METRICS

SIZES = {"token_embedding.weight": (40, 8), "blocks.layer_0.query.weight": (8, 8), "bias": (5,)}


def _drawn(look, stream):
    generator = torch.Generator().manual_seed(1000 * stream + look)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


class Gradients:
    """Golden gradients of norm 1 a weight, with errors of known size and common part."""

    def __init__(self, size=2.0, bias=0.0):
        self.size, self.bias, self.look = size, bias, 0
        self.calls = []

    def __call__(self, role, isolated):
        self.calls.append((role, isolated))
        golden = _drawn(self.look, 1)
        if role == "golden":
            return golden
        size, bias = (1e-3, 0.0) if role == "baseline" else (1e-3 * self.size, 1e-3 * self.bias)
        errors, common = _drawn(self.look, 2), _drawn(0, 3)
        return {name: x + size * errors[name] + bias * common[name] for name, x in golden.items()}


def _looked(gradients, looks, meter=None):
    meter = meter or GradientMeter()
    measured = []
    for _ in range(looks):
        measured.append(meter.look(gradients))
        gradients.look += 1
    return measured


def test_the_names_are_those_of_the_table_for_the_whole_and_each_group():
    (measured,) = _looked(Gradients(), 1)
    found = {parse_gradient(name) for name in measured.metrics}
    assert {name.group for name in found} == {"all", "embedding", "query", "other"}
    of_all = [name.metric for name in found if name.group == "all"]
    isolated = {name for name in of_all if not name.endswith("_as_trained")}
    assert isolated == GRADIENT_METRICS.keys()
    as_trained = {name.removesuffix("_as_trained") for name in of_all} - {"share_se"}
    assert as_trained == GRADIENT_METRICS.keys() - {"share_se"}
    assert measured.findings == ()


def test_an_error_twice_the_baselines_has_ratio_2_in_every_group():
    (measured,) = _looked(Gradients(size=2.0), 1)
    for group in ("all", "embedding", "query", "other"):
        # the errors are proportional: FP32 rounds them to 1e-4 of their size
        assert measured.metrics[f"gradient/{group}/ratio"] == pytest.approx(2, rel=1e-3)
        assert measured.metrics[f"gradient/{group}/ratio_as_trained"] == pytest.approx(2, rel=1e-3)
    assert measured.metrics["gradient/all/baseline_error"] == pytest.approx(1e-3, rel=0.2)
    assert measured.metrics["gradient/all/looks"] == 1


def test_a_common_part_shows_as_its_share_and_noise_as_none():
    for bias, share in ((0.0, 0.0), (1.0, 0.5), (3.0, 0.9)):
        last = _looked(Gradients(size=1.0, bias=bias), 20)[-1].metrics
        error = last["gradient/all/share_se"]
        assert abs(last["gradient/all/share"] - share) < 4 * error
        assert error < 0.06
        assert last["gradient/all/share_as_trained"] == pytest.approx(last["gradient/all/share"])
        assert last["gradient/all/coherence"] == pytest.approx(1 + 19 * last["gradient/all/share"])
        assert last["gradient/all/looks"] == last["gradient/all/looks_as_trained"] == 20


def test_a_candidate_that_is_exact_has_no_error_and_no_share():
    class Exact(Gradients):
        def __call__(self, role, isolated):
            return super().__call__("golden" if role == "candidate" else role, isolated)

    last = _looked(Exact(), 5)[-1].metrics
    assert last["gradient/all/ratio"] == last["gradient/all/share"] == 0.0
    assert last["gradient/all/share_se"] == 0.0
    assert last["gradient/all/coherence"] == 1.0


def test_a_baseline_without_error_makes_the_ratio_infinite():
    class ExactBaseline(Gradients):
        def __call__(self, role, isolated):
            return super().__call__("golden" if role == "baseline" else role, isolated)

    (measured,) = _looked(ExactBaseline(), 1)
    assert measured.metrics["gradient/all/ratio"] == math.inf


class Broken(Gradients):
    """One of the three raises, or returns a NaN, at one look."""

    def __init__(self, role, how, at=1):
        super().__init__(size=1.0)
        self.role, self.how, self.at = role, how, at

    def __call__(self, role, isolated):
        found = super().__call__(role, isolated)
        if role == self.role and self.look == self.at:
            if self.how == "raises":
                raise RuntimeError("no kernel for this shape\nand more")
            found["bias"][0] = math.nan
        return found


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "candidate: RuntimeError: no kernel for this shape"),
        ("nan", "candidate: its gradient is not finite"),
    ],
)
def test_a_candidate_that_fails_has_no_ratio_and_a_finding(how, text):
    first, second, third = _looked(Broken("candidate", how), 3)
    assert math.isnan(second.metrics["gradient/all/ratio"])
    assert math.isnan(second.metrics["gradient/all/ratio_as_trained"])
    assert len(second.metrics) == 2
    assert second.findings == (("gradient", text),)
    # and what it did there does not enter what is over all looks
    assert first.findings == third.findings == ()
    assert third.metrics["gradient/all/looks"] == 2
    assert math.isfinite(third.metrics["gradient/all/share"])


@pytest.mark.parametrize("role", ["baseline", "golden"])
@pytest.mark.parametrize("how", ["raises", "nan"])
def test_without_baseline_or_golden_nothing_is_measured(role, how):
    _, second, third = _looked(Broken(role, how), 3)
    assert second.metrics == {}
    reason = "RuntimeError: no kernel for this shape"
    if how == "nan":
        reason = "its gradient is not finite"
        if role == "golden":
            reason = "the run's own gradient is not finite"
    assert second.findings == (("gradient", f"{role}: {reason}"),)
    assert third.metrics["gradient/all/looks"] == 2


def test_a_finding_is_reported_once():
    class Always(Broken):
        def __call__(self, role, isolated):
            self.at = self.look
            return super().__call__(role, isolated)

    measured = _looked(Always("candidate", "raises"), 3)
    assert [len(one.findings) for one in measured] == [1, 0, 0]


def test_a_resumed_meter_goes_on_to_the_same_bits(tmp_path):
    whole = _looked(Gradients(bias=0.3), 6)
    gradients, meter = Gradients(bias=0.3), GradientMeter()
    before = _looked(gradients, 3, meter)
    torch.save(meter.state_dict(), tmp_path / "state")
    resumed = GradientMeter()
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    after = _looked(gradients, 3, resumed)
    assert [one.metrics for one in (*before, *after)][2:] == [one.metrics for one in whole][2:]
    assert GradientMeter().state_dict()["isolated"]["kept"].numel() == 0


def test_many_looks_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr("stability.probe.gradient_evidence.MOST_LOOKS", 8)
    gradients, meter = Gradients(size=1.0, bias=1.0), GradientMeter()
    looks = [one.metrics["gradient/all/looks"] for one in _looked(gradients, 40, meter)]
    assert max(looks) == 8
    assert looks[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 5]
    # what is kept are looks 0, s, 2 s, ... of all so far
    kept = meter.state_dict()["isolated"]["kept"]
    assert meter.state_dict()["isolated"]["stride"] == 8
    again, every_eighth = GradientMeter(), Gradients(size=1.0, bias=1.0)
    for look in range(0, 40, 8):
        every_eighth.look = look
        again.look(every_eighth)
    assert torch.equal(kept, again.state_dict()["isolated"]["kept"])
    assert meter.state_dict()["as_trained"]["looks"] == 40


@pytest.mark.parametrize("rounding", [torch.bfloat16, torch.float16, format_named("e4m3")])
def test_isolated_attention_and_golden_are_given_the_same_rounded_tensors(rounding):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 2, 9, 16, generator=generator, dtype=torch.float32) for _ in range(4)
    )

    def exact(q, k, v, **mask):
        return golden_attention(q, k, v, **mask).to(q.dtype)

    results = []
    for attention in (isolated_attention(exact, rounding), isolated_golden(rounding)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal=True)
        assert out.dtype == torch.float32
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    if isinstance(rounding, torch.dtype):
        # the golden's results, rounded, are those of an attention that is exact but for rounding
        for found, golden in zip(*results, strict=True):
            assert torch.equal(found, golden.to(rounding).to(torch.float32))
            assert not torch.equal(found, golden)
    else:
        for found, golden in zip(*results, strict=True):
            assert torch.equal(found, golden)
    plain = golden_attention(q, k, v, causal=True).to(torch.float32)
    assert not torch.equal(results[1][0], plain)


def test_the_surrounding_is_wider_than_the_attention():
    assert surrounding_dtype(torch.bfloat16) is torch.float32
    assert surrounding_dtype(format_named("e4m3")) is torch.float32
    assert surrounding_dtype(torch.float32) is torch.float64
