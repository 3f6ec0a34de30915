"""Rows of a result that a kernel has not written are told as that, be they zero or anything."""

import pytest
import torch

from attention_kernels.testing import Shape
from attention_kernels.testing.cells import Cell
from tests.kernels.testing.checked import Turned, plain, quick

CELLS = [
    Cell(law="normal", shape=Shape(2, 2, 2, length, length, 32), causal=True)
    for length in (64, 70, 85)
]


def tail(tile, values=0.0):
    """Return what puts other values in the rows of a last tile that is not full."""

    def turn(x):
        start = x.shape[2] // tile * tile
        return torch.cat([x[:, :, :start], values * x[:, :, start:].flip(-1)], 2)

    return turn


def last_row(x):
    return torch.cat([x[:, :, :-1], 0 * x[:, :, -1:]], 2)


def with_gradients(**turns):
    def attention(q, k, v, *, causal, scale=None):
        given = {"dq": q, "dk": k, "dv": v}
        given |= {name: Turned.apply(given[name], turn) for name, turn in turns.items()}
        return plain(*given.values(), causal=causal, scale=scale)

    return attention


@pytest.mark.parametrize(("name", "what"), [("dq", "rows"), ("dk", "keys"), ("dv", "keys")])
def test_a_tail_of_a_gradient_that_is_zero_was_not_written(name, what):
    said = quick(with_gradients(**{name: tail(32)}), cells=CELLS).sentence
    tail_of = f"the tail, the last tile of 32 {what} that is not full"
    assert f"{name} is zero in {tail_of}: it was not written, in every head" in said
    assert "mask" not in said


def test_a_last_row_that_is_zero_was_not_written():
    said = quick(with_gradients(dq=last_row), cells=CELLS).sentence
    assert "dq is zero in the last row: it was not written" in said
    # of 85 rows a tile of 16 has five more, which are not zero
    assert "tile of 16" not in said


def test_rows_that_a_loop_over_whole_tiles_leaves_are_in_no_gradient():
    def by_whole_tiles(q, k, v, *, causal, scale=None):
        return tail(32)(plain(q, k, v, causal=causal, scale=scale))

    said = quick(by_whole_tiles, cells=CELLS).sentence
    assert "out is zero in the tail, the last tile of 32 rows that is not full, and no " in said
    assert "rows not computed" in said


class _ReadBack(torch.autograd.Function):
    """Attention whose out has a zero tail, and whose backward reads that out for its delta."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return tail(32)(plain(q, k, v, causal=False))

    @staticmethod
    def backward(ctx, *grads):
        q, k, v = ctx.saved_tensors
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        delta = (grads[0] * tail(32)(weights @ v)).sum(-1, keepdim=True)
        ds = weights * (grads[0] @ v.mT - delta) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, weights.mT @ grads[0]


def test_a_delta_of_rows_that_were_not_written_is_told_with_them():
    def attention(q, k, v, *, causal, scale=None):
        return _ReadBack.apply(q, k, v)

    full = [Cell(law="normal", shape=cell.shape, causal=False) for cell in CELLS]
    said = quick(attention, "fp32", cells=full).sentence
    assert "32 rows that is not full: it was not written, and delta reads it so" in said


@pytest.mark.parametrize("name", ["dq", "dk"])
def test_a_tail_of_anything_is_told_as_a_tail(name):
    said = quick(with_gradients(**{name: tail(32, 5.0)}), cells=CELLS).sentence
    assert f"{name} holds other values in the tail, the last tile of 32 " in said
    assert "no row before it is far off, and smaller errors show once that is mended" in said
    assert "nothing known explains it" not in said


def test_other_values_elsewhere_are_no_tail():
    def fifth(x):
        return torch.cat([x[:, :, :4], 5.0 * x[:, :, 4:5].flip(-1), x[:, :, 5:]], 2)

    def both(x):
        return tail(32, 5.0)(fifth(x))

    for turn in (fifth, both):
        assert (
            "other values in the tail" not in quick(with_gradients(dq=turn), cells=CELLS).sentence
        )


def test_of_cells_of_one_length_no_tail_is_told():
    said = quick(with_gradients(dq=tail(32, 5.0)), cells=CELLS[1:2]).sentence
    assert "other values in the tail" not in said
