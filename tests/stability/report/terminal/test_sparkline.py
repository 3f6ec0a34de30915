"""A sparkline shows what is on record, and shows nothing else as if it were."""

import io
import math

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stability.report.terminal.sparkline import Scale, Sparks, evenly, linear_scale, log_scale

UNICODE = Sparks("▁▂▃▄▅▆▇█", "·")


def test_equal_factors_are_equal_heights():
    values = [10.0**power for power in range(-9, -1)]
    assert UNICODE.line(values, log_scale(values)) == UNICODE.blocks


def test_what_has_no_place_on_the_scale_is_no_block():
    scale = Scale(1e-3, 1.0, is_log=True)
    values = [None, 0.0, math.nan, math.inf, 2.0, 1e-4, -1.0, 1.0]
    assert UNICODE.line(values, scale) == "·0!!^vv█"
    assert UNICODE.line([3.0, 3.0], log_scale([3.0, 3.0])) == "▅▅"
    assert UNICODE.line([0.0, None], log_scale([0.0])) == "0·"


def test_one_absurd_value_does_not_flatten_the_others():
    values = [-4.0, -1.0, -1.0, 1.0, 1.0, 4.0, 1e31]
    assert UNICODE.line(values, linear_scale(values)) == "▁▄▄▅▅█^"
    assert UNICODE.line([-2.0, 2.0], linear_scale([-2.0, 2.0])) == "▁█"


def test_a_console_without_blocks_gets_ascii():
    class Latin(io.StringIO):
        encoding = "ascii"

    sparks = Sparks.for_console(Console(file=Latin()))
    assert (sparks.line([None, 0.0, 1.0, 2.0], Scale(1.0, 2.0, True)) + sparks.key()).isascii()
    assert Sparks.for_console(Console(file=io.StringIO())) == UNICODE


@given(st.lists(st.integers(), unique=True).map(sorted), st.integers(2, 40))
def test_thinning_keeps_both_ends_and_the_order(steps, most):
    kept = evenly(steps, most)
    assert len(kept) == min(len(steps), most)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(steps)
    assert kept[:1] + kept[-1:] == steps[:1] + steps[-1:]
