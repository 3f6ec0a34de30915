"""The hash behind stochastic rounding: even, mixed, a function of its coordinates alone."""

import torch

from attention_kernels.random_bits import bits_at

N = 4096
SIX_SIGMA = 6 * 0.5 / N**0.5
"""Of a mean of N fair bits; 2e-9 of such means lie beyond it."""


def bit_means(words):
    """Mean of each of the 32 bits over the last axis."""
    return ((words[..., None] >> torch.arange(32)) & 1).double().mean(dim=-2)


def test_the_bits_are_known():
    """Another hash would draw other bits in every run that has been recorded."""
    drawn = bits_at(7, 16, 0, 3, torch.arange(2)[:, None], torch.arange(3))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [
        [2349739272, 457046112, 1408834998],
        [1196157642, 2749144828, 1603671587],
    ]


def test_every_bit_is_set_half_the_time():
    for words in (bits_at(0, torch.arange(N)), bits_at(1, 2, 0, torch.arange(N), 0)):
        assert bool(((words >= 0) & (words < 2**32)).all())
        assert (bit_means(words) - 0.5).abs().max() < SIX_SIGMA


def test_flipping_any_bit_of_the_seed_or_a_coordinate_flips_each_bit_half_the_time():
    place = torch.arange(N) * 0x9E3779B1 & 0xFFFFFFFF
    whole = bits_at(5, place, place >> 3, 9)
    for bit in (1 << torch.arange(32)).tolist():
        other_seed = bits_at(5 ^ bit, place, place >> 3, 9)
        first = bits_at(5, place ^ bit, place >> 3, 9)
        second = bits_at(5, place, (place >> 3) ^ bit, 9)
        last = bits_at(5, place, place >> 3, 9 ^ bit)
        for moved in (other_seed, first, second, last):
            assert (bit_means(whole ^ moved) - 0.5).abs().max() < SIX_SIGMA, bit


def test_neighbouring_rows_and_columns_draw_unrelated_bits():
    words = bits_at(0, 16, 0, 0, torch.arange(64)[:, None], torch.arange(64))
    for moved in (words.roll(1, 0), words.roll(1, 1), words.mT, words.flip(0)):
        apart = (words != moved).flatten()
        assert int(apart.sum()) >= N - 64  # the diagonal is its own transpose
        means = bit_means((words ^ moved).flatten()[apart])
        assert (means - 0.5).abs().max() < SIX_SIGMA * 1.01


def test_rows_of_nearly_equal_hashes_share_no_bits():
    """Were the column not hashed itself, such rows would hold the same words in another order."""
    rows = torch.arange(2**16)
    prefix, order = bits_at(1, rows).sort()
    close = (prefix[1:] ^ prefix[:-1]) < 64
    assert int(close.sum()) > 10
    for row, other in zip(order[:-1][close].tolist(), order[1:][close].tolist(), strict=True):
        words = bits_at(1, torch.tensor([[row], [other]]), torch.arange(64))
        assert words.unique().numel() == words.numel()


def test_the_order_of_the_coordinates_matters():
    place = torch.arange(100)
    assert not torch.equal(bits_at(0, place, 3), bits_at(0, 3, place))
    assert not torch.equal(bits_at(0, place), bits_at(0, place, 0))


def test_a_part_of_the_coordinates_draws_a_part_of_the_bits():
    rows, columns = torch.arange(32)[:, None], torch.arange(48)
    whole = bits_at(2, 17, 64, rows, columns)
    assert whole.shape == (32, 48)
    assert torch.equal(bits_at(2, 17, 64, rows[8:16], columns[40:]), whole[8:16, 40:])
    assert bits_at(2, 17, 64, 5, torch.tensor([7])).item() == whole[5, 7].item()


def test_int32_coordinates_draw_as_int64_ones():
    place = torch.arange(1000)
    assert torch.equal(bits_at(3, place.to(torch.int32), 1), bits_at(3, place, 1))
