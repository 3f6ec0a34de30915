"""Where tokens stand in their sequences, packed or padded, and so which key a query may attend.

Causal masks and windows of sequences with lengths of their own are the same everywhere: by how far
a key is ahead of where the query stands among the keys. Leaves out what the arguments of a library
mean (`flash_attn_calls`, `transformer_engine_calls`).

Shape suffixes: B batch (1 where sequences are packed), T tokens, Q queries, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenPlaces"]


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The tokens of queries, or of keys."""

    sequence: Tensor
    """To which sequence of its row a token belongs."""
    place: Tensor
    """How many tokens of its sequence are before it."""
    length: Tensor
    """How long its sequence is."""
    is_real: Tensor
    """False for padding."""

    @classmethod
    def packed(cls, starts: Tensor, lengths: Tensor, tokens: int) -> "TokenPlaces":
        """Return those of sequences one after the other, `starts` and `lengths` being theirs.

        Tokens before the next start that are more than the length are padding, and so is the rest.
        """
        at = torch.arange(tokens, device=starts.device)
        # an empty sequence starts where the next one does: the last of them counts
        sequence = torch.searchsorted(starts.contiguous(), at, right=True) - 1
        place = at - starts[sequence]
        length = lengths[sequence]
        return cls(*(x[None] for x in (sequence, place, length, place < length)))

    @classmethod
    def padded(cls, is_real: Tensor) -> "TokenPlaces":
        """Return those of one sequence a row, given which of its tokens are no padding."""
        place = is_real.cumsum(-1) - 1
        length = is_real.sum(-1, keepdim=True).expand_as(place)
        return cls(torch.zeros_like(place), place, length, is_real)

    @classmethod
    def first(cls, lengths_B: Tensor, tokens: int) -> "TokenPlaces":
        """Return those of one sequence a row, whose padding is behind it."""
        at = torch.arange(tokens, device=lengths_B.device)
        return cls.padded(at[None] < lengths_B[:, None])

    def distance(self, keys: "TokenPlaces", *, bottom_right: bool) -> Tensor:
        """Return how far each key is ahead of where each query stands.

        With `bottom_right` a sequence's last query stands at its last key, else its first query at
        its first key.
        """
        stands_BQ = self.place
        if bottom_right:
            stands_BQ = stands_BQ + _length_of(keys, self.sequence) - self.length
        return keys.place[:, None, :] - stands_BQ[:, :, None]

    def visible(
        self,
        keys: "TokenPlaces",
        window: tuple[int | None, int | None],
        *,
        bottom_right: bool = True,
    ) -> Tensor:
        """Return which key a query may attend: of its own sequence, and in the window.

        The window (left, right) is that of `MaskArguments`; (None, 0) is a causal mask.
        """
        left, right = window
        distance = self.distance(keys, bottom_right=bottom_right)
        visible = self.sequence[:, :, None] == keys.sequence[:, None, :]
        visible = visible & self.is_real[:, :, None] & keys.is_real[:, None, :]
        if left is not None:
            visible = visible & (distance >= -left)
        if right is not None:
            visible = visible & (distance <= right)
        return visible[:, None]


def _length_of(keys: TokenPlaces, sequence_BQ: Tensor) -> Tensor:
    """Return how many keys the sequence of each query has, 0 if none."""
    same = sequence_BQ[:, :, None] == keys.sequence[:, None, :]
    return (same & keys.is_real[:, None, :]).sum(-1)
