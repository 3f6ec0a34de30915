"""Finds what a tensor core is made of, by sums of products whose results tell.

Each sum is one element of a matrix product. Two large products cancel, and whether a small one
beside them is left tells how many bits alignment keeps, which way it cuts, and how many products
are added at once; sums just above a power of two tell what the accumulator holds and how it is
rounded. The ideas are those of Fasi, Higham, Mikaitis and Pranesh (PeerJ Computer Science 7:e330,
2021). Leaves out random operands, and every way to multiply (`tensor_core_probe`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.tensor_core_models import TensorCoreModel

__all__ = ["MOST_BITS", "TERMS", "Product", "expected", "measured"]

Product = Callable[[Tensor, Tensor], Tensor]
"""Takes FP32 (M, K) and (K, N) on the operands' grid, and returns FP32 (M, N)."""

TERMS = 128
"""K of the sums, of which most products are zero."""
MOST_BITS = 34
"""The most bits that a small product lies below a large one: of e4m3, 2**-18 below 2**16."""


def expected(model: TensorCoreModel) -> dict[str, Any]:
    """Return what `measured` finds of a model."""
    # an accumulator of more bits than a sum can have looks like one of so many
    bits = min({"fp32": 23, "e8m13": 13}[model.accumulator], model.fraction_bits + 1)
    return {
        "fraction_bits": model.fraction_bits,
        "products": model.products,
        "accumulator_bits": bits,
        "rounding": "toward_zero",
        "cut": model.cut,
        "normalised": False,
    }


def measured(run: Product, device: str = "cuda") -> dict[str, Any]:
    """Return what revealing inputs say of a product: the fields of its model."""
    # Large is 2**16. Two of them cancel, so what is left shows what became of a small product.
    pair = {0: 1.0, 1: -1.0}
    bits = range(8, MOST_BITS + 1)
    left = _diagonal(run, [pair | {2: 2.0**-f} for f in bits], device)
    kept = max((f for f, value in zip(bits, left, strict=True) if value != 0), default=0)
    # One that is cut off beside the pair is left where it comes a block later.
    places = range(2, 2 + 64)
    lost = 2.0 ** -min(kept + 3, MOST_BITS)
    left = _diagonal(run, [pair | {place: lost} for place in places], device)
    later = [place for place, value in zip(places, left, strict=True) if value != 0]
    # In the last block, as each later one aligns the accumulator anew. 3 has the exponent 1.
    last = range(TERMS - 4, TERMS)
    sums = _diagonal(
        run, [dict(zip(last, (1.0, 1.0, 1.0, 2.0**-f), strict=True)) for f in bits], device
    )
    held = 1 + max((f for f, value in zip(bits, sums, strict=True) if value != 3), default=0)
    # Above 2 the last bit held is 2**(1 - held): an odd number of those and a half is a tie.
    tie = dict(zip(last, (1.0, 1.0, 2.0 ** (1 - held), 2.0**-held), strict=True))
    negative = {place: -value for place, value in tie.items()}
    small = -1.5 * 2.0**-kept
    large = {0: 2.25, 1: -2.25, 2: 2.0**-kept}
    up, down, cut, beside = _diagonal(run, [tie, negative, pair | {2: small}, large], device)
    return {
        "fraction_bits": kept,
        "products": later[0] if later else 0,
        "accumulator_bits": held,
        "rounding": _rounding((up - 2) * 2.0 ** (held - 1), (down + 2) * 2.0 ** (held - 1)),
        "cut": {-1.0: "toward_zero", -2.0: "down"}.get(cut * 2.0**kept, f"to {cut * 2.0**kept:g}"),
        "normalised": beside == 0,
    }


def _rounding(up: float, down: float) -> str:
    """Return how 1.5 and -1.5 last bits were rounded."""
    names = {(1, -1): "toward_zero", (1, -2): "down", (2, -2): "nearest_even", (2, -1): "up"}
    return names.get((up, down), f"{up:g} and {down:g}")


def _diagonal(run: Product, rows: list[dict[int, float]], device: str) -> list[float]:
    """Return sums of products, in units of 2**16, each given as place -> value of a product.

    Values are plus or minus 1, 1.5 or 2.25 times a power of two.
    """
    a, b = torch.zeros(64, TERMS), torch.zeros(TERMS, 64)
    for row, products in enumerate(rows):
        for place, value in products.items():
            left, right = _factors(abs(value))
            a[row, place], b[place, row] = left, right if value > 0 else -right
    sums = run(a.to(device), b.to(device)).diagonal()[: len(rows)]
    return [value * 2.0**-16 for value in sums.tolist()]


def _factors(value: float) -> tuple[float, float]:
    """Return two values of every format here whose product is `value` * 2**16."""
    odd = {1.0: (1.0, 1.0), 1.5: (1.5, 1.0), 1.125: (1.5, 1.5)}
    exponent = int(torch.tensor(value, dtype=torch.float64).log2().floor())
    left, right = odd[value / 2.0**exponent]
    exponent += 16 if value / 2.0**exponent != 1.125 else 15
    return left * 2.0 ** (exponent // 2), right * 2.0 ** (exponent - exponent // 2)
