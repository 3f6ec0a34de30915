"""A mode that is left around an attention: inside calls are as they are, and changed after."""

import pytest
import torch

from stability.probe.double_precision import computing_in_double
from stability.probe.pausable_mode import PausableMode


class _Negated(PausableMode):
    def _called(self, func, args, kwargs):
        return -func(*args, **kwargs)


def test_calls_are_changed_but_where_the_mode_is_paused():
    one, mode = torch.ones(1), _Negated()
    with mode:
        with mode.paused():
            with mode.paused():
                inner = torch.exp(one)
            still = torch.exp(one)
        after = torch.exp(one)
    assert inner.item() == still.item() == torch.exp(one).item() == -after.item()


def test_a_pause_that_an_error_ends_is_over():
    one, mode = torch.ones(1), _Negated()
    with mode:
        with pytest.raises(RuntimeError), mode.paused():
            torch.ones(2) @ torch.ones(3)
        after = torch.exp(one)
    assert after.item() < 0


def test_an_attention_casts_as_it_does_inside_of_double_precision():
    class Slot:
        around = None

    slot = Slot()
    with computing_in_double([slot]):
        assert torch.ones(1).float().dtype == torch.float64
        with slot.around():
            assert torch.ones(1).float().dtype == torch.float32
        assert torch.softmax(torch.ones(2), 0, dtype=torch.float32).dtype == torch.float64
