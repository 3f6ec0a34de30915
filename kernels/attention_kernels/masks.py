"""Which query may attend which key: the semantics that every implementation shares.

Causal masks are aligned bottom-right, as in flash-attn 2.1 and later: query i attends key j when
j <= i + key_len - query_len, so the last query sees every key. With more queries than keys the
first rows attend nothing; they come first because the number of visible keys only grows with i.
Leaves out how a masked score is represented, and windows, padding and ragged batches.
"""

import torch
from torch import Tensor

__all__ = ["first_attending_row", "hidden_keys", "visible_key_stop"]


def first_attending_row(query_len: int, key_len: int, causal: bool) -> int:
    """Return the first query row that attends any key; the rows before it attend nothing."""
    return max(0, query_len - key_len) if causal else 0


def visible_key_stop(row_stop: int, query_len: int, key_len: int, causal: bool) -> int:
    """Return the number of leading keys that any of the query rows before `row_stop` attends."""
    return min(key_len, max(0, row_stop + key_len - query_len)) if causal else key_len


def hidden_keys(
    rows: range, keys: range, query_len: int, key_len: int, causal: bool, device: torch.device
) -> Tensor | None:
    """Return a bool tensor `(len(rows), len(keys))`, true where the query may not attend the key.

    None means that every query attends every key here, so that there is nothing to mask.
    """
    offset = key_len - query_len
    if not causal or keys.stop - 1 <= rows.start + offset:
        return None
    row = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(keys.start, keys.stop, device=device)
    return key > row.unsqueeze(1) + offset
