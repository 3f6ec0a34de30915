"""Rescales against a loop over single scores, and against the law of keys in no order."""

import pytest
import torch

from experiments.kit.rescales import rescales


def _draw(*size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def _one_row(q_row, keys, block_k):
    moves, largest = 0, None
    for start in range(0, len(keys), block_k):
        before = largest
        for key in keys[start : start + block_k]:
            score = float(q_row @ key)
            largest = score if largest is None else max(largest, score)
        moves += before is not None and largest > before
    return moves


@pytest.mark.parametrize("block_k", [1, 5, 16, 100])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_is_the_count_of_a_loop_over_keys(block_k, kv_heads):
    q, k = _draw(2, 2, 7, 16), _draw(2, kv_heads, 41, 16, seed=1)
    expected = [
        [[_one_row(row, k[b, h * kv_heads // 2], block_k) for row in q[b, h]] for h in range(2)]
        for b in range(2)
    ]
    assert rescales(q, k, block_k=block_k).tolist() == expected


def test_keys_in_no_order_move_it_a_harmonic_number_of_times():
    q, k = _draw(1, 8, 512, 16, dtype=torch.bfloat16), _draw(1, 8, 256, 16, seed=1)
    found = rescales(q, k.bfloat16(), block_k=16).double().mean()
    assert found == pytest.approx(sum(1 / j for j in range(2, 17)), rel=0.05)


def test_equal_scores_are_no_move_and_negative_ones_are():
    q = torch.ones(1, 1, 1, 1)
    equal, rising = torch.tensor([3.0, 3.0, 3.0, 3.0]), torch.tensor([-4.0, -3.0, -2.0, -1.0])
    assert rescales(q, equal.reshape(1, 1, 4, 1), block_k=1).item() == 0
    assert rescales(q, rising.reshape(1, 1, 4, 1), block_k=1).item() == 3


def test_what_does_not_fit_is_refused():
    q, k = _draw(1, 3, 4, 8), _draw(1, 2, 4, 8)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 3 and 2"):
        rescales(q, k, block_k=2)
    with pytest.raises(ValueError, match="block_k must be at least 1, got 0"):
        rescales(q, q, block_k=0)
