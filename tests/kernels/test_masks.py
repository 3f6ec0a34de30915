"""The masks against their definition: i attends j iff j <= i + key_len - query_len."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.masks import first_attending_row, hidden_keys, visible_key_stop

LENGTHS = st.integers(1, 12)


def allowed(query_len: int, key_len: int, causal: bool) -> torch.Tensor:
    everything = torch.ones(query_len, key_len, dtype=torch.bool)
    return everything.tril(key_len - query_len) if causal else everything


@settings(deadline=None, max_examples=200)
@given(query_len=LENGTHS, key_len=LENGTHS, causal=st.booleans(), data=st.data())
def test_every_window_of_the_mask_is_its_definition(query_len, key_len, causal, data):
    expected = allowed(query_len, key_len, causal)
    rows = range(data.draw(st.integers(0, query_len - 1)), query_len)
    keys = range(data.draw(st.integers(0, key_len - 1)), key_len)
    hidden = hidden_keys(rows, keys, query_len, key_len, causal, torch.device("cpu"))
    window = expected[rows.start :, keys.start :]
    if hidden is None:
        assert window.all()
    else:
        assert torch.equal(~hidden, window)


@settings(deadline=None, max_examples=200)
@given(query_len=LENGTHS, key_len=LENGTHS, causal=st.booleans(), data=st.data())
def test_skipped_rows_and_keys_are_exactly_the_empty_ones(query_len, key_len, causal, data):
    expected = allowed(query_len, key_len, causal)
    attending = expected.any(dim=1).nonzero().flatten()
    first = first_attending_row(query_len, key_len, causal)
    assert first == attending[0].item()
    stop = data.draw(st.integers(first + 1, query_len))
    assert visible_key_stop(stop, query_len, key_len, causal) == expected[:stop].any(0).sum()
