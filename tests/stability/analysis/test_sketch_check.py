"""What a sketch can say of a number on record: that it is not that of the weights."""

import math

import pytest
import torch

from stability.analysis.sketch_check import TOLERANCE, SketchedWeights, agrees
from stability.metrics.weight_hash import weight_hash
from stability.metrics.weight_sketch import RELATIVE_SD, weight_sketch


def sketched(state):
    return SketchedWeights(weight_hash(state), weight_sketch(state))


def test_the_tolerance_is_five_sd_of_a_sketch():
    assert TOLERANCE == 5 * RELATIVE_SD


@pytest.mark.parametrize(
    ("told", "estimate", "errors", "holds"),
    [
        (1.0, 1.0 + 0.9 * TOLERANCE, 1, True),
        (1.0, 1.0 + 1.1 * TOLERANCE, 1, False),
        (1.0, 1.0 + 1.9 * TOLERANCE, 2, True),
        (0.0, 0.0, 1, True),
        (1e-14, 0.0, 1, False),
        (1e-17, 0.0, 1, True),
        (math.nan, 1.0, 1, False),
        (math.nan, math.nan, 1, True),
        (math.inf, math.inf, 1, True),
    ],
)
def test_a_number_agrees_within_its_errors(told, estimate, errors, holds):
    assert agrees(told, estimate, errors=errors) == holds


def test_equal_bits_are_no_distance_apart_even_where_they_are_no_numbers():
    broken = sketched({"a": torch.tensor([1.0, math.nan])})
    assert broken.distance(broken) == broken.relative_distance(broken) == 0
    other = sketched({"a": torch.tensor([1.0, 2.0])})
    assert math.isnan(other.distance(broken))
    zeros = sketched({"a": torch.zeros(2)})
    assert other.relative_distance(zeros) == math.inf
    assert zeros.relative_distance(other) == pytest.approx(1.0)
