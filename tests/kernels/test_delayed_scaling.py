"""Delayed scaling takes its scale from earlier steps, and nothing from this one."""

import math

import pytest
import torch

from attention_kernels.block_scaling import dequantize
from attention_kernels.delayed_scaling import delayed_scale, quantize_delayed
from attention_kernels.rounding import round_to


def steps(amaxes, **options):
    """Quantize a tensor of each amax in turn; return the scales that each step used."""
    state, used = delayed_scale(options.pop("history_len", 3)), []
    for amax in amaxes:
        used.append(state.scale.item())
        _, state = quantize_delayed(torch.tensor([amax, -amax / 2]), state, **options)
    return [*used, state.scale.item()]


def test_the_scale_is_that_of_the_largest_of_the_last_steps():
    used = steps([2.0, 8.0, 1.0, 1.0, 1.0, 4.0])
    assert used == [1.0, 224.0, 56.0, 56.0, 56.0, 448.0, 112.0]


def test_or_of_the_most_recent_one_with_a_margin():
    assert steps([2.0, 8.0, 1.0], amax="most_recent") == [1.0, 224.0, 56.0, 448.0]
    assert steps([2.0, 8.0, 1.0], amax="most_recent", margin=2) == [1.0, 56.0, 14.0, 112.0]
    assert steps([2.0], elements="e5m2") == [1.0, 28672.0]


def test_an_infinite_step_keeps_the_scale_for_as_long_as_it_is_remembered():
    assert steps([2.0, math.inf, 1.0, 1.0, 1.0]) == [1.0, 224.0, 224.0, 224.0, 224.0, 448.0]


def test_nan_is_left_out_of_an_amax_as_by_the_maximum_of_a_gpu():
    state = delayed_scale(2)
    found, state = quantize_delayed(torch.tensor([math.nan, 2.0, math.inf]), state)
    assert found.elements[0].isnan()
    _, state = quantize_delayed(torch.tensor([math.nan, 2.0]), delayed_scale(2))
    assert state.scale.item() == 224


def test_zeros_keep_the_scale_and_the_tiniest_values_get_the_largest():
    assert steps([0.0, 0.0]) == [1.0, 1.0, 1.0]
    assert steps([2.0, 0.0], history_len=1) == [1.0, 224.0, 224.0]
    assert steps([2.0**-149])[-1] == torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_are_rounded_by_the_old_scale_and_saturate(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 7, generator=generator).to(dtype)
    _, state = quantize_delayed(x, delayed_scale(4))
    larger = 3 * x
    found, _ = quantize_delayed(larger, state)
    scaled = larger.float() * (448 / x.abs().amax().float())
    assert (scaled.abs() > 464).any()
    assert torch.equal(found.elements.float(), round_to(scaled, "e4m3-saturate"))
    assert found.elements.dtype == dtype
    restored = found.elements.float() * (1 / state.scale)
    assert torch.equal(dequantize(found), restored.to(dtype))


def test_a_state_is_a_value_that_no_step_changes():
    state = delayed_scale(2)
    x = torch.ones(4)
    first, second = quantize_delayed(x, state)[1], quantize_delayed(x, state)[1]
    assert torch.equal(first.history, second.history)
    assert state.history.tolist() == [0, 0]
    assert state.scale.item() == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="history_len must be at least 1, got 0"):
        delayed_scale(0)
    with pytest.raises(ValueError, match="amax must be max or most_recent, got 'mean'"):
        quantize_delayed(torch.ones(2), delayed_scale(), amax="mean")
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16, got"):
        quantize_delayed(torch.ones(2).double(), delayed_scale())
