"""States laid out over ranks at random: every value in one piece, at its own place."""

import torch
from hypothesis import strategies as st

from stability.metrics.pieces import Piece


@st.composite
def shardings(draw, state, max_ranks=4):
    """Draw the pieces of each rank by name: every dimension's indices are dealt out at random."""
    ranks = draw(st.integers(1, max_ranks))
    held = [{} for _ in range(ranks)]
    for name, tensor in state.items():
        shape = tuple(tensor.shape) or (1,)
        whole = tensor.reshape(shape)
        dim = draw(st.integers(0, len(shape) - 1))
        owners = draw(
            st.lists(st.integers(0, ranks - 1), min_size=shape[dim], max_size=shape[dim])
            | st.just([place * ranks // max(1, shape[dim]) for place in range(shape[dim])])
        )
        for rank in range(ranks):
            mine = torch.tensor([p for p, who in enumerate(owners) if who == rank]).long()
            places = [torch.arange(side) for side in shape]
            places[dim] = mine
            held[rank][name] = Piece(
                values=whole.index_select(dim, mine), places=tuple(places), shape=shape
            )
    return held
