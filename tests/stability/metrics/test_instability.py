"""Signs of instability against independent formulas, and the thresholds that they cross."""

import math

import pytest
import torch

from stability.metrics.instability import (
    LossSpikes,
    Threshold,
    count_nonfinite,
    crossings,
    gradient_norm,
    log_z,
    rms_ratio,
)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _adam_by_the_paper(gradients, beta2, eps):
    """RMS_t of Algorithm 2 in arXiv 2304.13013, whose beta2 is debiased before the average."""
    v = torch.zeros_like(gradients[0])
    for t, g in enumerate(gradients, start=1):
        debiased = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
        v = debiased * v + (1 - debiased) * g.square()
    return (gradients[-1].square() / torch.maximum(v, torch.tensor(eps**2))).mean().sqrt()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_rms_ratio_of_torchs_adamw_is_that_of_the_paper(steps, beta2):
    weight = torch.nn.Parameter(torch.ones(13, 5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, beta2), eps=1e-8)
    scales = [10.0 ** (step % 3) for step in range(steps)]
    gradients = [
        scale * torch.randn(13, 5, generator=_generator(i), dtype=torch.float64)
        for i, scale in enumerate(scales)
    ]
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[weight]
    found = rms_ratio(gradients[-1], state["exp_avg_sq"], step=state["step"], beta2=beta2, eps=1e-8)
    expected = _adam_by_the_paper(gradients, beta2, 1e-8)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_rms_ratio_is_one_at_the_first_step_whatever_the_scale():
    for scale in (1e-6, 1.0, 1e15):
        g = scale * torch.randn(64, generator=_generator())
        v = 0.05 * g.double().square()
        assert rms_ratio(g, v, step=1, beta2=0.95, eps=1e-12).item() == pytest.approx(1, rel=1e-12)


def test_rms_ratio_reaches_its_bound_when_all_gradients_before_were_zero():
    g = torch.full((9,), 3.0)
    found = rms_ratio(g, 0.05 * g.square(), step=1000, beta2=0.95, eps=1e-8)
    assert found.item() == pytest.approx(math.sqrt(1 / 0.05), rel=1e-6)  # FP32's 0.05


def test_gradients_far_below_eps_do_not_look_like_a_spike():
    g = torch.full((9,), 1e-12)
    found = rms_ratio(g, torch.zeros(9), step=10, beta2=0.95, eps=1e-8)
    assert found.item() == pytest.approx(1e-4, rel=1e-6)


def test_rms_ratio_refuses_the_state_of_another_parameter():
    with pytest.raises(ValueError, match=r"must have the shape of grad \(3,\), got \(1,\)"):
        rms_ratio(torch.ones(3), torch.ones(1), step=1, beta2=0.9, eps=1e-8)


def test_gradient_norm_is_that_of_all_tensors_in_one_vector():
    parts = [torch.randn(shape, generator=_generator()) for shape in [(3, 4), (5,), ()]]
    whole = torch.cat([part.flatten() for part in parts]).double()
    found = gradient_norm(parts)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(whole.norm().item(), rel=1e-14)


def test_gradient_norm_does_not_overflow_where_fp32_squares_do():
    assert gradient_norm([torch.full((4,), 1e30)]).item() == pytest.approx(2e30, rel=1e-6)


def test_every_kind_of_nonfinite_value_is_counted_once():
    parts = [torch.tensor([1.0, math.nan, math.inf]), torch.tensor(-math.inf), torch.ones(3)]
    assert count_nonfinite(parts).item() == 3
    assert count_nonfinite(parts).dtype == torch.float64


@pytest.mark.parametrize("function", [gradient_norm, count_nonfinite])
def test_figures_of_no_tensor_are_refused(function):
    with pytest.raises(ValueError, match=rf"{function.__name__}: must be given a tensor, got none"):
        function([])


@pytest.mark.parametrize("positions", [1, 4095, 4096, 4097])
def test_log_z_is_the_mean_over_positions_however_many(positions):
    logits = 5 * torch.randn(1, positions, 7, generator=_generator())
    expected = logits.double().exp().sum(-1).log().mean()
    assert log_z(logits).item() == pytest.approx(expected.item(), rel=1e-6)


def test_log_z_of_narrow_logits_is_taken_in_fp32_and_does_not_overflow():
    logits = torch.tensor([[100.0, 3.0, 2.0]], dtype=torch.bfloat16)
    small = torch.tensor([[1.0, 1.0078125, 0.5]], dtype=torch.bfloat16)
    assert log_z(logits).item() == pytest.approx(100, rel=1e-6)
    assert log_z(small).item() == pytest.approx(small.double().logsumexp(-1).item(), rel=1e-6)


def test_log_z_takes_no_gradient_and_refuses_a_scalar():
    assert not log_z(torch.ones(2, 3, requires_grad=True)).requires_grad
    with pytest.raises(ValueError, match=r"logits must be \(..., vocab\), got a 0-d tensor"):
        log_z(torch.tensor(1.0))


def _fed(spikes, losses):
    return [spikes.update(loss) for loss in losses]


