"""The batches of a run, as Lightning reads them: batch t is a function of text, order seed and t.

The text becomes one stream of tokens, cut into blocks of fixed length. Some blocks are held out:
which ones depends on their number alone, so every run of a study holds out the same. A seeded
permutation says which of the others make up each batch. Since a batch depends on nothing that went
before, a resumed run continues at the trainer's own step, and nothing about the data needs to be
stored. Leaves out where text and tokens come from (`sources`, `tokenizers`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stability.config.schema import DataConfig, HeldOutConfig
from stability.data.fingerprint import hash_tokens
from stability.data.sources import load_texts
from stability.data.tokenizers import load_tokenizer

__all__ = [
    "BatchLoader",
    "Share",
    "TextDataModule",
    "batch_indices",
    "cut_blocks",
    "held_out_indices",
]


def cut_blocks(tokens: Tensor, context: int) -> Tensor:
    """Return 1-D `tokens` as non-overlapping blocks `(n_blocks, context + 1)`, a view.

    A block holds `context` inputs and one token more, so that each input has its target. Tokens
    that fill no whole block are left out.
    """
    length = context + 1
    n_blocks = tokens.numel() // length
    return tokens[: n_blocks * length].view(n_blocks, length)


def held_out_indices(n_blocks: int, share: float) -> Tensor:
    """Return the numbers, int64 and ascending, of the blocks that are held out of `n_blocks`.

    They are `share` of all blocks, rounded to the nearest number, one in the middle of each of as
    many equal stretches of the text: a tail of it could be text of another kind. A pure function of
    its arguments.
    """
    return _spread(round(share * n_blocks), n_blocks)


def _spread(count: int, n: int) -> Tensor:
    """Return `count` numbers below `n`: the middles of as many equal stretches."""
    # in whole numbers, since (i + 0.5) * n / count may round to the next one
    return (2 * torch.arange(count) + 1) * n // (2 * max(count, 1))


def batch_indices(order_seed: int, step: int, batch_size: int, n_blocks: int) -> Tensor:
    """Return the block numbers `(batch_size,)`, int64, of batch `step`, counted from 0.

    Blocks are visited epoch after epoch, each epoch in an order of its own. A batch may begin in
    one epoch and end in the next, so no block is skipped. A pure function of its arguments.
    ValueError if there is no block.
    """
    if n_blocks < 1:
        raise ValueError(f"batch_indices: n_blocks must be >= 1, got {n_blocks}; use more text")
    positions = torch.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // n_blocks
    return torch.cat(
        [
            _permutation(order_seed, epoch, n_blocks)[positions[epochs == epoch] % n_blocks]
            for epoch in epochs.unique().tolist()
        ]
    )


@lru_cache(maxsize=4)
def _permutation(order_seed: int, epoch: int, n_blocks: int) -> Tensor:
    digest = hashlib.sha256(f"{order_seed}/{epoch}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    return torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seed))


class _Blocks(Dataset[Tensor]):
    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._blocks[indices].to(torch.int64)


def _as_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which parts of each batch a rank computes: `held` of `parts` equal ones, from `first` on."""

    parts: int = 1
    first: int = 0
    held: int = 1


