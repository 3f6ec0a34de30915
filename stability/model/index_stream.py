"""Random numbers by place: each depends on a key and its place in the whole tensor alone.

Weights are drawn and nudged by it, so whoever draws a part of a tensor, in whatever order, on
whatever device, gets the bits that the whole has there: the same under every layout over ranks.
No tensor's draws move another's, so two models share those of every tensor that both have.

The numbers are those of SplitMix64 (Steele, Lea and Flood, 2014) at a counter that starts from the
key (`metrics.mixing`). Normal ones come from uniform ones by the inverse of their distribution
function: Wichura's AS 241 (1988), to some 1e-15. It takes no more than sums, products, quotients
and roots in FP64, which IEEE 754 rounds alike everywhere; the logarithm of the tails, which it does
not, is made of these too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stability.metrics.mixing import GOLDEN, mixed, signed64

__all__ = ["fill_by_place", "normal_at", "sign_at", "uniform_at"]

_PORTION = 2**16
"""Values at a time: what is computed on the way stays in a CPU's cache."""


def uniform_at(key: int, places: Tensor) -> Tensor:
    """Return a number between 0 and 1, neither of them included, for each place: FP64.

    It is an odd multiple of 2^-53.
    """
    words = (_words(key, places) >> 12) & ((1 << 52) - 1)
    return (words.double() + 0.5) * 2.0**-52


def normal_at(key: int, places: Tensor) -> Tensor:
    """Return a number of the standard normal distribution for each place: FP64, at most 8.3."""
    return _normal_quantile(uniform_at(key, places))


def sign_at(key: int, places: Tensor) -> Tensor:
    """Return 1 or -1 for each place, as often: int64."""
    return ((_words(key, places) >> 63) & 1) * 2 - 1


def fill_by_place(whole: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    """Fill a whole contiguous tensor in place with what `at` gives for its places; return it."""
    flat = whole.view(-1)
    for start in range(0, flat.numel(), _PORTION):
        end = min(start + _PORTION, flat.numel())
        flat[start:end] = at(torch.arange(start, end, device=whole.device))
    return whole


def _words(key: int, places: Tensor) -> Tensor:
    """Return 64 random bits for each place, int64."""
    return mixed((places + 1) * signed64(GOLDEN) + signed64(key))


# Wichura's PPND16: numerators and denominators, from the constant term on
_MIDDLE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR_TAIL = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)


def _normal_quantile(p: Tensor) -> Tensor:
    """Return where the standard normal distribution function is `p`, FP64 in and out."""
    q = p - 0.5
    z = q * _quotient(_MIDDLE, 0.180625 - q * q)
    in_tail = q.abs() > 0.425
    tail = q[in_tail]
    r = (-_log(torch.where(tail < 0, p[in_tail], 1 - p[in_tail]))).sqrt()
    far = torch.where(r > 5, _quotient(_FAR_TAIL, r - 5), _quotient(_TAIL, r - 1.6))
    z[in_tail] = torch.where(tail < 0, -far, far)
    return z


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal numbers, FP64, to 4e-16 of it."""
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < 0.7071067811865476
    mantissa = torch.where(is_low, 2 * mantissa, mantissa)
    exponent = exponent.double() - is_low.double()
    # 2 artanh(s) with |s| < 0.172
    s = (mantissa - 1) / (mantissa + 1)
    series = _polynomial([2 / (2 * n + 1) for n in range(12)], s * s)
    return exponent * 0.6931471805599453 + s * series


def _quotient(terms: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    return _polynomial(terms[0], x) / _polynomial(terms[1], x)


def _polynomial(terms: Sequence[float], x: Tensor) -> Tensor:
    """Return the polynomial with these terms, from the constant on, by Horner's rule."""
    value = torch.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        # two operators: one that rounds once would give other bits where a machine has it
        value = value * x
        value = value + term
    return value
