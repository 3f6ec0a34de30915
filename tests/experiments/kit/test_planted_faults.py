"""Planted faults are wrong where they say, and nowhere else, on packed sequences."""

import pytest
import torch

from attention_kernels import flash_attention, golden_attention
from experiments.kit.planted_faults import last_key_skipped, scale_off
from experiments.kit.ragged_inputs import draw_ragged


def problem():
    return draw_ragged(
        (3, 5), (9, 5), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, seed=0
    )


def test_ragged_inputs_say_where_sequences_start():
    q, k, v, mask = problem()
    assert (q.shape, k.shape, v.shape) == ((8, 4, 16), (14, 2, 16), (14, 2, 16))
    assert mask["cu_seqlens_q"].tolist() == [0, 3, 8]
    assert mask["cu_seqlens_k"].tolist() == [0, 9, 14]
    exact = golden_attention(q, k, v, **mask)
    # the first query of the second sequence sees its own key alone
    torch.testing.assert_close(exact[3], v[9].double().repeat_interleave(2, dim=0))


def test_lengths_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="draw_ragged: key_lens must be as many as query_lens, 2"):
        draw_ragged((3, 5), (9,), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, seed=0)


def test_the_skipped_key_is_missed_by_the_last_query_alone():
    q, k, v, mask = problem()
    wrong, right = last_key_skipped(q, k, v, **mask), flash_attention(q, k, v, **mask)
    apart = (wrong - right).abs().amax(dim=(1, 2)) > 1e-3
    assert apart.tolist() == [False, False, True, False, False, False, False, True]
    starts = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 1], [0, 8])]
    without = golden_attention(q[2:3], k[:8], v[:8], cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    torch.testing.assert_close(wrong[2:3], without.float())


def test_the_scale_is_one_per_cent_too_large():
    q, k, v, mask = problem()
    torch.testing.assert_close(
        scale_off(q, k, v, **mask), flash_attention(1.01 * q, k, v, **mask), atol=1e-6, rtol=1e-5
    )