class BatchLoader:
    """Yields batches `first()` to `batches` - 1, each `(batch_size, context + 1)`.

    With a `share` of several parts they are parts of batches, and are counted so. They are drawn
    from those of `blocks` whose numbers are in `trained`, `(n_trained,)` in int64.
    The length is `batches` whatever `first` returns: after a resume Lightning continues its count.
    To Lightning the loader is stateful, so that it does not skip batches by itself on a resume; the
    state is empty, since `first` says where to continue.
    """

    def __init__(
        self,
        blocks: Tensor,
        trained: Tensor,
        *,
        order_seed: int,
        batch_size: int,
        batches: int,
        first: Callable[[], int],
        workers: int,
        share: Share,
    ) -> None:
        self._share = share
        self._blocks = blocks
        self._trained = trained
        self._order_seed = order_seed
        self._batch_size = batch_size
        self._batches = batches
        self._first = first
        self._workers = workers

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Tensor]:
        # numbers of blocks, not a copy of the blocks: a text may fill much of the memory
        order = (self._numbers(index).tolist() for index in range(self._first(), self._batches))
        loader = DataLoader(
            _Blocks(self._blocks),
            batch_sampler=order,
            num_workers=self._workers,
            collate_fn=_as_is,
            generator=torch.Generator(),  # else it draws from the global one
        )
        return iter(loader)

    def _numbers(self, index: int) -> Tensor:
        batch, at = divmod(index, self._share.held)
        of_batch = batch_indices(self._order_seed, batch, self._batch_size, len(self._trained))
        return self._trained[of_batch.chunk(self._share.parts)[self._share.first + at]]

    def state_dict(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `first` says where to continue."""


class TextDataModule(LightningDataModule):
    """Batches `(batch_size, context + 1)` of int64 tokens for `steps` updates, or their `share`.

    After `setup`: `text_hash` (SHA-256 of the tokens), `vocab_size` (of the tokenizer), and of the
    text that is never trained on `held_out_batches` and `held_out_hash` (SHA-256 of those batches);
    both are empty where the share of `held_out` is 0, which is also its default here.
    """

    text_hash: str
    vocab_size: int
    held_out_batches: tuple[Tensor, ...]
    held_out_hash: str

    def __init__(
        self,
        data: DataConfig,
        *,
        context: int,
        batch_size: int,
        steps: int,
        order_seed: int,
        held_out: HeldOutConfig | None = None,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self.share = share or Share()
        self.data = data
        self.held_out = held_out or HeldOutConfig(share=0.0)
        self.context = context
        self.batch_size = batch_size
        self.steps = steps
        self.order_seed = order_seed
        self._blocks: Tensor | None = None

    def setup(self, stage: str = "fit") -> None:
        """Read and tokenise the text, once.

        ValueError for a text that is missing, empty, or too short for one batch, or whose held-out
        part is too short for the held-out batches.
        """
        if self._blocks is not None:
            return
        tokens, self.vocab_size, self.text_hash = _load_tokens(self.data, _stamp(self.data))
        blocks = cut_blocks(tokens, self.context)
        needed = max(2, self.batch_size)
        if len(blocks) < needed:
            raise ValueError(
                f"data.source must hold {needed} blocks of {self.context + 1} tokens, got "
                f"{self.data.source!r}, which is too short: {len(tokens)} tokens"
            )
        chosen = held_out_indices(len(blocks), self.held_out.share)
        self.held_out_batches = self._evaluated(blocks, chosen)
        parts = self.held_out_batches
        self.held_out_hash = hash_tokens(torch.stack(parts)) if parts else ""
        is_trained = torch.ones(len(blocks), dtype=torch.bool)
        is_trained[chosen] = False
        self._trained = is_trained.nonzero().flatten()
        self._blocks = blocks

    def _evaluated(self, blocks: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        """Return the held-out batches: blocks of `chosen`, spread over the text as those are."""
        held_out = self.held_out
        if not held_out.share:
            return ()
        size = held_out.batch_size or self.batch_size
        needed = held_out.batches * size
        if len(chosen) < needed or len(blocks) - len(chosen) < max(2, self.batch_size):
            raise ValueError(
                f"held_out.share must leave {needed} blocks of {self.context + 1} tokens for "
                f"{held_out.batches} batches and a batch to train on, got {held_out.share:g} of "
                f"the {len(blocks)} blocks of {self.data.source!r}: {len(chosen)}; give it more "
                "text, a larger share or fewer held_out.batches, or 0 to hold out nothing"
            )
        picked = chosen[_spread(needed, len(chosen))]
        return blocks[picked].to(torch.int64).split(size)

    def train_dataloader(self) -> BatchLoader:
        """Return the batches from the trainer's current step to the last."""
        if self._blocks is None:
            raise ValueError("TextDataModule: setup must be called before train_dataloader")
        trainer = self.trainer
        per_step = trainer.accumulate_grad_batches if trainer else 1
        return BatchLoader(
            self._blocks,
            self._trained,
            order_seed=self.order_seed,
            batch_size=self.batch_size,
            batches=self.steps * per_step,
            first=lambda: trainer.global_step * per_step if trainer else 0,
            workers=self.data.workers,
            share=self.share,
        )


def _stamp(data: DataConfig) -> tuple[int, int]:
    path = Path(data.source)
    if not path.is_file():
        return (0, 0)
    status = path.stat()
    return (status.st_mtime_ns, status.st_size)


# the runs of a study read the same text one after another
@lru_cache(maxsize=1)
def _load_tokens(data: DataConfig, stamp: tuple[int, int]) -> tuple[Tensor, int, str]:
    tokenizer = load_tokenizer(data.tokenizer)
    tokens = tokenizer.encode(load_texts(data))
    return tokens, tokenizer.vocab_size, hash_tokens(tokens)
