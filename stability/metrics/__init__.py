"""Measures on tensors: deviation, ULPs, Wasserstein distance, drift. Pure functions of them."""

from stability.metrics.deviation import deviation
from stability.metrics.drift import drift
from stability.metrics.wasserstein import wasserstein_1d

__all__ = ["deviation", "drift", "wasserstein_1d"]
