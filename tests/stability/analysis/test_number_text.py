"""Numbers as text: small differences keep their sign and digits."""

import math

import pytest

from stability.analysis.number_text import bounds, nats, three_figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1.7e-5, "-1.7e-5"),
        (0.00022, "+2.2e-4"),
        (0.005, "+0.005"),
        (-0.0123, "-0.012"),
        (3.14, "+3.1"),
        (1234.0, "+1.2e3"),
        (0.0, "0"),
        (-0.0, "0"),
        (math.nan, "+nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_difference_of_losses_is_never_a_negative_zero(value, text):
    assert nats(value) == text


def test_an_interval_has_its_ends_in_the_same_form():
    assert bounds(-7.6e-5, 4.2e-5, nats) == " [-7.6e-5, +4.2e-5]"
    assert bounds(math.nan, 1.0, nats) == ""


def test_a_factor_has_three_figures():
    written = [three_figures(value) for value in (1.0, 0.98312, 26.24, 100.2, 20312.0)]
    assert written == ["1.00", "0.983", "26.2", "100", "2.03e+04"]
