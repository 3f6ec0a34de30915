"""What is kept of a script's batches while faults are planted: copies, told apart by samples."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from stability.recorder.inside.models_in_graph import ModelsInGraph
from stability.recorder.inside.returned_gradient import ReturnedGradient
from stability.recorder.instrument import GivenCall
from stability.study.planting import _batch_of, _given_again, _kept


def _call(*args: Any, **kwargs: Any) -> GivenCall:
    args, kwargs = tree_map(_kept, (args, kwargs))
    returned = ReturnedGradient(
        *(ModelsInGraph(), (), 0, None), is_weight=lambda x: False, entered=lambda x: None
    )
    return GivenCall(args, kwargs, None, returned)


def test_a_batch_is_kept_as_it_was_whatever_the_script_writes_into_it() -> None:
    x = torch.arange(6.0).view(2, 3)
    call = _call(x, {"mask": x > 2}, 0.5, targets=[x.long(), None])
    x.zero_()
    (again, masks, number), kwargs = tree_map(_given_again, (call.args, call.kwargs))
    assert isinstance(again, Tensor)
    assert again.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert masks["mask"].tolist() == [[False] * 3, [True] * 3]
    assert (number, kwargs["targets"][1]) == (0.5, None)
    assert kwargs["targets"][0].dtype == torch.int64
    # what a model does to its input does not reach the next look
    again.zero_()
    assert call.args[0].values.sum() == 15


def test_the_same_samples_are_the_same_batch_in_any_order() -> None:
    x = torch.arange(12).view(4, 3)
    order = torch.tensor([2, 0, 3, 1])
    batch = _batch_of(_call(x, targets=x + 1), 0)
    assert batch == _batch_of(_call(x.clone(), targets=x + 1), 7)
    assert batch == _batch_of(_call(x[order], targets=(x + 1)[order]), 1)
    others = [(x + 1, x + 1), (x, x + 2), (x[order], x + 1)]
    assert all(batch != _batch_of(_call(y, targets=z), 0) for y, z in others)


class Batch:
    """A batch of somebody's own, that the kept copy does not look into."""


@pytest.mark.parametrize(
    "others",
    [
        (["a.txt"], ["b.txt"]),
        (Batch(), Batch()),
        (numpy.zeros(3), numpy.ones(3)),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    ],
    ids=["names", "an object", "an array", "sparse"],
)
def test_batches_that_are_not_read_whole_are_not_taken_for_one(others: tuple[Any, Any]) -> None:
    """Beside a tensor that is the same in each, as positions are."""
    positions = torch.arange(4)
    batches = [_batch_of(_call(each, positions), place) for place, each in enumerate(others)]
    assert batches[0] != batches[1]


def test_numbers_and_words_beside_a_batch_belong_to_it() -> None:
    x = torch.arange(4)
    batch = _batch_of(_call(x, causal=True, name="a"), 0)
    assert batch == _batch_of(_call(x, causal=True, name="a"), 1)
    assert batch != _batch_of(_call(x, causal=True, name="b"), 0)
    assert batch != _batch_of(_call(x, causal=False, name="a"), 0)
