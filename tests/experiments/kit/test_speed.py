"""TFLOPS are those of flash-attn's count; the clock is a fake one, as no test has a GPU."""

import itertools

import pytest
import torch

from attention_kernels import baseline_attention
from attention_kernels.testing import Shape
from experiments.kit.cost import tflops
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
