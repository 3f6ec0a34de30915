"""The sketch of weights: distances to its stated error, and the same bits under any sharding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.numbered_values import NumberedValues
from stability.metrics.weight_sketch import (
    RELATIVE_SD,
    WEIGHT_BUCKETS,
    _add_on_cpu,
    add_by_torch,
    buckets_of,
    finished_weight_sketch,
    local_weight_sketch,
    weight_sketch,
)
from tests.stability.random_pieces import shardings

KEYS = (2**63 + 7, 5)
MODEL = {"embed": (400, 250), "mlp": (3, 200, 150), "norm": (97,)}


def weights(seed, dtype=torch.float32, size=0.02):
    draw = torch.Generator().manual_seed(seed)
    return {
        name: size * torch.randn(shape, generator=draw, dtype=dtype)
        for name, shape in MODEL.items()
    }


def apart(one, other):
    squares = [(one[k].double() - other[k].double()).square().sum() for k in one]
    return math.sqrt(sum(squares))


def moved(state, change):
    return {name: value + change(name, value) for name, value in state.items()}


STATE = {
    "wide": torch.randn(7, 5),
    "mask": torch.tensor([True, False]),
    "halves": torch.randn(4).bfloat16(),
    "doubles": torch.randn(3, 2).double(),
}


@settings(max_examples=10)
@given(shardings(STATE), st.randoms())
def test_any_sharding_and_any_order_give_the_same_bits(held, shuffler):
    expected = weight_sketch(STATE)
    sums = []
    for pieces in held:
        names = list(pieces)
        shuffler.shuffle(names)
        sums.append(local_weight_sketch({name: pieces[name] for name in names}))
    found = finished_weight_sketch(sum(sums), held[-1])
    assert torch.equal(found.buckets, expected.buckets)
    assert found.outline == expected.outline
    assert found.distance(expected) == 0
    assert found.cosine(expected) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("places", [None, torch.tensor(range(0, 900, 50))], ids=["range", "places"])
def test_torch_gives_the_bits_of_the_loop(dtype, places):
    odd = [0.0, -0.0, 2.0**-65, 3 * 2.0**-65, 5 * 2.0**-65, 1e-300, -(2.0**31), -3e9, 2.1e9]
    values = torch.tensor([*odd, math.inf, math.nan, -1.5, 2.0**20 + 2.0**-30, 1 / 3])
    values = torch.cat([values.double(), torch.randn(4).double()]).to(dtype)
    part = NumberedValues(values, 0 if places is not None else 2**40, places)
    one, other = (torch.zeros(3, WEIGHT_BUCKETS, dtype=torch.int64) for _ in range(2))
    assert _add_on_cpu(part, KEYS, one) == add_by_torch(part, KEYS, other) == 4
    assert torch.equal(one, other)


@settings(max_examples=40)
@given(st.lists(st.floats(-(2.0**31), 2.0**31, exclude_min=True, exclude_max=True), min_size=1))
def test_sums_are_exact_to_the_rounding_of_each_value(values):
    # one bucket for all: its sum over Python's integers, each value rounded half to even
    units = 0
    for value in values:
        numerator, denominator = abs(value).as_integer_ratio()
        whole, rest = divmod(numerator << 64, denominator)
        whole += 2 * rest > denominator or (2 * rest == denominator and whole % 2)
        units += whole if value > 0 else -whole
    joined = torch.zeros(3 * WEIGHT_BUCKETS + 1, dtype=torch.int64)
    digits = joined[:-1].view(3, -1)
    for value in values:
        part = NumberedValues(torch.tensor([value], dtype=torch.float64), 0)
        _add_on_cpu(part, KEYS, digits)
    buckets = finished_weight_sketch(joined, {}).buckets
    found = buckets.abs().max().item()
    assert buckets.count_nonzero() <= 1
    assert found == pytest.approx(abs(units) / 2**64, rel=2**-52, abs=0)


SIZES = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_and_cosines_are_as_near_as_stated(dtype):
    """Over 25 differences of each size, from 1e-8 of the weights' norm to all of it."""
    errors, cosines = [], []
    for seed in range(5):
        base = weights(seed, dtype)
        own = weight_sketch(base)
        for size in SIZES:
            noise = weights(1000 + seed, dtype, 0.02 * size)
            other = moved(base, lambda name, value, noise=noise: noise[name].to(value.dtype))
            found = weight_sketch(other)
            errors.append(own.distance(found) / apart(base, other) - 1)
            flat, flat_other = (
                torch.cat([x.double().flatten() for x in state.values()]) for state in (base, other)
            )
            cosine = torch.nn.functional.cosine_similarity(flat, flat_other, 0).item()
            cosines.append(own.cosine(found) - cosine)
    errors, cosines = torch.tensor(errors), torch.tensor(cosines)
    assert errors.abs().max() < 0.01
    assert cosines.abs().max() < 0.02
    # no better than stated either: sizes of one seed have one difference, so 5 are independent
    assert 0.4 < errors.square().mean().sqrt() / RELATIVE_SD < 1.6


