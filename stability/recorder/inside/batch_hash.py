"""Hashes what a model is given in training, sample by sample.

The hash of an update is the sum of its samples' hashes modulo 2**64, so it is the same in whatever
order and micro-batches they come, and over however many ranks they are spread; where each sample's
place in the update is known, that is hashed with it (`hash_in_order`). It is computed where
the tensors lie, in integers, and nothing waits for it. It guards against other batches, not against
somebody who makes two batches of one hash.
"""

from __future__ import annotations

import zlib
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .mixing import FIRST, GOLDEN, mixed, signed64

__all__ = ["hash_batch", "hash_in_order", "hash_inputs", "hash_samples", "hash_with"]

_WHOLE_NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each size of an element in bytes."""


def hash_samples(tensors: List[Tensor]) -> Tuple[Tensor, int]:
    """Return the sum of the samples' hashes, int64 `()` where `tensors` lie, and how many they are.

    The samples are the rows of the first tensor that has any. A tensor with as many rows belongs to
    them row by row; any other one, as a mask, is part of every sample. Whole numbers count by their
    values, whatever their dtype, and floating-point numbers by their bits. ValueError for none.
    """
    value, rows, _ = hash_batch(tensors)
    return value, rows


def hash_batch(tensors: List[Tensor]) -> Tuple[Tensor, int, List[Optional[Tensor]]]:
    """Return what `hash_samples` does, and the samples' keys as `hash_inputs` does."""
    samples, _, keys = hash_inputs(tensors)
    return samples.sum(), len(samples), keys


def hash_inputs(
    tensors: List[Tensor], names: Sequence[str] = ()
) -> Tuple[Tensor, List[Tensor], List[Optional[Tensor]]]:
    """Return each sample's hash, of each tensor the sum over samples, and the samples' keys in it.

    As `hash_samples`; hashes and keys are int64 `(samples,)`. A tensor counts as what it is called,
    if it has a name, and else as the first, the second, ...: two that are exchanged, or one that is
    given as another argument, are other samples. A tensor's sum does not tell with
    which of the others its rows came. A key is the hash of a sample's row in one tensor: it tells
    whether that was seen before, whatever came beside it; None for a tensor without such rows.
    """
    if not tensors:
        raise ValueError("hash_samples: tensors must hold at least one")
    with torch.no_grad():
        rows = next((x.shape[0] for x in tensors if x.dim() > 0), 1)
        device = tensors[0].device
        samples = torch.zeros(rows, dtype=torch.int64, device=device)
        sums = []
        keys: List[Optional[Tensor]] = []
        for index, tensor in enumerate(tensors):
            is_by_row = tensor.dim() > 0 and tensor.shape[0] == rows
            of_rows = _hash_rows(tensor if is_by_row else tensor.unsqueeze(0))
            keys.append(of_rows if is_by_row else None)
            place = zlib.crc32(names[index].encode()) if names else index + 1
            each = mixed(of_rows.to(device) + signed64(GOLDEN * place))
            sums.append(each.sum() * (1 if is_by_row else rows))
            samples = samples + each
        return mixed(samples), sums, keys


def hash_in_order(samples: Tensor, call: int, first: int = 0) -> Tensor:
    """Return a hash of samples with these hashes in their order, in one call of several.

    They are at the places from `first` on: what is a sum over parts is that of the whole. It tells
    whether rows have changed places: where they are no samples, as the steps of a series in
    PyTorch's LSTM, that is another batch.
    """
    with torch.no_grad():
        places = torch.arange(
            first + 1, first + len(samples) + 1, dtype=torch.int64, device=samples.device
        )
        return mixed(samples + mixed(places * GOLDEN + signed64((call + 1) * FIRST))).sum()


def hash_with(samples: Tensor, target: Tensor, *, is_shared: bool = False, nth: int = 0) -> Tensor:
    """Return the hash of the `nth` target of samples with these hashes, a sum over them.

    Where its elements can't be shared out among the samples evenly, they are taken one by one,
    whosever they are. One that is shared is the whole of each sample's.
    """
    with torch.no_grad():
        rows = len(samples)
        if not rows or (target.numel() % rows and not is_shared):
            return mixed(_hash_rows(target.reshape(-1, 1)) + signed64(nth * FIRST)).sum()
        of_rows = _hash_rows(target.reshape(1 if is_shared else rows, -1))
        own = mixed(samples.to(of_rows.device) + GOLDEN)
        return mixed(of_rows + own + signed64(nth * FIRST)).sum()


def _hash_rows(tensor: Tensor) -> Tensor:
    """Return a hash of each row's shape and values, int64 `(rows,)`."""
    words = _as_words(tensor)
    places = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device)
    hashed = mixed(words + mixed(places * GOLDEN)).sum(1)
    for size in tensor.shape[1:]:
        hashed = mixed(hashed + size)
    return hashed


def _as_words(tensor: Tensor) -> Tensor:
    """Return the rows as 64-bit integers, `(rows, words)`."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().unsqueeze(1).flatten(1)
    if tensor.dtype in _WHOLE_NUMBERS:
        return flat.to(torch.int64)
    flat = flat.contiguous().view(_WORDS[tensor.element_size()])
    # large rows, as those of pictures, in fewer words: no bit is lost
    per_word = 8 // flat.element_size()
    if per_word > 1 and flat.shape[1] % per_word == 0 and flat.numel():
        return flat.view(torch.int64)
    return flat.to(torch.int64)
