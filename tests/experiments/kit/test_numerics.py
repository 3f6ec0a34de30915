"""Numerics that are no profile: what they round."""

from attention_kernels import PROFILES
from experiments.kit.numerics import round_everywhere


def test_everywhere_rounds_at_every_point_of_both():
    flash, baseline = round_everywhere("bf16")
    assert flash == PROFILES["all_bf16"]
    points = ("operands", "products", "scores", "softmax", "probabilities", "output")
    assert [getattr(baseline, point) for point in points] == ["bf16"] * 6