def constant(name, value):
    return torch.full_like(value, 3e-4)


def one_tensor(name, value):
    return 1e-3 * torch.ones_like(value) if name == "norm" else torch.zeros_like(value)


def proportional(name, value):
    return 1e-3 * value


def one_row(name, value):
    change = torch.zeros_like(value)
    if name == "embed":
        change[17] = 0.01
    return change


def last_bits(name, value):
    return torch.nextafter(value, torch.full_like(value, math.inf)) - value


@pytest.mark.parametrize(
    "change", [constant, one_tensor, proportional, one_row, last_bits], ids=lambda x: x.__name__
)
def test_structured_differences_are_as_near(change):
    base = weights(3)
    other = moved(base, change)
    found = weight_sketch(base).distance(weight_sketch(other))
    assert found == pytest.approx(apart(base, other), rel=3.6 * RELATIVE_SD)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e3])
def test_one_changed_value_is_exact(size):
    base = weights(4)
    other = {name: value.clone() for name, value in base.items()}
    other["mlp"][1, 2, 3] = size
    found = weight_sketch(base).distance(weight_sketch(other))
    norm = weight_sketch(base).norm
    assert found == pytest.approx(apart(base, other), rel=1e-12, abs=2**-52 * norm)


def test_values_without_digits_are_told():
    base = weights(5)
    for value in (math.nan, -math.inf, 2.0**31):
        other = {**base, "norm": base["norm"].clone()}
        other["norm"][3] = value
        found = weight_sketch(other)
        assert found.outside == 1
        assert math.isnan(found.norm)
        assert math.isnan(weight_sketch(base).distance(found))
        assert math.isnan(found.cosine(found))


def test_sketches_of_other_models_are_refused():
    base, other = weight_sketch(weights(6)), weights(6)
    other["more"] = torch.ones(1)
    with pytest.raises(ValueError, match="weights of the same names and shapes, got outlines"):
        base.distance(weight_sketch(other))


def test_a_narrower_dtype_of_the_same_numbers_has_the_same_sketch():
    halves = {name: value.bfloat16() for name, value in weights(7).items()}
    one, other = weight_sketch(halves), weight_sketch({k: x.double() for k, x in halves.items()})
    assert one.distance(other) == 0
    assert one.norm == other.norm > 0


def test_known_state_has_known_buckets():
    # records of years are compared by it: it must never change
    sketch = weight_sketch({"a": torch.tensor([[1.0, -2.0], [0.5, 4.0]]), "b": torch.tensor(-3.0)})
    found = {i: sketch.buckets[i].item() for i in sketch.buckets.nonzero().flatten().tolist()}
    assert found == {21790: -2.0, 25720: 0.5, 25948: 1.0, 30153: 3.0, 35275: 4.0}
    assert sketch.outline == "aa0fc0eee659b0a9"


def test_no_weights_have_a_sketch_of_zeros():
    assert weight_sketch({"mask": torch.ones(2).bool()}).norm == 0
    assert weight_sketch({}).norm == 0


def test_a_block_of_places_has_buckets_of_its_own():
    places = torch.arange(2**16, 2**17)
    for key in range(20):
        assert len(buckets_of(places, key).unique()) == WEIGHT_BUCKETS


def test_places_of_two_blocks_meet_as_seldom_as_at_random():
    one, other = torch.arange(400), torch.arange(400) + 2**16
    met = torch.tensor(
        [
            float((buckets_of(one, key)[:, None] == buckets_of(other, key)).sum())
            for key in range(500)
        ]
    )
    expected = 400 * 400 / WEIGHT_BUCKETS  # 2.44 of 160,000 pairs
    assert abs(met.mean() / expected - 1) < 5 * math.sqrt(expected / 500) / expected
    # as Poisson's law has it: no hundreds side by side
    assert met.max() <= 15
