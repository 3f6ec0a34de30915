"""The growth table fits a terminal and says each figure with its interval."""

import io
import math

from rich.console import Console

from stability.analysis.arm_growth import ArmGrowth
from stability.analysis.intervals import Interval
from stability.report.terminal.growth import print_growth


def _interval(low, mean, high):
    return Interval(low=low, mean=mean, high=high, n=5, level=0.9)


def _row(arm, rate, **changes):
    values = {
        "arm": arm,
        "rate": rate,
        "phase": (1, 20),
        "slope": _interval(2.46e-6, 2.7e-6, 2.91e-6),
        "lost_in_chaos": None,
    }
    return ArmGrowth(**{**values, **changes})


def _shown(rows):
    console = Console(width=80, record=True, file=io.StringIO())
    print_growth(rows, console)
    return console.export_text()


def test_figures_have_their_intervals_and_fit_80_columns():
    rate = _interval(0.0542, math.log(2) / 10.9, 0.07)
    shown = _shown([_row("flash_all_bf16", rate, lost_in_chaos=100)])
    assert "10.9 [9.9, 12.8]" in shown
    assert "2.7 [2.5, 2.9]e-06" in shown
    assert "1 to 20" in shown
    assert " 100" in shown
    assert "90% interval] of 5 seeds" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_the_slowest_to_double_comes_first_and_arms_without_a_law_are_left_out():
    nan = math.nan
    rows = [
        _row("fast", _interval(0.2, 0.3, 0.4)),
        _row("slow", _interval(-0.1, 0.1, 0.2)),
        _row("rerun", Interval(low=nan, mean=nan, high=nan, n=0, level=0.9)),
    ]
    shown = _shown(rows)
    assert shown.index("slow") < shown.index("fast")
    assert "rerun" not in shown
    assert "6.93 [3.47, inf]" in shown
    assert _shown(rows[2:]) == ""
