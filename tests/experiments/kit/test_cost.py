"""Speed and memory of a call are counted as they are said to be."""

import itertools

import pytest
import torch

from attention_kernels import baseline_attention
from attention_kernels.testing import Shape
from experiments.kit.cost import peak_allocation, tflops
from stability.probe.attention_inputs import draw_inputs


@pytest.fixture
def clock(monkeypatch):
    """Make every call take 2 ms, and the first, which compiles, 1000."""
    times = itertools.chain([1000.0], itertools.repeat(2.0))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            assert isinstance(end, Event)
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flops_are_counted_as_flash_attn_does_and_the_warm_up_does_not_count(clock, causal):
    inputs = draw_inputs("normal", Shape(2, 3, 3, 8, 16, 16), "bf16", 0)
    found = tflops(baseline_attention, inputs, causal=causal)
    flops = 4 * 2 * 3 * 8 * 16 * 16 / (2 if causal else 1)
    assert found["forward"] == {"milliseconds": 2.0, "tflops": pytest.approx(flops / 2e9)}
    assert found["backward"] == {"milliseconds": 2.0, "tflops": pytest.approx(2.5 * flops / 2e9)}


MIB = 2**20


def test_the_peak_is_of_what_lives_at_once():
    before = torch.zeros(4 * MIB)

    def one_after_the_other():
        for _ in range(3):
            torch.zeros(MIB)

    def at_once():
        return [torch.zeros(MIB) for _ in range(3)]

    assert peak_allocation(one_after_the_other, "cpu") == 4 * MIB
    assert peak_allocation(at_once, "cpu") == 12 * MIB
    assert len(before) == 4 * MIB


def test_what_an_operator_takes_inside_counts():
    q = torch.zeros(1, 1, 512, 16)
    visible = torch.ones(512, 512, dtype=torch.bool)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)

    # the mask becomes an additive one, in FP32
    assert peak_allocation(attend, "cpu") > 4 * 512 * 512


def test_a_call_that_takes_nothing_has_no_peak():
    assert peak_allocation(lambda: None, "cpu") == 0
