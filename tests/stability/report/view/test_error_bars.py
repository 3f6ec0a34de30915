"""A mean and its interval in one line: what both share stands once, and nothing is left out."""

from types import SimpleNamespace

import pytest

from stability.analysis.number_text import times
from stability.report.view.error_bars import written_with_bar


def _drift(value: float) -> str:
    return f"{value:.1e}"


@pytest.mark.parametrize(
    ("write", "mean", "low", "high", "said"),
    [
        (_drift, 1.2e-4, 1.1e-4, 1.3e-4, "1.2 [1.1, 1.3]e-04"),
        # an end that the shared power would make 0: the mean keeps its own
        (_drift, 1.2e-4, 1e-7, 2.3e-4, "1.2e-04 [1.0e-07, 2.3e-04]"),
        (times, 0.62, 0.58, 0.66, "0.62x [0.58, 0.66]"),
        (times, 3e-7, 2.5e-7, 3.4e-7, "3.0 [2.5, 3.4]e-07x"),
        (times, 3e-7, 1e-9, 6e-7, "3.0e-07x [1.0e-09, 6.0e-07]"),
    ],
)
def test_what_mean_and_ends_share_stands_once(write, mean, low, high, said):
    ends = SimpleNamespace(low=low, high=high)
    values = SimpleNamespace(mean=mean, low=low, high=high, interval=ends)
    assert written_with_bar(values, write, relative=True) == said
