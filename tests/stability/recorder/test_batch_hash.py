"""The hash of what a model is given: by sample, whatever the order, the parts and the ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stability.recorder.inside.batch_hash import hash_inputs, hash_samples

KINDS = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float64]


def hashed(*tensors: Tensor) -> int:
    """Return the hash of a batch as the spool counts it."""
    return int(hash_samples(list(tensors))[0]) % 2**64


def batch(seed: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return `rows` rows that differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (rows, 5), generator=generator).to(dtype)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    dtype=st.sampled_from(KINDS),
    data=st.data(),
)
def test_order_and_parts_do_not_count(
    seed: int, rows: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    x, y = batch(seed, rows, dtype), batch(seed + 1, rows)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cut = data.draw(st.integers(1, rows))
    whole = hashed(x, y)
    assert hashed(x[order], y[order]) == whole
    parts = [part for part in ((x[:cut], y[:cut]), (x[cut:], y[cut:])) if len(part[0])]
    assert sum(hashed(*part) for part in parts) % 2**64 == whole


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(2, 6),
    dtype=st.sampled_from(KINDS),
    row=st.integers(0, 5),
    column=st.integers(0, 4),
)
def test_every_value_counts(
    seed: int, rows: int, dtype: torch.dtype, row: int, column: int
) -> None:
    x = batch(seed, rows, dtype)
    other = x.clone()
    other[row % rows, column] += 1
    assert hashed(other) != hashed(x)


def test_a_sample_is_a_pair_of_rows_and_not_two_rows() -> None:
    x, y = batch(0, 4), batch(1, 4)
    assert hashed(x, y) != hashed(x, y.flip(0)), "labels went to other inputs"
    assert hashed(x, y) != hashed(y, x)
    assert hashed(x, y) != hashed(x)


def test_a_row_that_comes_twice_counts_twice() -> None:
    x = batch(0, 2)
    assert hashed(torch.cat([x, x])) != hashed(x)
    assert hashed(torch.cat([x, x])) != 0


def test_whole_numbers_count_by_value_and_others_by_bits() -> None:
    x = batch(0, 3)
    assert hashed(x.int()) == hashed(x)
    assert hashed(x.bool()) == hashed(x.bool().long())
    assert hashed(x.float()) != hashed(x)
    assert hashed(torch.tensor([[0.0]])) != hashed(torch.tensor([[-0.0]]))
    assert hashed(torch.tensor([[1 + 1j]])) != hashed(torch.tensor([[1 - 1j]]))


def test_shape_counts() -> None:
    x = torch.zeros(4, 6)
    assert len({hashed(x), hashed(x.view(4, 2, 3)), hashed(x.view(4, 3, 2)), hashed(x[:3])}) == 4


@pytest.mark.parametrize("x", [torch.tensor(3), torch.zeros(0, 3), torch.zeros(3, 0)])
def test_tensors_without_rows_or_values_have_a_hash(x: Tensor) -> None:
    assert hash_samples([x])[0].dtype == torch.int64


def test_a_mask_that_is_no_row_counts() -> None:
    x, mask = batch(0, 4), torch.ones(7, 7).tril()
    assert hashed(x, mask) != hashed(x, mask.T)


def test_neighbours_do_not_cancel() -> None:
    """A sum of hashes that were linear in the values would not see what moves between rows."""
    x = torch.zeros(2, 3, dtype=torch.int64)
    seen = set()
    for first in range(20):
        for second in range(20):
            other = x.clone()
            other[0, 0], other[1, 2] = first, second
            seen.add(hashed(other))
    assert len(seen) == 400


def test_hash_samples_refuses_nothing() -> None:
    with pytest.raises(ValueError, match=r"^hash_samples: tensors must hold at least one$"):
        hash_samples([])


def test_what_a_tensor_is_called_counts() -> None:
    x, y = torch.arange(6).view(3, 2), torch.arange(3)

    def hashed(tensors: list[Tensor], *names: str) -> int:
        return int(hash_inputs(tensors, names)[0].sum())

    assert hashed([x], "pos") == hashed([x], "pos") != hashed([x], "neg")
    assert hashed([x, y], "input", "label") == hashed([x, y], "input", "label")
    assert hashed([x, x + 1], "a", "b") != hashed([x, x + 1], "b", "a")
    assert hashed([x, x + 1], "a", "b") == hashed([x + 1, x], "b", "a")
