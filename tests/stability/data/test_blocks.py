"""Blocks and batches: every block once an epoch, and any step without those before it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.data.datamodule import batch_indices, cut_blocks

SEEDS = st.integers(-(2**40), 2**40)
SIZES = st.integers(1, 9)
COUNTS = st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(1, 20))
def test_blocks_are_the_stream_without_its_rest(n_tokens, context):
    tokens = torch.arange(n_tokens)
    blocks = cut_blocks(tokens, context)
    assert blocks.shape == (n_tokens // (context + 1), context + 1)
    assert torch.equal(blocks.flatten(), tokens[: blocks.numel()])


@settings(deadline=None, max_examples=60)
@given(SEEDS, SIZES, COUNTS)
def test_each_epoch_visits_every_block_once(order_seed, batch_size, n_blocks):
    steps = 3 * n_blocks // batch_size + 1
    visited = torch.cat([batch_indices(order_seed, s, batch_size, n_blocks) for s in range(steps)])
    for epoch in range(3):
        one = visited[epoch * n_blocks : (epoch + 1) * n_blocks]
        assert sorted(one.tolist()) == list(range(n_blocks))


@settings(deadline=None, max_examples=30)
@given(SEEDS, SIZES, COUNTS, st.randoms(use_true_random=False))
def test_a_batch_needs_no_other_batch(order_seed, batch_size, n_blocks, shuffler):
    steps = list(range(12))
    in_order = {s: batch_indices(order_seed, s, batch_size, n_blocks).tolist() for s in steps}
    shuffler.shuffle(steps)
    state = torch.get_rng_state()
    for step in steps:
        assert batch_indices(order_seed, step, batch_size, n_blocks).tolist() == in_order[step]
    assert torch.equal(torch.get_rng_state(), state)


def test_epochs_and_seeds_have_their_own_order():
    orders = [batch_indices(seed, epoch, 50, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    orders.append(list(range(50)))
    assert len({tuple(order) for order in orders}) == 5


def test_the_order_of_a_seed_is_the_same_on_every_machine():
    assert batch_indices(0, 0, 8, 8).tolist() == [5, 1, 4, 2, 3, 7, 6, 0]


def test_no_block_is_refused():
    with pytest.raises(ValueError, match="n_blocks must be >= 1, got 0"):
        batch_indices(0, 0, 1, 0)
