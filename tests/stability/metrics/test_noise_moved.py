"""Which values of a vector noise moves: a walk that a nudge does not repeat, and nothing else."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics import noise_moved as module
from stability.metrics.noise_moved import vector_names

BLOCK = 16
noise_moved = partial(module.noise_moved, part=0.3, least=0.0, block=BLOCK)


def _drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _trained(start, way, seed, *, noise=(), steps=30):
    """Return a vector after a training: a way that all runs go, and a walk of signs in `noise`."""
    end = start + way * (1 + 1e-3 * _drawn(seed, len(start)))
    for begin, stop in noise:
        end[begin:stop] = start[begin:stop] + 1e-3 * _drawn(seed, steps, stop - begin).sign().sum(0)
    return {"v": start}, {"v": end}


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.booleans(), min_size=1, max_size=8),
    over=st.integers(0, BLOCK - 1),
    nudges=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_the_blocks_that_walk_are_found_and_no_others(blocks, over, nudges, seed):
    # the last block holds what is left over
    edges = [*(i * BLOCK for i in range(len(blocks))), size := BLOCK * len(blocks) + over]
    noise = [(edges[i], edges[i + 1]) for i, is_noise in enumerate(blocks) if is_noise]
    start, way = _drawn(seed, size), 0.03 * _drawn(seed + 1, size)
    runs = [_trained(start, way, seed + 2 + i, noise=noise) for i in range(1 + nudges)]
    found = noise_moved(runs[0], runs[1:])
    left_out = {i for begin, end in found.get("v", ()) for i in range(begin, end)}
    assert left_out == {i for begin, end in noise for i in range(begin, end)}
    # ranges that meet are one
    assert all(
        a[1] < b[0] for a, b in zip(found.get("v", ()), found.get("v", ())[1:], strict=False)
    )


def test_a_nudge_is_asked_how_it_went_not_where_it_began():
    """One of many ULPs, or of weights of another size, may begin further away than a run goes."""
    start, way = torch.ones(BLOCK), torch.full((BLOCK,), 1e-3)
    nudge = {"v": start + 5e-3}, {"v": start + 5e-3 + way}
    assert noise_moved(({"v": start}, {"v": start + way}), [nudge]) == {}


@pytest.mark.parametrize(("part", "is_found"), [(0.49, True), (0.51, False)])
def test_a_part_is_one_of_the_way_and_not_of_its_square(part, is_found):
    start, way = torch.zeros(BLOCK), torch.full((BLOCK,), 3.0)
    nudges = [({"v": start}, {"v": way * (1 + sign * 0.5)}) for sign in (1, -1)]
    found = noise_moved(({"v": start}, {"v": way}), nudges, part=part)
    assert found == ({"v": ((0, BLOCK),)} if is_found else {})


def test_what_does_not_move_in_the_baseline_is_kept():
    """A candidate that trains a frozen bias has done so by no noise."""
    still = {"v": torch.ones(BLOCK)}
    assert (
        noise_moved((still, still), [({"v": torch.ones(BLOCK)}, {"v": torch.zeros(BLOCK)})]) == {}
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["baseline", "nudge"])
def test_what_is_not_finite_is_kept(value, whose):
    start, size = torch.zeros(2 * BLOCK), 2 * BLOCK
    runs = {
        name: _trained(start, start, i, noise=[(0, size)])
        for i, name in enumerate(("baseline", "nudge"))
    }
    assert noise_moved(runs["baseline"], [runs["nudge"]]) == {"v": ((0, size),)}
    runs[whose][1]["v"][3] = value
    kept_too = noise_moved(runs["baseline"], [runs["nudge"]])
    if (whose, value) == ("nudge", float("inf")):
        # a nudge that is lost says no less that noise decides there
        assert kept_too == {"v": ((0, size),)}
    else:
        assert kept_too == {"v": ((BLOCK, size),)}


def test_without_a_nudge_nothing_is_known_to_be_noise():
    run = _trained(torch.zeros(BLOCK), torch.zeros(BLOCK), 0, noise=[(0, BLOCK)])
    assert noise_moved(run, []) == {}


def test_few_values_are_not_asked():
    """One of them may be back where it began by chance, as a gain or a scale that is learned."""
    runs = [_trained(torch.zeros(15), torch.zeros(15), seed, noise=[(0, 15)]) for seed in (0, 1)]
    assert noise_moved(runs[0], runs[1:]) == {}


def test_a_vector_that_a_run_lacks_is_kept():
    start = torch.zeros(20)
    runs = [_trained(start, start, seed, noise=[(0, 20)]) for seed in (0, 1)]
    assert noise_moved(runs[0], runs[1:]) == {"v": ((0, 20),)}
    other = {"v": torch.zeros(16)}, {"v": torch.ones(16)}
    assert noise_moved(runs[0], [runs[1], other]) == {}
    assert noise_moved(runs[0], [runs[1], ({}, {})]) == {}


def test_low_precision_is_widened_before_ways_are_compared():
    """Of BF16 weights a way of one ULP and its half are apart by less than BF16 can say."""
    start = torch.full((BLOCK,), 1.0, dtype=torch.bfloat16)
    baseline = {"v": start}, {"v": start + 2**-7}
    nudge = {"v": start}, {"v": start + 2**-6}
    assert noise_moved(baseline, [nudge]) == {"v": ((0, BLOCK),)}
    assert noise_moved(baseline, [nudge], part=1.0) == {}


def test_what_rounding_moves_by_little_is_no_noise_that_matters():
    """Without Adam a bias of keys hardly moves: it takes nothing from E, and is kept."""
    start = torch.zeros(2 * BLOCK)
    runs = [_trained(start, start, i, noise=[(0, 2 * BLOCK)]) for i in range(2)]
    for _, end in runs:
        end["v"][:BLOCK] *= 1e-6
    assert noise_moved(runs[0], runs[1:], least=1e-4) == {"v": ((BLOCK, 2 * BLOCK),)}
    assert noise_moved(runs[0], runs[1:], least=1.0) == {}


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({"w": (64, 64), "b": (64,), "a": (8,), "scale": ()}, ["a", "b"]),
        ({"w": (8, 8), "b": (8,)}, []),  # most of a model: matrices laid flat, or nothing else
        ({"flat": (4096,)}, []),
        ({}, []),
    ],
)
def test_vectors_are_asked_unless_they_are_most_of_the_model(shapes, names):
    assert vector_names(shapes) == names
