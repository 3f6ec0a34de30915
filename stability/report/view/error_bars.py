"""The error bar beside a mean over the seeds: its two ends, and how they are written.

The bar is the 90 % interval of the mean. With fewer than three seeds there is no such
interval (`analysis.intervals`), and the bar is the range from the smallest to the largest seed.
"""

import math
from collections.abc import Callable

from stability.analysis.arm_growth import ArmGrowth, Dynamics
from stability.analysis.intervals import FEWEST, Interval
from stability.analysis.number_text import MISSING, span, times
from stability.analysis.seed_values import SeedValues

__all__ = [
    "LEVEL",
    "bar_ends",
    "bar_kind",
    "bars_are",
    "growth_cells",
    "growth_sentence",
    "written_bar",
    "written_with_bar",
]

LEVEL = 0.9
EN_DASH = "\N{EN DASH}"


def bar_ends(values: SeedValues) -> tuple[float, float]:
    """Return the interval of the mean, or the smallest and largest seed where there is none."""
    interval = values.interval
    return (values.low, values.high) if math.isnan(interval.low) else (interval.low, interval.high)


def bar_kind(values: SeedValues) -> str:
    """Return what `bar_ends` are: `90 % interval`, `range of the seeds` or `one seed`."""
    if not math.isnan(values.interval.low):
        return f"{100 * LEVEL:.0f} % interval"
    return "range of the seeds" if values.n > 1 else "one seed"


def bars_are(seeds: int) -> str:
    """Return the words that explain `bar_ends` in a study of so many seeds."""
    if seeds >= FEWEST:
        return (
            f"{LEVEL:.0%} interval of the mean over the seeds, and smallest to largest seed where "
            f"fewer than {FEWEST} have run"
        )
    return "smallest to largest seed" if seeds > 1 else "none, with one seed"


def written_bar(values: SeedValues, write: Callable[[float], str]) -> str:
    """Write the bar alone: `[low, high]` for an interval, `low-high` for a range.

    It is empty where both ends are written alike.
    """
    if math.isnan(values.interval.low):
        return span(values, write, EN_DASH)
    low, high = bar_ends(values)
    return _bracketed(write(values.mean), low, high, write) if write(low) != write(high) else ""


def written_with_bar(values: SeedValues, write: Callable[[float], str], *, relative: bool) -> str:
    """Write a mean and its interval in one line, else the mean and half of the seeds' range.

    What the mean and both ends share stands once: `1.2 [1.1, 1.3]e-04`, `0.62x [0.58, 0.66]`. Half
    of a range is a percentage of the mean if `relative`, else in the mean's own unit.
    """
    text, interval = write(values.mean), values.interval
    if interval.low < interval.high:
        ends = _bracketed(text, interval.low, interval.high, write)
        return f"{text.partition('e')[0] if ']e' in ends else text} {ends}"
    half_range = (values.high - values.low) / 2
    if half_range > 0:
        share = 100 * half_range / abs(values.mean) if values.mean else 0.0
        text += f" ±{share:.0f}%" if relative else f" ±{write(half_range)}"
    return text


def _bracketed(mean: str, low: float, high: float, write: Callable[[float], str]) -> str:
    """Write an interval without what its ends share with the text of the mean.

    `[1.1, 1.3]e-04` beside `1.2e-04`, `[0.58, 0.66]` beside `0.62x`, `[2.5, 3.4]e-07x` beside
    `3.0e-07x`.
    """
    _, _, exponent = mean.removesuffix("x").partition("e")
    scale = 10.0 ** int(exponent) if exponent else 1.0
    # below a twentieth of the shared power of ten an end would be written as 0
    if exponent and min(abs(low), abs(high)) >= 0.05 * scale:
        unit = "x" if mean.endswith("x") else ""
        return f"[{low / scale:.1f}, {high / scale:.1f}]e{exponent}{unit}"
    return f"[{write(low).removesuffix('x')}, {write(high).removesuffix('x')}]"


def growth_cells(row: ArmGrowth) -> list[str]:
    """Return an arm's growth as text: arm, offset to the nudges, slope, chaos from."""
    return [
        row.arm,
        _offset(row.offset),
        _slope(row.slope),
        MISSING if row.lost_in_chaos is None else str(row.lost_in_chaos),
    ]


def growth_sentence(dynamics: Dynamics) -> str:
    """Return how fast the training drives tiny differences apart, or why no rate is stated."""
    if not dynamics.is_exponential:
        return f"No rate of growth is stated: {dynamics.reason}."
    first, last = dynamics.phase
    return (
        f"A tiny difference doubles in {_doubling(dynamics)} steps, from step {first} to {last}: "
        f"the nudges' drift, over {dynamics.seeds} seeds."
    )


def _offset(value: Interval) -> str:
    """Write an offset and its interval: `12x [10, 14]`; a dash where there is none."""
    if math.isnan(value.mean):
        return MISSING
    mean = times(value.mean)
    return (
        mean
        if math.isnan(value.low)
        else f"{mean} {_bracketed(mean, value.low, value.high, times)}"
    )


def _doubling(dynamics: Dynamics) -> str:
    """Write the doubling time and its interval: `10.9 [9.9, 12.8]`; a rate of 0 never doubles."""
    rate = dynamics.rate
    if math.isnan(rate.low):
        return _steps(dynamics.doubling_time)
    slowest = math.log(2) / rate.low if rate.low > 0 else math.inf
    fastest = math.log(2) / rate.high if rate.high > 0 else math.inf
    return f"{_steps(dynamics.doubling_time)} [{_steps(fastest)}, {_steps(slowest)}]"


def _steps(count: float) -> str:
    return f"{count:.0f}" if 100 <= count < math.inf else f"{count:.3g}"


def _slope(value: Interval) -> str:
    """Write a slope and its interval with one exponent: `2.7 [2.5, 2.9]e-06`."""
    mantissa, _, exponent = f"{value.mean:.1e}".partition("e")
    if math.isnan(value.low):
        return f"{mantissa}e{exponent}"
    low, high = (f"{end / 10 ** int(exponent):.1f}" for end in (value.low, value.high))
    return f"{mantissa} [{low}, {high}]e{exponent}"
