"""The GPU's exact sum of squares: interpreted here, and compiled where there is a GPU."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.triton.runtime import interpreted
from stability.metrics import exact_sums, square_kernel
from stability.metrics.exact_sums import new_bins, sum_of_bins
from stability.metrics.sharded_sums import norm_of
from stability.metrics.square_kernel import square_terms

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.integers(-(2**24), 2**24).map(lambda n: float(np.float32(n * 2.0**-30)))


def by_kernel(values):
    with np.errstate(all="ignore"):
        return square_terms(values, interpreted)


def sum_of(terms):
    bins = new_bins(terms.device)
    exact_sums._put(terms, bins)
    return sum_of_bins(bins.cpu().numpy())


def by_loop(values):
    bins = new_bins(values.device)
    exact_sums._squares_on_cpu(values, bins)
    return sum_of_bins(bins.numpy())


@settings(max_examples=60)
@given(st.sampled_from([FINITE, NEAR]).flatmap(lambda x: st.lists(x, min_size=1, max_size=30)))
def test_the_terms_add_up_to_the_sum_of_squares(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    assert sum_of(by_kernel(tensor)) == by_loop(tensor)


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 20_000])
@pytest.mark.parametrize("last", [0.0, 2.0**-149, 1e-30])
def test_slices_that_are_nearly_full_lose_nothing(count, last):
    """Near 1, with bits that no rounding could leave alone, for all values of a program."""
    steps = torch.randint(1, 2**10, (count,), generator=torch.Generator().manual_seed(0))
    values = 1 - steps * 2.0**-24
    values[-1] = last
    assert sum_of(by_kernel(values)) == by_loop(values)


def test_as_many_values_as_it_takes_fit_into_64_bits():
    assert square_kernel.MOST * 2**square_kernel._SLICE <= 2**63
    assert square_kernel._BLOCK * 2**square_kernel._SLICE <= 2**53


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_others(odd):
    assert by_kernel(torch.tensor([1.0, odd, 2.0])) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpus_norm_has_the_bits_of_a_cpus(dtype):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    tensors = [1e-4 * draw(size) * draw(size) ** 7 for size in (7, 0, 4096, 100_003, 5_000_000)]
    tensors += [torch.zeros(3), torch.tensor([2.0**-149, 3e38, -0.0])]
    given = [tensor.to(dtype) for tensor in tensors]
    assert norm_of([x.cuda() for x in given]) == norm_of(given)
    for odd in (math.nan, math.inf):
        more = [*given, torch.tensor([1.0, odd], dtype=dtype)]
        assert repr(norm_of([x.cuda() for x in more])) == repr(norm_of(more))
