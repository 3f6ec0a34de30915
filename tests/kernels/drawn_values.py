"""Values that roundings are tried on: any bits, and numbers of the size of narrow formats."""

import numpy as np


def drawn(count, carrier, seed=0):
    """As many random bit patterns of the carrier, and values with exponents of narrow formats."""
    generator = np.random.default_rng(seed)
    integer = {np.float32: np.uint32, np.float64: np.uint64}[carrier]
    patterns = generator.integers(0, np.iinfo(integer).max, count, dtype=integer, endpoint=True)
    exponent = generator.integers(-30, 20, count)
    spread = np.ldexp(generator.standard_normal(count), exponent).astype(carrier)
    return np.concatenate([patterns.view(carrier), spread])
