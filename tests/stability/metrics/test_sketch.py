"""A sketch is linear, keeps norms and dot products, and is the same wherever it is made."""

import math

import pytest
import torch

from stability.metrics.mixing import GOLDEN, mixed, signed64
from stability.metrics.sketch import SKETCH_BUCKETS, _mixed, sketch


def _drawn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [0, 1, 2047, 2048])
def test_a_vector_that_fits_is_kept_as_it_is(n):
    x = _drawn(n, 0)
    kept = sketch([x])
    assert torch.equal(kept[:n], x)
    assert not kept[n:].any()


def test_norms_and_dot_products_are_kept_within_the_stated_deviation():
    buckets, n = 512, 20_001
    x, y = _drawn(n, 0), _drawn(n, 1)
    # a coordinate that dominates is kept exactly, whichever bucket it falls into
    x[17] += 300.0
    y += 0.5 * x
    for a, b in ((x, x), (x, y), (y, y), (x - y, x)):
        exact = float(a @ b)
        cosine = exact / float(a.norm() * b.norm())
        deviation = float(a.norm() * b.norm()) * math.sqrt((1 + cosine**2) / buckets)
        found = float(sketch([a], buckets) @ sketch([b], buckets))
        # one draw of the map: four deviations leave out 6 in 100,000
        assert abs(found - exact) < 4 * deviation
        assert found != exact


def test_the_mean_over_maps_is_the_dot_product():
    # shifting the vector by whole zeros gives it other signs and turns: another draw of the map
    buckets, n = 64, 1000
    x, y = _drawn(n, 2), _drawn(n, 3)
    exact = float(x @ y)
    found = torch.tensor(
        [
            float(sketch([torch.zeros(k), x], buckets) @ sketch([torch.zeros(k), y], buckets))
            for k in range(300)
        ]
    )
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - exact) < 4 * error
    expected = float(x.norm() * y.norm()) / math.sqrt(buckets)
    assert 0.8 * expected < found.std() < 1.25 * expected


def test_the_sketch_of_a_sum_is_the_sum_of_sketches():
    x, y = _drawn(50_000, 4), _drawn(50_000, 5)
    torch.testing.assert_close(sketch([x + y]), sketch([x]) + sketch([y]), rtol=0, atol=1e-12)


def test_a_single_changed_weight_keeps_its_size_exactly():
    x = torch.zeros(100_000)
    x[70_001] = 0.1875
    assert sketch([x]).norm() == 0.1875


def test_parts_are_laid_end_to_end_and_give_the_same_bits_again():
    x = _drawn(30_000, 6)
    whole = sketch([x])
    assert torch.equal(whole, sketch([x[:100].view(10, 10), x[100:]]))
    assert torch.equal(whole, sketch([x]))
    assert not torch.equal(whole, sketch([x.flip(0)]))


def test_the_hash_is_the_published_one():
    # the first outputs of SplitMix64 from state 0, as in the Java library's SplittableRandom
    assert [_mixed(i) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    counters = torch.tensor([0, 1, 5, 123_456_789, 1 << 62])
    unsigned = [
        value & ((1 << 64) - 1) for value in mixed((counters + 1) * signed64(GOLDEN)).tolist()
    ]
    assert unsigned == [_mixed(i) for i in counters.tolist()]


def test_no_bucket_is_refused():
    with pytest.raises(ValueError, match="sketch: buckets must be >= 1, got 0"):
        sketch([torch.ones(3)], 0)
    assert SKETCH_BUCKETS == 2048
