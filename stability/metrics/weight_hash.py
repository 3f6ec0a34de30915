"""An order-free hash of a model's weights: the same under any sharding, on any device.

How. Each value gives two words of 64 bits, mixed from its tensor's name, dtype and shape, from its
place in the tensor and from its own bits. They are added up modulo 2^64, in two lanes, so the ranks
hash what each of them holds, in any order, and one all-reduce of 16 bytes joins them:

    joined = local_weight_hash(pieces_of(state))      # int64 (2,)
    torch.distributed.all_reduce(joined)              # wraps around, as it should
    text = finished_weight_hash(joined, pieces)       # 32 hexadecimal digits

What it finds. A change of one value changes the first lane always, since the mixer maps no two
words onto one. Of any other change that does not know the mixer both lanes stay the same with
probability near 2^-64 each; the second is a mix of each word of the first. A sum can be met by who
wants to: the hash says that two runs are the same bits, and is no seal against a forger. Files keep
their SHA-256.

What it costs. On a busy CPU 3 ns a value. Leaves out which ranks hold what (`pieces`).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from stability.metrics.mixing import GOLDEN, key_of, mixed, signed64
from stability.metrics.numbered_values import NumberedValues, numbered_values
from stability.metrics.pieces import Piece, pieces_of

__all__ = ["finished_weight_hash", "local_weight_hash", "weight_hash"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a value, the integers that its bits are read as."""


def weight_hash(state: Mapping[str, Tensor]) -> str:
    """Return the hash of a state that this process holds whole: 32 hexadecimal digits.

    It has names, dtypes, shapes and bits, those of NaNs and of -0 too. ValueError as below.
    """
    pieces = pieces_of(state)
    return finished_weight_hash(local_weight_hash(pieces), pieces)


def local_weight_hash(pieces: Mapping[str, Piece]) -> Tensor:
    """Return what this rank's values add to the hash, int64 `(2,)` on their device.

    The sum over ranks, modulo 2^64, is that of all values. ValueError for values of 16 bytes.
    """
    device = next(iter(pieces.values())).values.device if pieces else torch.device("cpu")
    lanes = torch.zeros(2, dtype=torch.int64, device=device)
    for name, piece in pieces.items():
        if piece.values.element_size() not in _WORDS:
            raise ValueError(
                f"weight_hash: {name} must hold values of 1, 2, 4 or 8 bytes, got "
                f"{piece.values.dtype}; pass its real and imaginary parts"
            )
        key = _key(name, piece)
        for part in numbered_values(piece):
            add = _add_on_cpu if part.values.device.type == "cpu" else add_by_torch
            lanes += add(part, key).to(device)
    return lanes


def finished_weight_hash(joined: Tensor, pieces: Mapping[str, Piece]) -> str:
    """Return the hash in hexadecimal digits, from the sum over ranks.

    `pieces` are any rank's: of them only names, dtypes and shapes are read, so that tensors without
    values are in the hash as well.
    """
    lanes = [word % 2**64 for word in joined.tolist()]
    for name, piece in pieces.items():
        lanes = [(lane + key_of(nth, _key(name, piece))) % 2**64 for nth, lane in enumerate(lanes)]
    return "".join(f"{lane:016x}" for lane in lanes)


def _key(name: str, piece: Piece) -> int:
    return key_of(name, piece.values.dtype, *piece.shape)


def _add_on_cpu(part: NumberedValues, key: int) -> Tensor:
    from stability.metrics.weight_loops import add_hashes  # compiled, or read from numba's cache

    bits = _words(part.values).numpy()
    bits = bits.view(f"u{bits.itemsize}")
    places = np.empty(0, np.uint64)
    if part.places is not None:
        places = part.places.numpy().view(np.uint64)
    lanes = np.zeros(2, np.uint64)
    add_hashes(bits, np.uint64(part.start), places, np.uint64(key), lanes)
    return torch.from_numpy(lanes.view(np.int64))


def add_by_torch(part: NumberedValues, key: int) -> Tensor:
    """Return what `_add_on_cpu` does, by torch's operators: on any device, and slower on a CPU."""
    bits = _words(part.values).long()
    if part.values.element_size() < 8:
        # what a negative number of few bits is filled up with is none of the value's
        bits = bits & ((1 << 8 * part.values.element_size()) - 1)
    counter = part.all_places() * signed64(GOLDEN) + signed64(key)
    words = mixed(mixed(counter) ^ bits)
    return torch.stack([words.sum(), mixed(words ^ signed64(key)).sum()])


def _words(values: Tensor) -> Tensor:
    return values.contiguous().view(_WORDS[values.element_size()])