def test_a_loss_is_a_spike_above_the_windows_mean_and_deviations_and_not_at_it():
    window = [1.0, 3.0, 1.0, 3.0]  # mean 2, deviation 1
    for loss, expected in [(5.2, False), (5.200001, True), (-9.0, False)]:
        spikes = LossSpikes(3.2, window=4)
        assert _fed(spikes, [*window, loss]) == [False] * 4 + [expected]


def test_nothing_is_a_spike_before_the_window_is_full():
    spikes = LossSpikes(3.2, window=4)
    assert _fed(spikes, [1.0, 1.0, 1.0, 1e9]) == [False] * 4
    assert _fed(LossSpikes(3.2, window=3), [1.0, 1.0, 1.0, 1e9]) == [False, False, False, True]


def test_old_losses_leave_the_window():
    spikes = LossSpikes(3.2, window=2)
    assert _fed(spikes, [100.0, 1.0, 1.0, 2.0]) == [False, False, False, True]


def test_a_spike_enters_the_window_so_that_a_new_level_is_no_spike_for_ever():
    assert _fed(LossSpikes(3.2, window=2), [1.0, 1.0, 5.0, 5.0]) == [False, False, True, False]


def test_a_loss_that_is_not_finite_is_a_spike_and_spoils_nothing():
    spikes = LossSpikes(3.2, window=2)
    assert _fed(spikes, [1.0, math.nan, math.inf, 1.0, 2.0]) == [False, True, True, False, True]


def test_spikes_go_on_from_their_state_as_if_never_stopped():
    losses = [1.0, 3.0, 1.0, 3.0, 5.3, 2.0, 9.0]
    whole, first, second = (LossSpikes(3.2, window=4) for _ in range(3))
    found = _fed(first, losses[:3])
    second.load_state_dict(first.state_dict())
    assert found + _fed(second, losses[3:]) == _fed(whole, losses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deviations": 3.2, "window": 1}, "window must be >= 2, got 1; one loss has no deviation"),
        ({"deviations": 0.0}, "deviations must be > 0, got 0.0; try 3.2"),
        ({"deviations": math.nan}, "deviations must be > 0, got nan"),
    ],
)
def test_a_rule_that_could_not_work_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossSpikes(**arguments)


LOGIT = "watch/layer_2/max_logit"
HEAD = "watch/layer_0/head_3/max_logit"
OTHER = "watch/layer_5/max_logit"


def _names(found):
    return [list(crossing.values) for crossing in found]


@pytest.mark.parametrize(
    ("name", "below", "past"),
    [
        (LOGIT, 1e4, math.nextafter(1e4, math.inf)),
        (HEAD, 1e4, 10001.0),
        ("watch/loss_spike", 0.0, 1.0),
        ("watch/nonfinite_gradients", 0.0, 1.0),
        (LOGIT, math.nan, math.inf),
    ],
)
def test_only_the_way_up_is_a_crossing(name, below, past):
    steps = [below, past, past, below, past]
    found, previous = [], {}
    for value in steps:
        found.append(len(crossings({name: value}, previous)))
        previous = {**previous, name: value}
    assert found == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "name", ["watch/grad_norm", "watch/log_z", "watch/rms_max", "watch/a/entropy", "watch/rms/x"]
)
def test_a_figure_without_a_published_threshold_never_crosses(name):
    assert crossings({name: 1e30}, {}) == []


def test_a_metric_that_was_not_measured_in_between_keeps_its_last_value():
    assert crossings({OTHER: 1.0}, {LOGIT: 5e4}) == []
    assert crossings({LOGIT: 5e4}, {LOGIT: 5e4, OTHER: 1.0}) == []


def test_metrics_that_cross_together_make_one_crossing_led_by_the_largest():
    spike = "watch/loss_spike"
    metrics = {LOGIT: 2e4, OTHER: 3e4, HEAD: 1.0, spike: 1.0}
    logit, loss = crossings(metrics, {})
    assert (list(logit.values), logit.layer) == ([OTHER, LOGIT], "layer_5")
    assert (loss.values, loss.layer) == ({spike: 1.0}, "")
    assert logit.text == (
        "watch/layer_5/max_logit = 3e+04, and 1 more (> 10000, arXiv 2309.14322): attention logits "
        "of runs that diverge"
    )
    assert _names(crossings(metrics, {OTHER: 2e4, spike: 1.0})) == [[LOGIT]]


def test_a_crossing_of_the_whole_run_has_no_layer():
    (crossing,) = crossings({"watch/loss_spike": 1.0}, {})
    assert crossing.layer == ""
    assert crossing.text == (
        "watch/loss_spike = 1 (> 0, our rule): "
        "loss above its running mean by 3.2 standard deviations"
    )


def test_other_thresholds_can_be_given():
    mine = Threshold(
        pattern="watch/grad_norm", relation=">", limit=5.0, meaning="too long", source="here"
    )
    (crossing,) = crossings({"watch/grad_norm": 6.0, LOGIT: 2e4}, {}, [mine])
    assert crossing.text == "watch/grad_norm = 6 (> 5, here): too long"
