"""Test inputs are what they say: their shape, their grid, their law, where sequences start."""

import pytest
import torch

from attention_kernels import golden_attention
from attention_kernels.testing import HARD_SHAPES, Shape, make_packed, make_qkv


def test_inputs_lie_on_the_grid_of_their_dtype_and_follow_the_outlier_law():
    shape = Shape(1, 4, 2, 512, 300, 64)
    q, k, v = make_qkv(shape, torch.float16, torch.Generator().manual_seed(0), outliers=True)
    assert (q.dtype, q.shape, k.shape) == (torch.float16, (1, 4, 512, 64), (1, 2, 300, 64))
    assert v.shape == k.shape
    # Variance 1 + 0.001 * 100; the fourth moment 3 (1 + ...) makes its own error about 1 %.
    assert q.float().var().item() == pytest.approx(1.1, rel=0.05)
    assert 2e-4 < (q.abs() > 5).float().mean().item() < 1e-3


def test_shape_ids_spell_the_shape_and_are_unique():
    assert str(Shape(1, 3, 1, 113, 203, 96)) == "b1-h3-g1-q113-k203-d96"
    assert len({str(shape) for shape in HARD_SHAPES}) == len(HARD_SHAPES)


def packed(query_lens=(3, 5), key_lens=(9, 5)):
    generator = torch.Generator().manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    return make_packed(query_lens, key_lens, **sizes, generator=generator)


def test_packed_inputs_say_where_sequences_start():
    q, k, v, mask = packed()
    assert (q.shape, k.shape, v.shape) == ((8, 4, 16), (14, 2, 16), (14, 2, 16))
    assert mask["cu_seqlens_q"].tolist() == [0, 3, 8]
    assert mask["cu_seqlens_k"].tolist() == [0, 9, 14]
    exact = golden_attention(q, k, v, **mask)
    # the first query of the second sequence sees its own key alone
    torch.testing.assert_close(exact[3], v[9].double().repeat_interleave(2, dim=0))


def test_lengths_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="make_packed: key_lens must be as many as query_lens, 2"):
        packed((3, 5), (9,))


@pytest.mark.parametrize("time", [1, 2])
def test_each_test_draws_from_the_same_seed(time):
    seeded = torch.Generator().manual_seed(1511)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=seeded))
