"""The loader that Lightning iterates over: blocks, batch after batch, from a step that it asks for.

It counts as stateful in Lightning's sense, with an empty state: the trainer's step says where to go
on. Leaves out which blocks make a batch (`blocks`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stability.data.blocks import batch_indices

__all__ = ["BatchLoader"]


class _Blocks(Dataset[Tensor]):
    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._blocks[indices].to(torch.int64)


def _as_is(batch: Any) -> Any:
    return batch


class BatchLoader:
    """Yields batches `first()` to `batches` - 1 of `blocks`, each `(batch_size, context + 1)`.

    The length is `batches` whatever `first` returns: Lightning goes on counting after a resume.
    """

    def __init__(
        self,
        blocks: Tensor,
        *,
        order_seed: int,
        batch_size: int,
        batches: int,
        first: Callable[[], int],
        workers: int,
    ) -> None:
        self._blocks = blocks
        self._order_seed = order_seed
        self._batch_size = batch_size
        self._batches = batches
        self._first = first
        self._workers = workers

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Tensor]:
        order = (
            batch_indices(self._order_seed, batch, self._batch_size, len(self._blocks)).tolist()
            for batch in range(self._first(), self._batches)
        )
        loader = DataLoader(
            _Blocks(self._blocks),
            batch_sampler=order,
            num_workers=self._workers,
            collate_fn=_as_is,
            generator=torch.Generator(),  # else it draws from the global one
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `first` says where to go on."""
