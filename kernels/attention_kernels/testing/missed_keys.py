"""Keys that an attention kernel may miss: by tile, at an end, or beyond a length.

Leaves out what a missed key does to the results (`formula`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_kernels.testing.unwritten import TILES

__all__ = ["missed_keys"]


def missed_keys(index: Tensor, whole: bool) -> dict[str, tuple[str, Tensor]]:
    """Return the kind of each miss and the keys that are missed, by the words for them.

    `index` numbers the keys of a cell. Unless `whole`, those are left out that are the same keys as
    of a simpler miss, as where no tile is cut short.
    """
    keys = len(index)
    missed = {
        "the last key is missed": index == keys - 1,
        "the first key is missed": index == 0,
    }
    listed: dict[str, tuple[str, Tensor]] = {}
    for tile in TILES:
        last, first = range(tile - 1, keys, tile), range(0, keys, tile)
        missed[f"the tail, the last tile of {tile} keys that is not full, is missed"] = (
            index >= keys // tile * tile
        )
        for kind, which, members in (
            (f"the last key of each tile of {tile}", last, index % tile == tile - 1),
            (f"the first key of each tile of {tile}", first, index % tile == 0),
        ):
            listed[f"{_listed(which)} missed: {kind}"] = kind, members
        if whole or (keys > tile and keys % tile):
            kind = f"the last key of each tile of {tile}, of the tail too"
            ends = torch.tensor([*last, keys - 1])
            words = f"{_listed([*last, keys - 1])} missed: {kind}"
            listed[words] = kind, torch.isin(index, ends)
        missed[f"the first tile of {tile} keys is missed"] = index < tile
    for limit in (128, 256, 512, 1000, 1024):
        missed[f"keys from {limit} on are missed: long rows"] = index >= limit
    return {words: (words, members) for words, members in missed.items()} | listed


def _listed(keys: Sequence[int]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]} is"
    return f"keys {', '.join(map(str, keys[:3]))}{', ...' if len(keys) > 3 else ''} are"
